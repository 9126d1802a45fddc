"""FedGiA: federated learning by gradient descent and inexact ADMM.

In every round all clients compute one gradient at the server's point x. A random group then takes
k0 steps of inexact ADMM with it, the others one gradient step; the server averages what they send.

Zhou, Li, "Efficient and Convergent Federated Learning", arXiv:2205.01438 (published as "FedGiA: An
Efficient Hybrid Algorithm for Federated Learning", IEEE TSP 71, 2023): Algorithm 1, equations (12)
to (18), the choices of H_i and sigma of Table II; see docs/methods/fedgia.md. tau_k is the ceiling
of k/k0 (its brackets are printed as a floor's, P1), so x stays for k0 steps. The clients are
`clients.FedGiAClient` and `clients.FedGiALinearClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, Spec, under
from ..maths.checks import Count, Fraction, Positive, check_positive, largest_allowed, listing
from ..maths.clienttable import ClientTable, Row
from ..maths.seeds import short
from ..runtime.algorithm import OnClient
from ..runtime.callbacks import StopRule
from ..runtime.messages.records import ClientInstruction, Metrics, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.strategy import StatefulStrategy
from ..runtime.trust.means import largest_reported, those_too_large, too_large
from .shared.base import FORGETS, Duals

DUAL = "dual/"
"""Before the names of the arrays of pi_i in an upload; those of z_i have the model's names."""
GRADIENT = "gradient/"
"""Before those of grad f_i(x)/m."""

_MOST_GROWTH = 10.0
"""Of the curvature, from one round to the next."""
_IF_RIGHT = "If that is right, give FedGiA a curvature for it"
_SMALLEST_STEP = 1e-4
"""Of the model's norm: over shorter ones a change of the gradient in float32 is mostly rounding."""


@dataclass
class FedGiAState:
    """The server's variables, for n parameters.

    Attributes
    ----------
    clients : ClientTable
        Rows ``message`` (z_i, the client's last) and, where the strategy keeps it, ``pi`` (pi_i),
        shape (n,); ``curvature`` (r_i), NaN where it is not known yet.
    x : ndarray of shape (n,)
        The mean of the z_i, which the next round starts from.
    point : ndarray of shape (n,)
        x of the last round that changed the state: where the clients computed their gradients.
    group_seed : int
        Draws the group of every round.
    objective, squared_gradient : float
        f(x) and ||grad f(x)||^2 at `point`; NaN where not every client reported.
    slope, slope_point : ndarray of shape (n,)
        The last gradient of f that is known, and where; of shape (0,) where nothing is followed.
    noise : ndarray of shape (n,)
        What `privacy` has added to the sum of the z_i; of shape (0,) where that adds nothing.
    num_slopes : int
        How many were known since the set of clients last changed.
    path_curvature, next_curvature : float
        The largest curvature of f between two such points so far, and what is expected of the next.
    """

    clients: ClientTable
    x: NDArray[Any]
    point: NDArray[Any]
    group_seed: int
    slope: NDArray[np.float64]
    slope_point: NDArray[np.float64]
    noise: NDArray[np.float64]
    num_slopes: int = 0
    objective: float = math.nan
    squared_gradient: float = math.nan
    path_curvature: float = 0.0
    next_curvature: float = 0.0


@dataclass(frozen=True)
class FedGiAQuestion(Instruction):
    """The handshake: it asks for r_i at this model."""

    model: Arrays
    hessian: str


@dataclass(frozen=True)
class FedGiAInstruction(Instruction):
    """What a client gets: x, and pi_i if it is in the ADMM group and does not keep it."""

    model: Arrays
    dual: Arrays | None
    admm: bool
    hessian: str
    curvature: float
    sigma: float
    num_clients: int
    local_steps: int
    keep_dual: bool
    report_gradient: bool

    def model_of(self, upload: Arrays, metrics: Mapping[str, Any], held: Arrays) -> Arrays:
        """Return z_i, of which x is the mean; pi_i comes back to this client alone."""
        return {name: upload[name] for name in self.model}


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
        CR: the rounds of local work that led to x.
    """

    arrays: Arrays
    objective: float
    squared_gradient: float
    communication_rounds: int


class FedGiA(StatefulStrategy):
    """Federated gradient descent and inexact ADMM (FedGiA).

    Minimises f(x) = (1/m) sum_i f_i(x), all clients counting equally. Every client takes part in
    every round, so there is no `fraction_train`; a client whose reply is missing counts with its
    last z_i, until it has left the run (`max_missed_rounds`).

    Parameters
    ----------
    t : float, optional
        sigma = t r/m with r = max_i r_i, the penalty parameter. Larger is slower and safer: the
        theory wants t > 6, and the limit of large k0, gradient descent with step 1/(t r), needs
        t > L/(2r) with L the curvature of f itself (docs/methods/fedgia-notes.md, P2). By default t
        r is twice L as far as it is known: at first the mean of the r_i, then the largest curvature
        ||grad f(x) - grad f(x')|| / ||x - x'|| between two rounds, and once more what it grew by in
        the last one, since a network's grows from where the r_i were measured. The paper has 0.15
        for linear regression and max(0.1, 8 ln(d)/n) for logistic regression (Table II), which are
        faster there and diverge on like clients.
    hessian : {'diagonal', 'gram'} (default: 'diagonal')
        H_i: r_i I (FedGiA_D, for any loss) or the Gram matrix of the client's data (FedGiA_G, for
        `clients.FedGiALinearClient`).
    local_steps : int (default: 5)
        k0, the inexact ADMM steps of a round. They cost no gradient, and as much as one step.
    fraction_admm : float (default: 0.5)
        s, the share of clients in the inexact ADMM group, ceil(s m) of them, drawn anew every
        round; the others take the gradient step.
    curvature : float or mapping of int to float, optional
        r_i, of all clients or by client id. By default every client reports its own in a handshake
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
        The parameters of `StatefulStrategy`.

    Notes
    -----
    ||grad f||^2 belongs to the point x that a round started from: the gradients come with the
    round's replies. `gradient_tolerance` makes a stop rule of it.

    The first step may increase the augmented Lagrangian, whatever t is: with pi_i^0 = 0 equation
    (34), on which the descent lemma rests, holds only from the second on.

    A client that connects in mid-run is asked for its r_i, takes the gradient step in its first
    round and counts from its first accepted upload on. In sigma and in the clients' steps m stays
    what it was at the start: the same algorithm for m'/m times f with the m' clients there are, so
    that nobody's pi_i changes its scale.

    Examples
    --------
    >>> strategy = FedGiA(local_steps=10, report_gradient=True)
    >>> stop = strategy.gradient_tolerance(1e-9)
    >>> result = strategy.start(grid, ArrayRecord({"x": Array(np.zeros(100))}), 1000, stop=stop)
    >>> rounds = strategy.diagnostics().communication_rounds
    """

    method: ClassVar = "FedGiA"
    paper: ClassVar = "Zhou, Li, IEEE TSP 71, 2023, arXiv:2205.01438"
    kinds: ClassVar = {"global": "one global model"}
    remedy: ClassVar = "a larger t"

    t: Positive | None = None
    hessian: Literal["diagonal", "gram"] = "diagonal"
    local_steps: Count = 5
    fraction_admm: Fraction = 0.5
    curvature: float | Mapping[int, float] | None = None
    duals: Duals = "strategy"
    report_gradient: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.curvature, Mapping):
            for client, value in self.curvature.items():
                check_positive(f"curvature of client {client}", value)
        elif self.curvature is not None:
            check_positive("curvature", self.curvature)
        recovered = self.hessian == "diagonal" and self.duals == "strategy"
        self._sends_gradient = self.report_gradient and not recovered
        self._follows = self.t is None and (self.report_gradient or recovered)
        self._knows_gradient = self.report_gradient or self._follows

    # ------------------------------------------------------------------------------------------
    # The start
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> FedGiAState:
        """Start with z_i = x^0 and pi_i = 0 for every client."""
        self._block = Block.optimised(arrays, self.trained)
        self._fixed = self._block.rest(arrays)
        first, m = self._block.vector(arrays), self.membership.num_initial
        if self._group_size(m) < 1:
            raise ValueError(
                f"fraction_admm is {self.fraction_admm}, which of {m} clients is nobody. Give at "
                f"least {1 / m:.2g}."
            )
        if self.t is not None and self.t <= 6:
            log(INFO, "FedGiA: t = %s; the convergence theory assumes t > 6", self.t)
        dual = {"pi": np.zeros_like(first)} if self.duals == "strategy" else {}
        clients = ClientTable(message=first, curvature=math.nan, **dual)
        slope = np.zeros(self._block.size if self._follows else 0)
        noise = np.zeros(self._block.size if self.run.privacy.is_central else 0)
        return FedGiAState(clients, first, first, short(self.seed), slope, slope, noise)

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, FedGiAQuestion]:
        """Ask clients for their r_i, at the global model, unless it was given.

        Raises
        ------
        ValueError
            If r_i was given for some of those only that are there from the start.
        """
        missing = [client for client in client_ids if math.isnan(self._given(client))]
        if self.curvature and (initial := [c for c in missing if c in self.membership]):
            raise ValueError(f"curvature has no value for the clients {listing(initial)}.")
        return dict.fromkeys(missing, FedGiAQuestion(self.global_model(), self.hessian))

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with z_i = x, pi_i = 0 and r_i as it was given or reported."""
        curvature = self._given(client_id)
        if math.isnan(curvature) and reply is not None:
            curvature = reply.metrics.get("curvature", math.nan)
            check_positive(f"The curvature that client {client_id} reported", curvature)
            if curvature > (most := largest_allowed(np.dtype(np.float64))):
                raise ValueError(
                    f"The curvature that client {client_id} reported is {curvature:.2g}, expected "
                    f"at most {most:.2g}."
                )
            if curvature > largest_reported(self.state.clients.column("curvature")):
                raise ValueError(f"{too_large('curvature', curvature)}. {_IF_RIGHT}")
        return {"message": self.state.x, "curvature": curvature}

    def _given(self, client: int) -> float:
        if isinstance(self.curvature, Mapping):
            return float(self.curvature.get(client, math.nan))
        return math.nan if self.curvature is None else float(self.curvature)

    def check_handshake(self, replies: Mapping[int, Reply]) -> dict[int, str]:
        """Return whose r_i is so large that sigma, which goes by the largest, stops the run."""
        said = {c: reply.metrics.get("curvature", math.nan) for c, reply in replies.items()}
        wrong = those_too_large("curvature", said)
        return {client: f"{reason}. {_IF_RIGHT}" for client, reason in wrong.items()}

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Say what the clients found in their data."""
        for kind, what in (("zero", "all-zero"), ("constant", "constant")):
            counts = [reply.metrics.get(f"{kind}-columns", 0) for reply in replies.values()]
            if any(counts):
                log(
                    INFO,
                    f"FedGiA: {np.count_nonzero(counts)} of {len(counts)} clients have {what} data "
                    f"columns, up to {max(counts):.0f}; H_i/m + sigma I is invertible all the same",
                )

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    @property
    def sigma(self) -> float:
        """The penalty parameter: t r/m with r = max_i r_i, or with 2 L in place of t r.

        NaN before the handshake.
        """
        self._need_state()
        curvature = self.state.clients.column("curvature")
        if not len(curvature):
            return math.nan
        if self.t is None:
            pull = 2 * max(float(curvature.mean()), self.state.next_curvature)
        else:
            pull = self.t * float(curvature.max())
        return float(pull) / self.membership.num_initial

    def admm_group(self, server_round: int) -> NDArray[np.bool_]:
        """Return which clients are in the inexact ADMM group C of a round, shape (m,).

        Uniform without replacement; a function of the seed and the round alone, so that a run which
        was continued from a saved state draws the same.
        """
        m = len(self.client_ids)
        rng = np.random.default_rng([self.state.group_seed, server_round, *b"FedGiA"])
        group = np.zeros(m, dtype=np.bool_)
        group[rng.choice(m, size=self._group_size(m), replace=False)] = True
        return group

    def _group_size(self, num_clients: int) -> int:
        # ceil(s m), as the authors round it (P6), less roundings such as 0.07 * 100 > 7.
        return math.ceil(self.fraction_admm * num_clients - 1e-9)

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedGiAInstruction]:
        """Send x (and pi_i) to every client, and which group it is in.

        A client that is joining takes the gradient step, which finds its pi_i at once.
        """
        model, sigma = self.global_model(), self.sigma
        in_admm = dict(zip(self.client_ids, self.admm_group(server_round), strict=True))
        instructions = {}
        for client in client_ids:
            row, admm = self.state.clients[client], bool(in_admm.get(client, False))
            sends_dual = self.duals == "strategy" and admm  # the others need none
            instructions[client] = FedGiAInstruction.of(
                self,
                server_round,
                model=model,
                dual=self._block.arrays(row.pi) if sends_dual else None,
                admm=admm,
                curvature=row.curvature,
                sigma=sigma,
                num_clients=self.membership.num_initial,
                keep_dual=self.duals == "client",
                report_gradient=self._sends_gradient,
            )
        return instructions

    def upload_spec(self) -> Spec:
        """Return the model's arrays for z_i, and further sets for pi_i and the gradient."""
        spec = dict(self.model_spec)
        for prefix in [DUAL] * (self.duals == "strategy") + [GRADIENT] * self._sends_gradient:
            spec |= {prefix + name: entry for name, entry in self._block.spec.items()}
        return spec

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in every z_i and pi_i, then what they say about f at the point that was sent."""
        state, m = self.state, self.membership.num_initial
        total = np.zeros(self._block.size)
        gradient = np.zeros(self._block.size)  # sum_i grad f_i(x)/m, m being that of the start
        for client in self.client_ids:
            row = state.clients[client]
            if (reply := replies.get(client)) is not None:
                row.message = self._block.vector(reply.arrays)
                if self.duals == "strategy":
                    row.pi = self._block.vector(under(DUAL, reply.arrays))
                if self._sends_gradient:
                    gradient += self._block.vector(under(GRADIENT, reply.arrays))
                elif self._knows_gradient:
                    sent = FedGiAInstruction.read(reply.asked)
                    self._add_gradient(row, sent.sigma, gradient)
            total += row.message
        if len(state.noise):
            total += state.noise
        state.point, state.x = state.x, (total / len(self.client_ids)).astype(self._block.dtype)
        everybody = len(replies) == len(self.client_ids)  # (12) is a mean over all
        losses = [reply.metrics.get("loss", math.nan) for reply in replies.values()]
        state.objective = float(np.mean(losses)) if everybody else math.nan
        known = everybody and self._knows_gradient
        gradient *= m / len(self.client_ids)
        said = known and self.report_gradient
        state.squared_gradient = float(np.sum(gradient**2)) if said else math.nan
        if known and self._follows:
            self._follow_curvature(gradient)

    def _follow_curvature(self, gradient: NDArray[np.float64]) -> None:
        """Compare the gradient at the round's point with the last one that is known."""
        state, point = self.state, self.state.point.astype(np.float64)
        if state.num_slopes:
            distance = float(np.linalg.norm(point - state.slope_point))
            change = float(np.linalg.norm(gradient - state.slope))
            before = max(state.path_curvature, float(state.clients.column("curvature").mean()))
            state.path_curvature = before
            if distance > _SMALLEST_STEP * float(np.linalg.norm(point)):
                state.path_curvature = max(before, change / distance)
            # The round that is under way next knows nothing of what this one's step led to.
            growth = min(state.path_curvature / before, _MOST_GROWTH)
            state.next_curvature = state.path_curvature * growth
        state.slope, state.slope_point = gradient, point
        state.num_slopes += 1

    def adopt(self, model: Arrays, num_replies: int) -> None:
        """Go on from another x. The next one is the mean of what all clients make of it."""
        self.state.x = self._block.vector(model)

    @property
    def why_unaltered(self) -> str:
        """Why no upload may be changed on its way where it has more than z_i."""
        if self.duals == "client" and not self.report_gradient:
            return ""
        return (
            "they hold pi_i, or a gradient, beside a model. Give duals='client', and leave out "
            "report_gradient."
        )

    @property
    def why_not_private(self) -> str:
        """Say what x is made of beside the sum of the z_i."""
        if self.why_unaltered:
            return super().why_not_private
        if self.curvature is None:
            return "sigma follows from the r_i that clients report. Give curvature."
        return FORGETS if self.max_missed_rounds is not None else ""

    def still_point(self, client_id: int, sent: ClientInstruction) -> Arrays:
        """Return the last z_i."""
        return self._block.arrays(self.state.clients[client_id].message)

    def take_noise(self, noise: Arrays, num_uploads: int) -> Arrays:
        """Add noise to the sum of the z_i, for good."""
        self.state.noise = self.state.noise + self._block.vector(noise)
        return self._block.rest(noise)

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Compare no gradient with one of before: f is another function now."""
        rows = [self.membership.row(client) for client in client_ids]
        curvature = self.state.clients.column("curvature")
        self._follow_anew(np.delete(curvature, rows), curvature)

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Compare no gradient with one of before, likewise."""
        curvature = self.state.clients.column("curvature")
        self._follow_anew(curvature, np.delete(curvature, rows))

    def _follow_anew(self, before: NDArray[np.float64], now: NDArray[np.float64]) -> None:
        """Expect of the new f what was seen of the last one, in the proportion of their r_i."""
        state, ratio = self.state, float(now.mean() / before.mean())
        state.num_slopes = 0
        state.path_curvature *= ratio
        state.next_curvature *= ratio

    def _add_gradient(self, row: Any, sigma: float, gradient: NDArray[np.float64]) -> None:
        """Add grad f_i(x)/m = -pi_i - (r_i/m) (x_i - x), which is (34) with H_i = r_i I."""
        weight = float(row.curvature) / self.membership.num_initial
        moved = np.subtract(row.message, self.state.x, dtype=np.float64)
        moved *= weight  # x_i - x = (z_i - x) - pi_i/sigma, by (15)
        gradient -= moved
        np.multiply(row.pi, weight / sigma - 1, out=moved, dtype=np.float64)
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
            arrays=self._block.model(self.state.point, self._fixed),
            objective=self.state.objective,
            squared_gradient=self.state.squared_gradient,
            communication_rounds=max(self.last_round - 1, 0),
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

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return x, the mean of all z_i; the clients' x_i are only steps towards it."""
        return self._block.model(self.state.x, self._fixed)
