"""Lp-Proj-2 by ADMM: personal models that agree in a few random projections, and nowhere else.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||P theta_i - w_i||^2)   subject to   w_i = w

FLAME with P theta_i in the place of theta_i: a message has as many numbers as P has rows.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397, appendix C: Algorithm 2, equations (182) to (188), with
p = 2. The client's half is `clients.LpProjADMMClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .blocks import BATCH_NORM, Block, Spec, compile_pattern, optimised, prefixed, spec_of, under
from .checks import check_count, check_positive
from .consensus import Consensus
from .flame import advance, messages
from .weighting import WeightedStrategy
from .wire import Arrays, Order, Reply, Scalar

_IMAGE = "P theta"


@lru_cache(maxsize=2)
def projection(seed: int, num_rows: int, size: int, dtype: str) -> NDArray[Any]:
    """Return P: Gaussian rows of length 1, the same for the same arguments.

    The paper leaves P open; this is the authors' code's (specs 2.5d).

    Returns
    -------
    ndarray of shape (num_rows, size)
        Read-only.
    """
    rows = np.random.default_rng([seed, *b"Lp-Proj"]).standard_normal((num_rows, size))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix = rows.astype(dtype)
    matrix.flags.writeable = False
    return matrix


class LpProjADMM(WeightedStrategy):
    """Federated learning with low-dimensional projections, by ADMM (Lp-Proj-2).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a projected personal model is held near the global variable.
    rho : float (default: 0.1)
        rho, the ADMM penalty parameter; as FLAME's.
    lr : float (default: 0.01)
        eta, the clients' step size.
    local_epochs : int (default: 1)
        H, passes over the data in a round.
    dimension : int (default: 10)
        d_sub, the rows of P: what travels is so many numbers, both ways, after a client's first
        round (in that, it receives the initial model).
    weights : {"uniform", "size"} (default: "uniform")
        alpha_i: 1/m, or n_i/n, which a hand-shake asks for.
    unprojected : str (default: `blocks.BATCH_NORM`)
        Regular expression searched in the arrays' names: arrays that P leaves out, as it must those
        without a gradient. They stay with the client, as do all integers, and are trained on its
        loss alone.
    **base
        The parameters of `StatefulStrategy`. P follows from `seed`, so that it never travels.

    Notes
    -----
    There are personal models only, on their clients (``LpProjADMMClient.personal_arrays()``). What
    is global is w, `dimension` numbers: `global_arrays` holds it, and it is no model.

    A client that connects in mid-run starts with the initial model and w_i = w, and counts in the
    mean from its first accepted upload. When a client has left (`forget_after`), its u_i leaves the
    mean.

    Examples
    --------
    >>> strategy = LpProjADMM(lam=1.0, rho=0.1, lr=0.01, dimension=10)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    def __init__(
        self,
        *,
        lam: float = 1.0,
        rho: float = 0.1,
        lr: float = 0.01,
        local_epochs: int = 1,
        dimension: int = 10,
        weights: Literal["uniform", "size"] = "uniform",
        unprojected: str = BATCH_NORM,
        **base: Any,
    ) -> None:
        super().__init__(weights=weights, **base)
        check_positive("lam", lam)
        check_positive("rho", rho)
        check_positive("lr", lr)
        check_count("local_epochs", local_epochs, least=1)
        check_count("dimension", dimension, least=1)
        self.lam = lam
        self.rho = rho
        self.lr = lr
        self.local_epochs = local_epochs
        self.dimension = dimension
        self.unprojected = unprojected
        self._unprojected = compile_pattern("unprojected", unprojected)
        self._block = Block({})

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        return {
            "lambda": self.lam,
            "rho": self.rho,
            "Learning rate": self.lr,
            "Local epochs": self.local_epochs,
            "Dimension": self.dimension,
            "Weights": self.weights,
        }

    def init_state(self, arrays: Arrays) -> None:
        """Start with theta_i^0 the initial model, w_i^0 = w^0 = P theta_i^0 and pi_i^0 = 0."""
        self._initial = arrays
        self._block = Block(spec_of(optimised(arrays, self._unprojected)))
        if self._block.size < self.dimension:
            raise ValueError(
                f"dimension={self.dimension}, but the model has only {self._block.size} floating "
                "point numbers to project. Give a smaller one."
            )
        theta = self._block.vector(arrays)
        first = projection(self.seed, self.dimension, theta.size, theta.dtype.name) @ theta
        m = len(self.client_ids)
        self.consensus = Consensus(first, m, self.rho, on_clients=True)  # of the u_i
        self.first = first  # P theta^0
        self.images = np.tile(first, (m, 1))  # P theta_i
        self.copies = self.images.copy()  # w_i
        self.start_weights()

    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send w_i, and before a client's first upload the initial model."""
        return {
            client: self._order(
                self.copies[self._index[client]], starts=not self.accepted_in[client]
            )
            for client in client_ids
        }

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Let new clients start with the initial model and w_i = w."""
        return {client: self._order(self.consensus.w, starts=True) for client in newcomers}

    def _order(self, copy: NDArray[Any], *, starts: bool) -> Order:
        groups: dict[str, Arrays] = {"center": {"w_i": copy}}
        if starts:
            groups["start"] = self._initial
        config: dict[str, Scalar] = {
            "lam": float(self.lam),
            "lr": float(self.lr),
            "local-epochs": int(self.local_epochs),
            "projection-seed": int(self.seed),
            "projected": ",".join(self._block.names),
        }
        return Order(groups, config)

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Take new clients into the mean, with the initial model and w_i = w."""
        self.consensus.add(places)
        self.images = np.insert(self.images, places, self.first, axis=0)
        self.copies = np.insert(self.copies, places, self.consensus.w, axis=0)
        self.add_weights(newcomers, places)
        for reply in newcomers.values():  # u_i is not w, which `add` takes it for
            a = np.array([[self.lam * self.weight_of(reply)]])
            own = messages(self.first[None], self.consensus.w[None], a=a, rho=self.rho)[0]
            self.consensus.update_message(own - self.consensus.w)

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Take u_i out of the mean."""
        a = self.lam * self.alpha[indices, None]
        gone = messages(self.images[indices], self.copies[indices], a=a, rho=self.rho)
        self.consensus.remove(indices, gone)
        self.images = np.delete(self.images, indices, axis=0)
        self.copies = np.delete(self.copies, indices, axis=0)
        self.alpha = np.delete(self.alpha, indices)

    def reply_spec(self) -> Spec:
        """Return the shape of P theta_i."""
        return {_IMAGE: ((self.dimension,), self._block.dtype)}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in P theta_i of the participants; w is the mean of u_i over all clients."""
        for client, reply in replies.items():
            index = self._index[client]
            a = self.lam * float(self.alpha[index])
            image, before, copy = reply.arrays[_IMAGE], self.images[index], self.copies[index]
            self.copies[index], change = advance(  # (186), (187)
                image, before, copy, self.consensus.w, a=a, rho=self.rho
            )
            self.images[index] = image
            self.consensus.update_message(change)
        self.consensus.aggregate()  # (188)

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send nothing but to clients without a model of their own yet: the initial one."""
        return {
            client: Order({"personal": {} if self.accepted_in[client] else self._initial})
            for client in client_ids
        }

    def global_model(self) -> Arrays:
        """Return w, which has `dimension` numbers and is no model."""
        return {"w": self.consensus.w}

    def personal_model(self, client_id: int) -> Arrays:
        """Refuse: only P theta_i has left the client."""
        raise RuntimeError(
            "With Lp-Proj personal models stay with their clients: read "
            "LpProjADMMClient(...).personal_arrays() there."
        )

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables, the seed of P and the initial model."""
        return {
            **prefixed("consensus/", self.consensus.state_arrays()),
            **prefixed("initial/", self._initial),
            "images": self.images,
            "copies": self.copies,
            **self.weight_arrays(),
            "projection-seed": np.array(self.seed, dtype=np.uint64),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned.

        Raises
        ------
        ValueError
            If it is of another dimension or of another P.
        """
        if int(arrays["projection-seed"]) != self.seed:
            raise ValueError(
                f"The state was saved with seed={int(arrays['projection-seed'])}, this run has "
                f"seed={self.seed} and so another projection. Continue with the same seed."
            )
        self.consensus.load_state_arrays(under("consensus/", arrays))
        initial = under("initial/", arrays)
        self._initial = {name: initial[name] for name in self._initial}  # the order is the model's
        self.images = arrays["images"].astype(self.images.dtype)
        self.copies = arrays["copies"].astype(self.copies.dtype)
        self.load_weight_arrays(arrays)
