"""FedGiA: federated learning by gradient descent and inexact ADMM.

In every round all clients compute one gradient at the server's point x. A random group then takes
k0 steps of inexact ADMM with it, the others one gradient step; the server averages what they send.

Zhou, Li, "Efficient and Convergent Federated Learning", arXiv:2205.01438 (published as "FedGiA: An
Efficient Hybrid Algorithm for Federated Learning", IEEE TSP 71, 2023): Algorithm 1, equations (12)
to (18), the choices of H_i and sigma of Table II. tau_k is the ceiling of k/k0 (its brackets are
printed as a floor's, specs 6.1), so x stays for k0 steps. The client's half is
`clients.FedGiAClient` and `clients.FedGiALinearClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from .blocks import Block, Spec, spec_of
from .checks import check_choice, check_count, check_fraction, check_positive, listing
from .strategy import Metrics, StatefulStrategy, StopRule
from .wire import Arrays, Order, Reply, Scalar

_DUAL = "dual/"
_GRADIENT = "gradient/"


@dataclass
class FedGiAState:
    """The server's variables, for m clients and n parameters.

    Attributes
    ----------
    messages : ndarray of shape (m, n)
        z_i, every client's last message.
    duals : ndarray of shape (m, n)
        pi_i; (0, n) where the clients keep them.
    curvatures : ndarray of shape (m,)
        r_i; NaN before the hand-shake.
    seed : int
        Draws the group of every round.
    x : ndarray of shape (n,)
        The mean of the z_i, which the next round starts from.
    point : ndarray of shape (n,)
        x of the last round that changed the state: where the clients computed their gradients.
    objective, squared_gradient : float
        f(x) and ||grad f(x)||^2 there; NaN where not every client reported.
    """

    messages: NDArray[Any]
    duals: NDArray[Any]
    curvatures: NDArray[np.float64]
    seed: int
    x: NDArray[Any]
    point: NDArray[Any]
    objective: float = math.nan
    squared_gradient: float = math.nan


@dataclass(frozen=True)
class FedGiADiagnostics:
    """What Table III reports of a run; see `FedGiA.diagnostics`.

    Attributes
    ----------
    arrays : Arrays
        x, the point of the last round: the one that the other numbers belong to. The global model
        is one aggregation further.
    objective : float
        f(x) = (1/m) sum_i f_i(x); NaN where a client's reply was missing.
    squared_gradient : float
        ||grad f(x)||^2; NaN where it is not known.
    communication_rounds : int
        CR: the rounds of local work that led to x (specs 6.6).
    """

    arrays: Arrays
    objective: float
    squared_gradient: float
    communication_rounds: int


class FedGiA(StatefulStrategy):
    """Federated gradient descent and inexact ADMM (FedGiA).

    Minimises f(x) = (1/m) sum_i f_i(x), all clients counting equally. Every client takes part in
    every round, so there is no `fraction_train`; a client whose reply is missing counts with its
    last z_i, until it has left the run (`forget_after`).

    Parameters
    ----------
    t : float (default: 0.15)
        sigma = t r/m with r = max_i r_i, the penalty parameter. The default is Table II's for
        linear regression; for logistic regression it has max(0.1, 8 ln(d)/n). Larger is slower and
        safer: the theory wants t > 6, and the limit of large k0, gradient descent with step
        1/(t r), needs t > L/(2r) with L the curvature of f itself (specs 6.2).
    hessian : {'diagonal', 'gram'} (default: 'diagonal')
        H_i: r_i I (FedGiA_D, for any loss) or the Gram matrix of the client's data (FedGiA_G, for
        `clients.FedGiALinearClient`).
    local_steps : int (default: 5)
        k0, the inexact ADMM steps of a round. They cost no gradient, and as much as one step.
    fraction_admm : float (default: 0.5)
        s, the share of clients in the inexact ADMM group, ceil(s m) of them, drawn anew every
        round; the others take the gradient step.
    curvature : float or mapping of int to float, optional
        r_i, of all clients or by client id. By default every client reports its own in a hand-shake
        before round 1, as does one that comes later and is not in the mapping.
    duals : {'strategy', 'client'} (default: 'strategy')
        Where pi_i lives. 'strategy': it travels both ways (down 2n numbers for the ADMM group and n
        for the others, up 2n) and clients keep nothing. 'client': the paper's wire, n down and n
        up; the same trajectory up to rounding. A client that has lost its pi_i goes on with
        pi_i = 0; its z_i is here.
    report_gradient : bool (default: False)
        Find out ||grad f(x)||^2, the norm of a sum over all clients, in every round. Every client
        sends its gradient along (n more numbers up, counted in `traffic`), except with
        hessian='diagonal' and duals='strategy', where it follows from z_i and pi_i by (34).
    **base
        The parameters of `StatefulStrategy` but `fraction_train`.

    Notes
    -----
    ||grad f||^2 belongs to the point x that a round started from: the gradients come with the
    round's replies. `gradient_tolerance` makes a stop rule of it.

    The first step may increase the augmented Lagrangian, whatever t is: with pi_i^0 = 0 equation
    (34), on which the descent lemma rests, holds only from the second on (specs 3).

    A client that connects in mid-run is asked for its r_i, takes the gradient step in its first
    round and counts from its first accepted upload on. In sigma and in the clients' steps m stays
    what it was at the start: the same algorithm for m'/m times f with the m' clients there are, so
    that nobody's pi_i changes its scale.

    Examples
    --------
    >>> strategy = FedGiA(t=0.15, local_steps=10, report_gradient=True)
    >>> stop = strategy.gradient_tolerance(1e-9)
    >>> result = strategy.start(grid, ArrayRecord({"x": Array(np.zeros(100))}), 1000, stop=stop)
    >>> strategy.diagnostics().communication_rounds
    7
    """

    def __init__(
        self,
        *,
        t: float = 0.15,
        hessian: Literal["diagonal", "gram"] = "diagonal",
        local_steps: int = 5,
        fraction_admm: float = 0.5,
        curvature: float | Mapping[int, float] | None = None,
        duals: Literal["strategy", "client"] = "strategy",
        report_gradient: bool = False,
        **base: Any,
    ) -> None:
        if "fraction_train" in base:
            raise TypeError(
                "FedGiA takes no fraction_train: all clients train in every round, since (12) is "
                "a mean over all. fraction_admm is the share of them in the inexact ADMM group."
            )
        super().__init__(**base)
        check_positive("t", t)
        check_count("local_steps", local_steps, least=1)
        check_fraction("fraction_admm", fraction_admm, zero=False)
        check_choice("hessian", hessian, ("diagonal", "gram"))
        check_choice("duals", duals, ("strategy", "client"))
        if isinstance(curvature, Mapping):
            for client, value in curvature.items():
                check_positive(f"curvature of client {client}", value)
        elif curvature is not None:
            check_positive("curvature", curvature)
        self.t = t
        self.hessian = hessian
        self.local_steps = local_steps
        self.fraction_admm = fraction_admm
        self.curvature = curvature
        self.duals = duals
        self.report_gradient = report_gradient
        recovered = hessian == "diagonal" and duals == "strategy"
        self._sends_gradient = report_gradient and not recovered
        self._block = Block({})

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        curvature = "from the clients" if self.curvature is None else "one for each client"
        return {
            "t": self.t,
            "H_i": self.hessian,
            "Local steps": self.local_steps,
            "Fraction in the ADMM group": self.fraction_admm,
            "Curvature": self.curvature if isinstance(self.curvature, int | float) else curvature,
            "Duals": self.duals,
        }

    # ------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> None:
        """Start with z_i = x^0 and pi_i = 0 for every client."""
        floating = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
        if not floating:
            raise ValueError("The model has no array of floating point numbers to train.")
        self._block = Block(spec_of(floating))
        self._fixed = {name: array for name, array in arrays.items() if name not in floating}
        first = self._block.vector(arrays)
        m = len(self.client_ids)
        if self._group_size(m) < 1:
            raise ValueError(
                f"fraction_admm={self.fraction_admm} of {m} clients is nobody; give at least "
                f"{1 / m:.2g}."
            )
        self.state = FedGiAState(
            messages=np.tile(first, (m, 1)),
            duals=np.zeros((m if self.duals == "strategy" else 0, first.size), first.dtype),
            curvatures=np.array([self._given(client) for client in self.client_ids]),
            seed=self.seed,
            x=first,
            point=first,
        )
        if self.t <= 6:
            log(INFO, "FedGiA: t = %s; the convergence theory assumes t > 6", self.t)

    def _given(self, client: int) -> float:
        """Return a client's r_i as it was given; NaN where it was not."""
        if isinstance(self.curvature, Mapping):
            return float(self.curvature.get(client, math.nan))
        return math.nan if self.curvature is None else float(self.curvature)

    def handshake_orders(self, client_ids: Sequence[int]) -> dict[int, Order]:
        """Ask clients for their r_i, at the global model, unless it was given.

        Raises
        ------
        ValueError
            If r_i was given for some of those only that are there from the start.
        """
        missing = [client for client in client_ids if math.isnan(self._given(client))]
        if self.curvature and (founders := [c for c in missing if c in self._index]):
            raise ValueError(f"curvature has no value for the clients {listing(founders)}.")
        order = Order({"global": self.global_model()}, {"hessian": self.hessian})
        return dict.fromkeys(missing, order)

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Take in every r_i; say what the clients found in their data."""
        for client, reply in replies.items():
            self.state.curvatures[self._index[client]] = self._curvature(client, reply)
        for kind in ("zero", "constant"):
            counts = [reply.metrics.get(f"{kind}-columns", 0) for reply in replies.values()]
            if any(counts):
                log(
                    INFO,
                    "FedGiA: %s of %s clients have %s data columns, up to %d; H_i/m + sigma I is "
                    "invertible all the same",
                    np.count_nonzero(counts),
                    len(counts),
                    "all-zero" if kind == "zero" else kind,
                    max(counts),
                )

    def _curvature(self, client: int, reply: Reply) -> float:
        """Return r_i as it was given, or as the client's reply to the hand-shake has it."""
        if not math.isnan(given := self._given(client)):
            return given
        reported = reply.metrics.get("curvature", math.nan)
        check_positive(f"The curvature that client {client} reported", reported)
        return reported

    @property
    def sigma(self) -> float:
        """The penalty parameter, t r/m with r = max_i r_i; NaN before the hand-shake."""
        self._need_state()
        return self.t * float(self.state.curvatures.max()) / self.num_founders

    def admm_group(self, server_round: int) -> NDArray[np.bool_]:
        """Return which clients are in the inexact ADMM group C of a round, shape (m,).

        Uniform without replacement; a function of the seed and the round alone, so that a run which
        was continued from a saved state draws the same.
        """
        m = len(self.client_ids)
        rng = np.random.default_rng([self.state.seed, server_round, *b"FedGiA"])
        group = np.zeros(m, dtype=np.bool_)
        group[rng.choice(m, size=self._group_size(m), replace=False)] = True
        return group

    def _group_size(self, num_clients: int) -> int:
        # ceil(s m), as the authors round it (specs 6.9), less roundings such as 0.07 * 100 > 7.
        return math.ceil(self.fraction_admm * num_clients - 1e-9)

    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send x (and pi_i) to every client, and which group it is in."""
        everybody = self.global_model()
        in_admm = self.admm_group(server_round)
        orders = {}
        for client in client_ids:
            index = self._index[client]
            groups = {"global": everybody}
            if self.duals == "strategy" and in_admm[index]:  # the others need none
                groups["dual"] = self._block.arrays(self.state.duals[index])
            config = self._settings(float(self.state.curvatures[index]), admm=bool(in_admm[index]))
            orders[client] = Order(groups, config)
        return orders

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Send x to new clients, for a gradient step, which finds their pi_i at once."""
        groups = {"global": self.global_model()}
        return {
            client: Order(groups, self._settings(self._curvature(client, reply), admm=False))
            for client, reply in newcomers.items()
        }

    def _settings(self, curvature: float, *, admm: bool) -> dict[str, Scalar]:
        return {
            "admm": admm,
            "hessian": self.hessian,
            "curvature": curvature,
            "sigma": self.sigma,
            "num-clients": self.num_founders,
            "local-steps": int(self.local_steps),
            "keep-dual": self.duals == "client",
            "report-gradient": self._sends_gradient,
        }

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Take in r_i of new clients; z_i and pi_i come with the update that follows."""
        state = self.state
        new = [self._curvature(client, reply) for client, reply in newcomers.items()]
        state.messages = np.insert(state.messages, places, state.x, axis=0)
        if self.duals == "strategy":
            state.duals = np.insert(state.duals, places, 0, axis=0)
        state.curvatures = np.insert(state.curvatures, places, new)

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Take clients out of the mean; x follows with the next update."""
        state = self.state
        state.messages = np.delete(state.messages, indices, axis=0)
        if self.duals == "strategy":
            state.duals = np.delete(state.duals, indices, axis=0)
        state.curvatures = np.delete(state.curvatures, indices)

    def reply_spec(self) -> Spec:
        """Return the model's arrays for z_i, and further sets for pi_i and the gradient."""
        spec = dict(self._spec)
        for prefix in self._prefixes():
            spec |= {prefix + name: entry for name, entry in self._block.spec.items()}
        return spec

    def _prefixes(self) -> list[str]:
        return [_DUAL] * (self.duals == "strategy") + [_GRADIENT] * self._sends_gradient

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in every z_i and pi_i, then what they say about f at the point that was sent."""
        state = self.state
        total = np.zeros(self._block.size)
        gradient = np.zeros(self._block.size)  # sum_i grad f_i(x)/m, m being that of the start
        for client, index in self._index.items():
            if client in replies:
                reply = replies[client]
                self._store(reply, "", state.messages[index])
                if self.duals == "strategy":
                    self._store(reply, _DUAL, state.duals[index])
                if self._sends_gradient:
                    gradient += self._store(reply, _GRADIENT, np.empty_like(state.x))
                elif self.report_gradient:
                    self._add_gradient(index, gradient)
            total += state.messages[index]
        state.point, state.x = state.x, self._mean(total)  # (12)
        everybody = len(replies) == len(self.client_ids)
        losses = [reply.metrics.get("loss", math.nan) for reply in replies.values()]
        state.objective = float(np.mean(losses)) if everybody else math.nan
        known = everybody and self.report_gradient
        gradient *= self.num_founders / len(self.client_ids)
        state.squared_gradient = float(np.sum(gradient**2)) if known else math.nan

    def _mean(self, total: NDArray[np.float64]) -> NDArray[Any]:
        return (total / len(self.client_ids)).astype(self._block.dtype)

    def _store(self, reply: Reply, prefix: str, row: NDArray[Any]) -> NDArray[Any]:
        """Put one set of a reply's arrays into a row of shape (n,)."""
        arrays = [reply.arrays[prefix + name].ravel() for name in self._block.spec]
        return np.concatenate(arrays, out=row)

    def _add_gradient(self, index: int, gradient: NDArray[np.float64]) -> None:
        """Add grad f_i(x)/m = -pi_i - (r_i/m) (x_i - x), which is (34) with H_i = r_i I."""
        state = self.state
        weight = float(state.curvatures[index]) / self.num_founders
        moved = np.subtract(state.messages[index], state.x, dtype=np.float64)
        moved *= weight  # x_i - x = (z_i - x) - pi_i/sigma, by (15)
        gradient -= moved
        np.multiply(state.duals[index], weight / self.sigma - 1, out=moved, dtype=np.float64)
        gradient += moved

    # ------------------------------------------------------------------------------------------
    # Results
    # ------------------------------------------------------------------------------------------

    def round_metrics(self) -> Metrics:
        """Return f(x) and ||grad f(x)||^2 at the point of the last round, where they are known."""
        known = {
            "objective": self.state.objective,
            "squared-gradient": self.state.squared_gradient,
        }
        return {name: value for name, value in known.items() if not math.isnan(value)}

    def diagnostics(self) -> FedGiADiagnostics:
        """Return what Table III reports: f(x), ||grad f(x)||^2 and CR at the last round's x."""
        self._need_state()
        return FedGiADiagnostics(
            arrays=self._model(self.state.point),
            objective=self.state.objective,
            squared_gradient=self.state.squared_gradient,
            communication_rounds=max(self._round - 1, 0),
        )

    def gradient_tolerance(self, per_parameter: float = 1e-9) -> StopRule:
        """Return a rule for ``start(stop=...)``: stop at ||grad f(x)||^2 <= n per_parameter (30).

        A round in which a client's reply is missing does not stop the run: the gradient is unknown.

        Parameters
        ----------
        per_parameter : float (default: 1e-9)
            The tolerance for each of the n parameters.

        Raises
        ------
        ValueError
            Without `report_gradient`.
        """
        check_positive("per_parameter", per_parameter)
        if not self.report_gradient:
            raise ValueError("Give FedGiA(report_gradient=True): without, grad f(x) is not known.")
        return lambda server_round, metrics: (
            self.state.squared_gradient <= self._block.size * per_parameter
        )

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send the global model to each client."""
        return dict.fromkeys(client_ids, Order({"global": self.global_model()}))

    def global_model(self) -> Arrays:
        """Return x, the mean of all z_i."""
        return self._model(self.state.x)

    def personal_model(self, client_id: int) -> Arrays:
        """Return the global model: the clients share one, their x_i are only steps towards it."""
        return self.global_model()

    def _model(self, vector: NDArray[Any]) -> Arrays:
        arrays = self._fixed | self._block.arrays(vector)
        return {name: arrays[name] for name in self._spec}

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables."""
        state = self.state
        return {
            "messages": state.messages,
            "duals": state.duals,
            "curvatures": state.curvatures,
            "seed": np.array(state.seed, dtype=np.uint64),
            "point": state.point,
            "measures": np.array([state.objective, state.squared_gradient]),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        dtype = self._block.dtype
        objective, squared_gradient = (float(value) for value in arrays["measures"])
        self.state = FedGiAState(
            messages=arrays["messages"].astype(dtype),
            duals=arrays["duals"].astype(dtype),
            curvatures=arrays["curvatures"].astype(np.float64),
            seed=int(arrays["seed"]),
            x=self.state.x,
            point=arrays["point"].astype(dtype),
            objective=objective,
            squared_gradient=squared_gradient,
        )
        total = np.zeros(self._block.size)
        for message in self.state.messages:  # in the order of `update`, for the same bits
            total += message
        self.state.x = self._mean(total)
