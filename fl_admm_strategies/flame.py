"""FLAME: a personal model for every client and a global one, by ADMM on Moreau envelopes.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w_i||^2)   subject to   w_i = w

A client trains its personal model theta_i near its local copy w_i of the global model w; w_i, its
dual variable pi_i and w then move in closed form.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397: Algorithm 1, equations (11) to (14), (17), (18). The
client's half is `clients.FLAMEClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .blocks import (
    BATCH_NORM,
    Block,
    compile_pattern,
    optimised,
    prefixed,
    spec_of,
    under,
    weighted_average,
)
from .checks import check_choice, check_count, check_fraction, check_positive
from .consensus import Consensus
from .weighting import WeightedStrategy
from .wire import Arrays, Order, Reply, Scalar


def advance(
    theta: NDArray[Any],
    before: NDArray[Any],
    w_i: NDArray[Any],
    w: NDArray[Any],
    *,
    a: float,
    rho: float,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Move one client's variables to those that belong to its new theta_i, (12) and (13).

    pi_i = a (theta_i - w_i) before and after (Lemma 3), so it is not kept, and rounding does not
    add up in it over the rounds.

    Parameters
    ----------
    theta, before : ndarray of shape (d,)
        theta_i, new and old.
    w_i, w : ndarray of shape (d,)
        The old w_i and the w that the server sent.
    a : float
        lambda alpha_i.
    rho : float

    Returns
    -------
    w_i, change : ndarray of shape (d,)
        The new w_i, and what it changes in the message u_i = w_i + pi_i/rho.
    """
    dual = a * (before - w_i)
    new = (a * theta + rho * w - dual) / (a + rho)
    change = (new + a * (theta - new) / rho) - (w_i + dual / rho)
    return new, change


def messages(
    thetas: NDArray[Any], copies: NDArray[Any], *, a: NDArray[np.float64], rho: float
) -> NDArray[Any]:
    """Return u_i = w_i + pi_i/rho with pi_i = a_i (theta_i - w_i).

    Parameters
    ----------
    thetas, copies : ndarray of shape (k, d)
        theta_i and w_i.
    a : ndarray of shape (k, 1)
        lambda alpha_i.
    rho : float

    Returns
    -------
    ndarray of shape (k, d)
    """
    result: NDArray[Any] = copies + a / rho * (thetas - copies)
    return result


class FLAME(WeightedStrategy):
    """Federated learning by ADMM with Moreau envelopes (FLAME).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a personal model is held near the global one.
    rho : float (default: 0.1)
        rho, the ADMM penalty parameter. Beside it stands a_i = lambda alpha_i: at rho = a_i, where
        all of the paper's experiments are, a client's message is theta_i itself (specs 2.4). The
        Lagrangian is sure to decrease for convex f_i and exact steps from rho = 2.5616 a_i on
        (specs 3.4).
    lr : float (default: 0.01)
        eta, the step size of the theta-step, for the plain loss: alpha_i does not scale it. With
        ``theta_step="accuracy"`` 1/(L + lambda) is safe.
    local_epochs : int (default: 1)
        H, passes over the data in a round; unused unless ``theta_step="fixed"``.
    anchor : {"w_i", "w"} (default: "w_i")
        What the theta-step is pulled to: the local copy w_i^t (the paper), or the global w^t (the
        authors' released code). Another algorithm with the same fixed points (specs 6.3).
    theta_step : {"fixed", "accuracy", "exact"} (default: "fixed")
        H epochs; full-gradient steps until ||alpha_i (grad f_i + lambda (theta_i - w_i))||^2 <=
        epsilon_i (17); or the minimiser, by the client's own ``FLAMEClient(prox=...)``.
    tolerance : float (default: 1.0)
        epsilon_i^0 of "accuracy". The paper gives no value.
    tolerance_decay : float (default: 0.9)
        upsilon_i: epsilon_i <- upsilon_i epsilon_i in every round of client i, the first included
        (18). The paper gives no value.
    max_steps : int (default: 1000)
        Steps after which "accuracy" gives up; the clients' metric ``residual`` tells.
    weights : {"uniform", "size"} (default: "uniform")
        alpha_i: 1/m, or n_i/n, which a hand-shake asks for. The server's mean is over all clients
        alike in any case: the fixed point is w = sum_i alpha_i theta_i all the same (specs 6.7).
    duals : {"strategy", "client"} (default: "strategy")
        Where theta_i, w_i and pi_i live. "strategy": w_i (or w) goes down, theta_i comes up, and
        the strategy has every personal model. "client", the paper's own placement: w goes down, the
        change of u_i = w_i + pi_i/rho comes up, personal models never leave their clients, and the
        server needs O(d) memory. The same trajectory up to rounding, the same bytes. Should a
        client lose its state, it goes on from theta_i as the server has it with "strategy". With
        "client" the server's sum of the u_i cannot be put right, so all clients start afresh from
        theta_i = w_i = w; likewise when a client has left.
    averaged : str (default: `blocks.BATCH_NORM`)
        Regular expression searched in the arrays' names: arrays without a gradient, which are
        averaged over the participants, weighted by their examples, as are all integers.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    The clients report three kinds of models (section VI-A): ``personal``, ``global``, and the
    hybrid, where every client takes the better of the two for itself: ``hm-val``, chosen on
    validation data of its own, and ``hm-oracle``, chosen on the test data as the paper's tables
    are, which is too good to be true; see `clients.FLAMEClient`.

    The result of H epochs is theta^{t,H} (printed as theta^{t,H-1}, specs 6.1), and the global
    model is one aggregation ahead of the one that Algorithm 1 returns (specs 6.6).

    A client that connects in mid-run starts with theta_i = w_i = w and counts in the mean from its
    first accepted upload; before it, u_i = w would leave the mean as it is. When a client has left
    (`forget_after`), its u_i leaves the mean.

    Examples
    --------
    >>> strategy = FLAME(lam=1.0, rho=0.1, lr=0.01)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    >>> personal = strategy.personal_arrays(client_id=3)
    """

    def __init__(
        self,
        *,
        lam: float = 1.0,
        rho: float = 0.1,
        lr: float = 0.01,
        local_epochs: int = 1,
        anchor: Literal["w_i", "w"] = "w_i",
        theta_step: Literal["fixed", "accuracy", "exact"] = "fixed",
        tolerance: float = 1.0,
        tolerance_decay: float = 0.9,
        max_steps: int = 1000,
        weights: Literal["uniform", "size"] = "uniform",
        duals: Literal["strategy", "client"] = "strategy",
        averaged: str = BATCH_NORM,
        **base: Any,
    ) -> None:
        super().__init__(weights=weights, **base)
        check_positive("lam", lam)
        check_positive("rho", rho)
        check_positive("lr", lr)
        check_count("local_epochs", local_epochs, least=1)
        check_choice("anchor", anchor, ("w_i", "w"))
        check_choice("theta_step", theta_step, ("fixed", "accuracy", "exact"))
        check_positive("tolerance", tolerance)
        check_fraction("tolerance_decay", tolerance_decay, zero=False)
        check_count("max_steps", max_steps, least=1)
        check_choice("duals", duals, ("strategy", "client"))
        self.lam = lam
        self.rho = rho
        self.lr = lr
        self.local_epochs = local_epochs
        self.anchor = anchor
        self.theta_step = theta_step
        self.tolerance = tolerance
        self.tolerance_decay = tolerance_decay
        self.max_steps = max_steps
        self.duals = duals
        self.averaged = averaged
        self._averaged = compile_pattern("averaged", averaged)
        self._block = Block({})

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        step: dict[str, Any] = {"Theta-step": self.theta_step}
        if self.theta_step == "fixed":
            step |= {"Learning rate": self.lr, "Local epochs": self.local_epochs}
        elif self.theta_step == "accuracy":
            step |= {"Learning rate": self.lr, "Tolerance": self.tolerance}
            step |= {"Decay of the tolerance": self.tolerance_decay}
        return {
            "lambda": self.lam,
            "rho": self.rho,
            **step,
            "Anchor": self.anchor,
            "Weights": self.weights,
            "Duals in the": self.duals,
        }

    # ------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> None:
        """Start with theta_i^0 = w_i^0 = w^0, the initial model, so pi_i^0 = 0 as (33) wants."""
        shared = optimised(arrays, self._averaged)
        self._block = Block(spec_of(shared))
        first = self._block.vector(arrays)
        m = len(self.client_ids)
        self.consensus = Consensus(first, m, self.rho, on_clients=True)  # of the u_i
        rows = m if self.duals == "strategy" else 0
        self.thetas = np.tile(first, (rows, 1))  # theta_i
        self.copies = self.thetas.copy()  # w_i
        self.others = {name: array for name, array in arrays.items() if name not in shared}
        self.start_weights()
        self.tolerances: NDArray[np.float64] = np.full(m, float(self.tolerance))  # epsilon_i

    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send what theta_i is pulled to, or w where clients keep their own variables.

        theta_i is sent along where the client may not hold it: before its first upload
        theta_i^0 = w^0.
        """
        return {client: self._order(client) for client in client_ids}

    def _order(self, client: int) -> Order:
        index = self._index[client]
        if self.duals == "strategy":
            center = self.copies[index] if self.anchor == "w_i" else self.consensus.w
            start = None if self.in_sync(client) else self.thetas[index]
        else:
            center = self.consensus.w
            starts = self.consensus.starts(self.accepted_in[client])
            start = self.consensus.first if starts else None
        groups = {"center": self._model(center)}
        if start is not None:
            groups["start"] = self._block.arrays(start)
        weight, tolerance = float(self.alpha[index]), float(self.tolerances[index])
        return Order(groups, self._settings(weight, tolerance))

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Let new clients start with theta_i = w_i = w, so pi_i = 0."""
        groups = {"center": self._model(self.consensus.w)}
        groups["start"] = self._block.arrays(self.consensus.w)
        return {
            client: Order(groups, self._settings(self.weight_of(reply), float(self.tolerance)))
            for client, reply in newcomers.items()
        }

    def _settings(self, alpha: float, tolerance: float) -> dict[str, Scalar]:
        return {
            "lam": float(self.lam),
            "rho": float(self.rho),
            "alpha": alpha,
            "anchor": self.anchor,
            "theta-step": self.theta_step,
            "lr": float(self.lr),
            "local-epochs": int(self.local_epochs),
            "tolerance": tolerance * float(self.tolerance_decay),  # (18)
            "max-steps": int(self.max_steps),
            "duals": self.duals,
            "shared": ",".join(self._block.names),
        }

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in theta_i, or the change of u_i, of the participants; w is the mean over all."""
        for client, reply in replies.items():
            index = self._index[client]
            vector = self._block.vector(reply.arrays)
            if self.duals == "strategy":
                a = self.lam * float(self.alpha[index])
                before, copy = self.thetas[index], self.copies[index]
                self.copies[index], change = advance(
                    vector, before, copy, self.consensus.w, a=a, rho=self.rho
                )
                self.thetas[index] = vector
            else:
                change = vector
            self.consensus.update_message(change)
            self.tolerances[index] *= self.tolerance_decay
        self.consensus.aggregate()  # (14)
        self.others = weighted_average(self.others, replies)

    def start_afresh(self, server_round: int, lost: Sequence[int]) -> None:
        """Start everybody from w where clients keep their variables, see `Consensus.restart`."""
        if self.duals == "client":
            self.consensus.restart(server_round)

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Take new clients into the mean, with theta_i = w_i = w and so u_i = w."""
        self.consensus.add(places)
        if self.duals == "strategy":
            self.thetas = np.insert(self.thetas, places, self.consensus.w, axis=0)
            self.copies = np.insert(self.copies, places, self.consensus.w, axis=0)
        self.tolerances = np.insert(self.tolerances, places, float(self.tolerance))
        self.add_weights(newcomers, places)

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Take u_i out of the mean; where nobody here knows it, everybody starts from w."""
        if self.duals == "strategy":
            a = self.lam * self.alpha[indices, None]
            gone = messages(self.thetas[indices], self.copies[indices], a=a, rho=self.rho)
            self.consensus.remove(indices, gone)
            self.thetas = np.delete(self.thetas, indices, axis=0)
            self.copies = np.delete(self.copies, indices, axis=0)
        else:
            self.consensus.restart(self.last_round, left=len(indices))
        self.tolerances = np.delete(self.tolerances, indices)
        self.alpha = np.delete(self.alpha, indices)

    # ------------------------------------------------------------------------------------------
    # Models
    # ------------------------------------------------------------------------------------------

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send everybody its personal model, unless it keeps that itself, and the global model."""
        model = self.global_model()
        orders = {}
        for client in client_ids:
            if self.duals == "strategy":
                groups = {"personal": self.personal_model(client), "global": model}
            elif self.accepted_in[client]:
                groups = {"global": model}
            else:
                groups = {"global": model, "start": self._block.arrays(self.consensus.first)}
            orders[client] = Order(groups, {"shared": ",".join(self._block.names)})
        return orders

    def global_model(self) -> Arrays:
        """Return w."""
        return self._model(self.consensus.w)

    def personal_model(self, client_id: int) -> Arrays:
        """Return theta_i, with the averaged arrays of the global model."""
        if self.duals == "client":
            raise RuntimeError(
                "With duals='client' personal models stay with their clients: read "
                "FLAMEClient(...).personal_arrays() there, or use duals='strategy'."
            )
        return self._model(self.thetas[self._index[client_id]])

    def _model(self, vector: NDArray[Any]) -> Arrays:
        """Return a whole model: the block from a d-vector, the averaged arrays as they are."""
        arrays = self.others | self._block.arrays(vector)
        return {name: arrays[name] for name in self._spec}

    # ------------------------------------------------------------------------------------------
    # Checkpoints
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables, epsilon_i and alpha_i among them."""
        return {
            **prefixed("consensus/", self.consensus.state_arrays()),
            **prefixed("others/", self.others),
            "thetas": self.thetas,
            "copies": self.copies,
            "tolerances": self.tolerances,
            **self.weight_arrays(),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        self.consensus.load_state_arrays(under("consensus/", arrays))
        self.thetas = arrays["thetas"].astype(self.thetas.dtype)
        self.copies = arrays["copies"].astype(self.copies.dtype)
        self.tolerances = arrays["tolerances"].astype(np.float64)
        self.others = under("others/", arrays)
        self.load_weight_arrays(arrays)
