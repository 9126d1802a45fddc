"""FedGiA: federated learning by gradient descent and inexact ADMM.

In every round all clients compute one gradient at the server's point x and upload it. A random
group then takes k0 steps of inexact ADMM with it, the others one gradient step; x becomes the mean
of what the clients arrive at. With H_i = r_i I (FedGiA_D) the server takes these steps, which are
elementwise. With the Gram matrix (FedGiA_G) the client takes them.

Zhou, Li, "Efficient and Convergent Federated Learning", arXiv:2205.01438 (published as "FedGiA: An
Efficient Hybrid Algorithm for Federated Learning", IEEE TSP 71, 2023): Algorithm 1, equations (12)
to (18), the choices of H_i and sigma of Table II; see docs/methods/fedgia.md. tau_k is the ceiling
of k/k0 (its brackets are printed as a floor's, P1), so x stays for k0 steps. The clients are
`clients.FedGiAClient` and `clients.FedGiALinearClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec, prefixed, under
from ..maths.checks import Count, Fraction, Positive
from ..maths.seeds import short
from ..runtime.algorithm import Handshake, MembersChange
from ..runtime.callbacks import StopRule
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.trust.validation import LARGEST
from ..runtime.uploads import Upload
from .shared.base import Duals
from .shared.consensus import ConsensusMethod, ConsensusState
from .shared.curvature import check_curvature, too_large_curvatures
from .shared.rule import Row, Rule

CURVATURE = "curvature"
"""The metric of a reply to the handshake: r_i."""
MESSAGE = "message/"
"""Before the names of the arrays of z_i in an upload, with the Gram matrix."""

_MOST_GROWTH = 10.0  # of the curvature, from one round to the next
_SMALLEST_STEP = 1e-4
"""Of the model's norm: over shorter ones a change of the gradient in float32 is mostly rounding."""


@dataclass(frozen=True)
class FedGiARule(Rule):
    """z_i = x_i + pi_i/sigma, and pi_i; the numbers are r_i, sigma, m, and k0 or 0.

    The k0 steps keep x and the gradient, so only e = grad f_i(x)/m + pi_i changes: by the factor
    q = (r_i/m)/(r_i/m + sigma) in each. `steps` is 0 outside of the ADMM group. With the Gram
    matrix the client takes the steps and uploads z_i.
    """

    curvature: float
    sigma: float
    num_clients: int
    steps: int
    gram: bool

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """z_i begins at x, so that pi_i is 0. sigma may change and pi_i stays: it is not scaled."""
        return {"z": 1, "pi": 0}

    def move(self, row: Row, u: Any, w: Any) -> Row:
        """Return the row after k0 steps (13) to (15), or a gradient step (16) to (18).

        `u` is grad f_i(x), with the Gram matrix z_i.
        """
        if self.gram:
            return Row(z=u, pi=row.pi)
        gradient, h = u / self.num_clients, self.curvature / self.num_clients
        if self.steps == 0:
            return Row(z=w - gradient / self.sigma, pi=-gradient)
        q, e = h / (h + self.sigma), gradient + row.pi
        pi = q**self.steps * e - gradient
        iterate = w - q ** (self.steps - 1) / (h + self.sigma) * e
        return Row(z=iterate + pi / self.sigma, pi=pi)

    def copy(self, row: Row) -> Any:
        """Return x_i."""
        return row.z - self.dual(row)

    def dual(self, row: Row) -> Any:
        """Return pi_i/sigma."""
        return row.pi / self.sigma

    def message(self, row: Row) -> Any:
        """Return z_i, of the sigma of the client's last round."""
        return row.z


@dataclass
class SeenCurvature:
    """The curvature of f between the points of a run, over the mean of the r_i.

    Attributes
    ----------
    gradient, point : ndarray of shape (n,)
        The last gradient of f that is known, and where.
    count : int
        How many were known since the set of clients last changed.
    largest, expected : float
        The largest curvature between two such points so far, at least 1, and what is expected of
        the next.
    """

    gradient: NDArray[np.float64]
    point: NDArray[np.float64]
    count: int = 0
    largest: float = 1.0
    expected: float = 1.0

    def compare(self, gradient: NDArray[Any], point: NDArray[Any], bound: float) -> None:
        """Take in a gradient and its point; `bound` is the mean of the r_i."""
        point = point.astype(np.float64)
        if self.count:
            distance = float(np.linalg.norm(point - self.point))
            change = float(np.linalg.norm(gradient - self.gradient))
            before = self.largest
            if distance > _SMALLEST_STEP * float(np.linalg.norm(point)):
                self.largest = max(before, change / distance / bound)
            # The next round is sent before the effect of this round's step is known.
            self.expected = self.largest * min(self.largest / before, _MOST_GROWTH)
        self.gradient, self.point, self.count = gradient, point, self.count + 1


@dataclass(kw_only=True)
class FedGiAState(ConsensusState):
    """The server's variables: those of `ConsensusState`, with x as `w` and r_i as ``curvature``."""

    seen: SeenCurvature


@dataclass(frozen=True)
class FedGiAInstruction(Instruction):
    """What a client gets: x, and the text of its rule, the numbers of its steps."""

    model: Arrays
    rule: str


@dataclass(frozen=True)
class FedGiAQuestion(Instruction):
    """The handshake: it asks for r_i at this model."""

    model: Arrays
    hessian: str


class FedGiA(ConsensusMethod):
    """Federated gradient descent and inexact ADMM (FedGiA).

    Minimises f(x) = (1/m) sum_i f_i(x), all clients counting equally. In the paper every client
    takes part in every round; a client that does not, or the reply of which is missing, counts with
    its last z_i, until it has left the run (`max_missed_rounds`).

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
    **base
        The parameters of `StatefulStrategy`. There is the paper's form alone, with the duals here.

    Notes
    -----
    A training's metrics have ``objective``, f(x), and ``squared-gradient``, ||grad f(x)||^2, at the
    point x that the round started from, where all clients replied. `gradient_tolerance` makes a
    stop rule of the latter.

    The first step may increase the augmented Lagrangian, whatever t is: with pi_i^0 = 0 equation
    (34), on which the descent lemma rests, holds only from the second on.

    A client that connects in mid-run is asked for its r_i, takes the gradient step in its first
    round and counts from its first accepted upload on. In sigma and in the clients' steps m stays
    what it was at the start: the same algorithm for m'/m times f with the m' clients there are, so
    that no pi_i changes its scale.

    Examples
    --------
    >>> strategy = FedGiA(local_steps=10)
    >>> stop = strategy.gradient_tolerance(1e-9)
    >>> result = strategy.start(grid, ArrayRecord({"x": Array(np.zeros(100))}), 1000, stop=stop)
    >>> rounds = strategy.communication_rounds
    """

    method: ClassVar = "FedGiA"
    paper: ClassVar = "Zhou, Li, IEEE TSP 71, 2023, arXiv:2205.01438"
    kinds: ClassVar = {"global": "one global model"}
    rule: ClassVar = FedGiARule
    message_type: ClassVar = FedGiAInstruction
    default_norm = None  # the paper's form is the only one: far uploads are refused in it too
    upload = Upload("statistic")  # a gradient

    t: Positive | None = None
    hessian: Literal["diagonal", "gram"] = "diagonal"
    local_steps: Count = 5
    fraction_admm: Fraction = 0.5
    published: bool = field(init=False, default=True)
    duals: Duals = field(init=False, default="strategy")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._group, self._sigma = set[int](), math.nan  # of the round that is sent last

    def init_state(self, arrays: Arrays) -> FedGiAState:
        """Start with z_i = x^0 and pi_i = 0 for every client."""
        base = super().init_state(arrays)
        seen = SeenCurvature(np.zeros(len(base.w)), np.zeros(len(base.w)))
        return FedGiAState(**vars(base), seen=seen)

    def _columns(self, w: NDArray[Any], averaged: Arrays) -> dict[str, Any]:
        return super()._columns(w, averaged) | {CURVATURE: math.nan}

    # ------------------------------------------------------------------------------------------
    # The curvature of the clients
    # ------------------------------------------------------------------------------------------

    def handshake(self, client_ids: Sequence[int]) -> Handshake[ClientInstruction]:
        """Ask clients for their r_i, at the global model."""
        question = FedGiAQuestion(self.global_model(), self.hessian).encode()
        check = partial(too_large_curvatures, CURVATURE)
        return Handshake(dict.fromkeys(client_ids, question), check=check)

    def new_client(self, client_id: int, reply: Reply | None) -> dict[str, Any]:
        """Start with z_i = x, pi_i = 0 and r_i as it was reported."""
        own = super().new_client(client_id, reply)
        if reply is None:
            return own
        known = self.state.clients.column(CURVATURE)
        # A smaller curvature may make gradients over sigma overflow.
        curvature = check_curvature(CURVATURE, client_id, reply, known, least=1 / LARGEST)
        return own | {CURVATURE: curvature}

    @property
    def penalty(self) -> float:
        """The sigma in use."""
        return self.sigma

    @property
    def sigma(self) -> float:
        """The penalty parameter: t r/m with r = max_i r_i, or with 2 L in place of t r.

        NaN before the handshake.
        """
        self._need_state()
        m, curvature = self.membership.num_initial, self.state.clients.column(CURVATURE)
        if not len(curvature):
            return math.nan
        if self.t is None:
            return 2 * float(curvature.mean()) * float(self.state.seen.expected) / m
        return self.t * float(curvature.max()) / m

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def admm_group(self, server_round: int) -> set[int]:
        """Return the inexact ADMM group C of a round.

        Uniform without replacement; a function of the seed and the round alone, so that a run which
        was continued from a saved state draws the same.
        """
        # ceil(s m), as the authors round it (P6), less roundings such as 0.07 * 100 > 7.
        size = max(1, math.ceil(self.fraction_admm * len(self.client_ids) - 1e-9))
        rng = np.random.default_rng([short(self.seed), server_round, *b"FedGiA"])
        return set(rng.choice(self.client_ids, size=size, replace=False).tolist())

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return x; draw the ADMM group of the round, and keep its sigma."""
        self._group, self._sigma = self.admm_group(server_round), self.sigma
        return {"model": self.global_model()}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return a client's rule; it needs no row."""
        return {"rule": self.rule_of(client_id).text()}

    def rule_of(self, client_id: int) -> FedGiARule:
        """Return a client's rule; one that is joining takes the gradient step, which finds pi_i."""
        steps = self.local_steps if client_id in self._group else 0
        curvature = float(self.state.clients[client_id].curvature)
        m, gram = self.membership.num_initial, self.hessian == "gram"
        return FedGiARule(True, curvature, self._sigma, m, steps, gram)

    def upload_spec(self) -> Spec:
        """Return the model's arrays for the gradient; with the Gram matrix those of z_i as well."""
        if self.hessian == "diagonal":
            return self.model_spec
        of_z = {MESSAGE + name: entry for name, entry in self._block.spec.items()}
        return {**self.model_spec, **of_z}

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure gradients, and changes of z_i, from 0; z_i from x."""
        of_z = prefixed(MESSAGE, self._block.arrays(self.state.w)) if self.hessian == "gram" else {}
        return self._block.rest(sent.groups["model"]) | of_z

    def uploaded(self, reply: Reply) -> Any:
        """Return the gradient, or z_i."""
        arrays = reply.arrays if self.hessian == "diagonal" else under(MESSAGE, reply.arrays)
        return self._block.joined(arrays)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Move the clients' rows and set x to the mean of all z_i (12); note f where it was."""
        point = self.state.w
        super().update(server_round, replies)
        if len(replies) < len(self.client_ids):
            return
        gradient = np.zeros(self._block.size)
        for reply in replies.values():
            gradient += self._block.vector(reply.arrays) / len(replies)
        bound = float(self.state.clients.column(CURVATURE).mean())
        self.state.seen.compare(gradient, point, bound)
        losses = [reply.metrics.get("loss", math.nan) for reply in replies.values()]
        self._residuals["objective"] = float(np.mean(losses))
        self._residuals["squared-gradient"] = float(gradient @ gradient)

    def members_changed(self, change: MembersChange) -> None:
        """Compare no gradient of the new f with one of the last."""
        super().members_changed(change)
        if change.joined or change.left:
            self.state.seen.count = 0

    # ------------------------------------------------------------------------------------------
    # Results
    # ------------------------------------------------------------------------------------------

    @property
    def communication_rounds(self) -> int:
        """CR: the rounds of local work that led to the point of the last round."""
        return max(self.last_round - 1, 0)

    def gradient_tolerance(self, per_parameter: float = 1e-9) -> StopRule:
        """Return a rule for ``start(stop=...)``: stop at ||grad f(x)||^2 <= n per_parameter (30).

        A round in which a client's reply is missing does not stop the run: the gradient is unknown.

        Parameters
        ----------
        per_parameter : float (default: 1e-9)
            The tolerance for each of the n parameters.
        """
        return lambda server_round, metrics: (
            metrics.get("train-squared-gradient", math.inf) <= self._block.size * per_parameter
        )
