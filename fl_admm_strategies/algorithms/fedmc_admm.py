"""FedMC-ADMM: federated matrix completion, for recommenders.

Each client holds the ratings M_i of its own users; all rate the same items. The factors U_i of the
users stay with their client, the factors V of the items are shared:

    minimise  (1/p) sum_i [1/2 |P_i(M_i - U_i V)|_F^2 + R_i(U_i)] + R(V)              (1), (2)

where P_i keeps the observed ratings. Every client has a copy W_i of V, and W_i = V is kept by ADMM.

Hytla, Nghia, Phan, Rice, "A Linearized Alternating Direction Multiplier Method for Federated Matrix
Completion Problems", arXiv:2503.12733: Algorithm 1; see docs/methods/fedmc-admm.md. Here are (13)
and (16); (14) and (15) are the client's, `clients.FedMCADMMClient`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import DTypeLike, NDArray

from ..maths.blocks import Arrays, Block, Spec, spec_of
from ..maths.checks import check_choice, check_count, check_positive
from ..maths.consensus import REBUILD_EVERY, ConsensusADMM
from ..maths.regularizers import Regularizer, check_regularizer
from ..runtime.algorithm import OnClient
from ..runtime.messages import ClientInstruction, Metrics, Reply
from ..runtime.sampled import SampledSettings, SampledStrategy
from ..runtime.schema import Instruction
from .base import Duals, check_bound_of_changes


def initial_item_factors(
    rank: int,
    num_items: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    dtype: DTypeLike = np.float64,
) -> ArrayRecord:
    """Return V^0 with independent entries, uniform on [0, scale], for `FedMCADMM.start`.

    Parameters
    ----------
    rank : int
        r.
    num_items : int
        n.
    seed : int (default: 0)
        The run's.
    scale : float (default: 1.0)
        The same as the strategy's `init_scale`.
    dtype : dtype (default: float64)
        In which the whole run computes.

    Returns
    -------
    ArrayRecord
        One array, "item-factors", of shape (r, n).
    """
    check_count("rank", rank, least=1)
    check_count("num_items", num_items, least=1)
    check_count("seed", seed, least=0)
    check_positive("scale", scale)
    factors = np.random.default_rng(seed).uniform(0, scale, (rank, num_items)).astype(dtype)
    return ArrayRecord({"item-factors": Array(factors)})


@dataclass
class FedMCState:
    """V, and W_i and Y_i of every client, or the sum of their Z_i = W_i + Y_i/beta."""

    consensus: ConsensusADMM


@dataclass(frozen=True)
class FedMCFactors(Instruction):
    """V for an evaluation or a handshake, and what a client needs to draw its U_i^0."""

    factors: Arrays
    factor_seed: int
    factor_scale: float
    num_clients: int


@dataclass(frozen=True)
class FedMCInstruction(Instruction):
    """What a client gets: V - Y_i/beta, or V where it has Y_i; W_i where it starts with it."""

    anchor: Arrays
    start: Arrays | None
    factor_seed: int
    factor_scale: float
    num_clients: int
    beta: float
    inner_steps: int
    y0: str
    duals: str


class FedMCADMM(SampledStrategy):
    """Federated matrix completion by linearised ADMM (FedMC-ADMM).

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`.

    Parameters
    ----------
    regularizer : Regularizer
        R, on the items' factors: `SquaredL2(gamma)`, `L1Norm(gamma)`, or an object of your own with
        a proximal operator. The clients have one for their users' factors.
    beta : float (default: 1.0)
        beta, the ADMM penalty parameter; the paper does not say which it used (see Notes).
    inner_steps : int (default: 10)
        N, proximal gradient steps of a client on each of its two blocks in a round.
    init_scale : float (default: 1.0)
        Entries of U_i^0 are uniform on [0, init_scale].
    y0 : {"zero", "handshake"} (default: "zero")
        How the duals start. "zero": Y_i^0 = 0, as in the authors' code. "handshake": the paper's
        Y_i^0 = -(1/p) grad_V f_i(U_i^0, V^0), which all clients must send before round 1, since
        (16) adds up those of all: they share a gradient of their raw data, and V^1 can be far off
        where beta is small.
    duals : {"strategy", "client"} (default: "strategy")
        Where Y_i and the last W_i are kept. "strategy": V - Y_i/beta goes down, W_i comes up, and
        the strategy updates Y_i; its memory is O(p r n). "client": V goes down, the change of
        Z_i = W_i + Y_i/beta comes up, which is all that (16) needs; the strategy's memory is
        O(r n), and it sees neither W_i nor Y_i but their sum alone. The trajectory is the same.
    **base
        The parameters of `SampledStrategy`.

    Notes
    -----
    Evaluation reports ``loss``, the objective Phi of (17) at (U, V), and ``rmse``, the root of the
    mean squared error over the test ratings of all clients together, in stars; where the clients'
    ratings are standardised, ``scaled-rmse`` is in their unit. They are the paper's with
    ``fraction_evaluate=1``, else those of the clients that were asked.

    Two settings of what the paper leaves open (docs/methods/fedmc-admm.md, P1) work: ``beta=1`` and
    ``init_scale=1`` on ratings as they are, and that of the authors' code, ``beta=1e4`` and
    ``init_scale=2e-4`` on standardised ratings. A beta well above |U^T U|_F / p freezes V, one far
    below is unstable. The bound on beta of Theorems 4.7 and 4.8 (a max where the paper prints min)
    is some five orders above what works best, so it is not checked.

    U_i never leaves its client. One that lost it starts again at U_i^0, which is drawn from a seed
    in the message, with W_i as the strategy has it; with ``duals="client"`` the strategy has its
    Z_i in a sum only, which cannot be put right, so all clients go on with W_i = V, Y_i = 0.

    A client that connects in mid-run starts with W_i = V, Y_i = 0 and counts in the mean from its
    first accepted upload. When a client has left, its Z_i leaves the mean; with ``duals="client"``
    all others go on with W_i = V, Y_i = 0. p stays what it was at the start, in the clients' steps
    and in that of R's proximal operator: with p' clients this is Algorithm 1 for p'/p times (2), so
    that the minimiser is that of the p' clients and no Y_i changes its scale.

    That U_i stays is no promise of privacy: by Lemma 4.5 Y_i is a gradient with a proximal term,
    from which something can be inferred about the ratings. With ``duals="client"`` the
    server needs no more than a sum over the clients, which secure aggregation can give it.

    Examples
    --------
    >>> strategy = FedMCADMM(SquaredL2(1e-6), beta=1.0, fraction_train=0.1, seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=100)
    >>> result.evaluate_metrics_clientapp[100]["rmse"]
    """

    method: ClassVar = "FedMCADMM"
    kinds: ClassVar = {"personal": "users' and items' factors", "global": "items' factors"}

    def __init__(
        self,
        regularizer: Regularizer,
        *,
        beta: float = 1.0,
        inner_steps: int = 10,
        init_scale: float = 1.0,
        y0: Literal["zero", "handshake"] = "zero",
        duals: Duals = "strategy",
        **base: Unpack[SampledSettings],
    ) -> None:
        super().__init__(**base)
        check_regularizer("regularizer", regularizer)
        check_positive("beta", beta)
        check_count("inner_steps", inner_steps, least=1)
        check_positive("init_scale", init_scale)
        check_choice("y0", y0, ("zero", "handshake"))
        check_choice("duals", duals, ("strategy", "client"))
        check_bound_of_changes(duals, self.max_norm, self.on_excess)
        self.regularizer = regularizer
        self.beta = beta
        self.inner_steps = inner_steps
        self.init_scale = init_scale
        self.y0 = y0
        self.duals = duals

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return "FedMC-ADMM"

    def init_state(self, arrays: Arrays) -> FedMCState:
        """Start with W_i = V = V^0 and Y_i = 0 for every client."""
        found = {name: array.shape for name, array in arrays.items()}
        first = next(iter(arrays.values()))
        if len(arrays) != 1 or first.ndim != 2 or first.dtype.kind != "f":
            raise ValueError(
                f"The initial arrays are {found}, expected one array of floating point numbers, "
                "the items' factors V of shape (rank, items): initial_item_factors(rank, items)."
            )
        self._block = Block(spec_of(arrays))
        self._shape = first.shape
        vector, on_clients = self._block.vector(arrays), self.duals == "client"
        return FedMCState(ConsensusADMM(vector, self.beta, on_clients=on_clients, prox=self._prox))

    def _prox(self, mean: NDArray[Any]) -> NDArray[Any]:
        """Return prox_{R/(p beta)}: (68) for the squared l2 norm, (73) for the l1 norm."""
        step = 1 / (self.membership.num_initial * self.beta)
        return self.regularizer.prox(mean.reshape(self._shape), step).ravel()

    def _draw(self, client: int) -> dict[str, Any]:
        """Return what a client must know to draw its U_i^0."""
        sequence = np.random.SeedSequence([self.seed, client])
        return {
            "factor_seed": int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)),
            "factor_scale": self.init_scale,
            "num_clients": self.membership.num_initial,
        }

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, FedMCFactors]:
        """Ask every client for its Y_i^0 before round 1, with y0="handshake"."""
        if self.y0 == "zero":
            return {}
        first = self._block.arrays(self.state.consensus.mean.first)
        members = self.membership  # those that come later start with 0
        return {c: FedMCFactors(first, **self._draw(c)) for c in client_ids if c in members}

    def handshake_spec(self) -> Spec:
        """Return the shape of Y_i^0, which is that of V."""
        return self._block.spec

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Take in Y_i^0 of all clients. They enter V with the first V step; V^0 stays."""
        for client, reply in replies.items():
            self.state.consensus.set_dual(client, self._block.vector(reply.arrays))

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedMCInstruction]:
        """Send V - Y_i/beta, or V where the client has Y_i; W_i to those that start with it."""
        return {client: self._instruction(client) for client in client_ids}

    def _instruction(self, client: int) -> FedMCInstruction:
        consensus, members = self.state.consensus, self.membership
        start = consensus.start(
            client,
            holds_it=not members.is_new(client),
            last_accepted=members.last_accepted.get(client),
        )
        from_zero = consensus.mean.began_in > 0 or client in members.joining
        return FedMCInstruction(
            anchor=self._block.arrays(consensus.anchor(client)),
            start=None if start is None else self._block.arrays(start),
            **self._draw(client),
            beta=self.beta,
            inner_steps=self.inner_steps,
            y0="zero" if from_zero else self.y0,
            duals=self.duals,
        )

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure W_i from V - Y_i/beta, the change of Z_i from 0."""
        return super().upload_reference(sent) if self.duals == "strategy" else {}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in W_i, update Y_i by the old V (13); then V over all clients (16)."""
        for client, reply in replies.items():
            self.state.consensus.update(client, self._block.vector(reply.arrays))
        self.state.consensus.aggregate(anew=server_round % REBUILD_EVERY == 0)

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Start everybody from W_i = V where clients keep Y_i."""
        if self.duals == "client":
            self.state.consensus.restart(server_round, len(self.membership))

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedMCFactors]:
        """Send V; the users' factors are on the client."""
        factors = self.global_model()
        return {client: FedMCFactors(factors, **self._draw(client)) for client in client_ids}

    def evaluation_metrics(self, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Return Phi (17) and the RMSE over all test ratings, from the clients' sums.

        The mean of the clients' errors would weigh a client, not a rating, and a client without
        test ratings has part in Phi all the same.
        """
        if not {"loss", "test-ratings", "squared-error"} <= means.keys():
            return means  # of a client that is not ours, or that says less than it must
        pooled, reports = dict(means), clients.values()
        factors = self.state.consensus.w.reshape(self._shape)
        terms = _total(report["loss"] for report in reports) / len(reports)
        pooled["loss"] = terms + self.regularizer.value(factors)
        count = _total(report["test-ratings"] for report in reports)
        for error, name in (("squared-error", "rmse"), ("scaled-squared-error", "scaled-rmse")):
            if error in means:
                total = _total(report[error] for report in reports)
                pooled.pop(error)
                pooled.pop(name, None)
                if count > 0 and not total < 0:
                    pooled[name] = math.sqrt(total / count)
        del pooled["test-ratings"]
        return pooled

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return V; the users' factors are private to their client."""
        if kind == "personal":
            return OnClient(
                "FedMCADMMClient(...).personal_arrays() returns the users' factors there; predict "
                "and top_items use them."
            )
        return self._block.arrays(self.state.consensus.w)


def _total(values: Iterable[float]) -> float:
    """Return the exact sum, NaN where a value is not finite: these are numbers of clients."""
    numbers = list(values)
    try:
        return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
    except OverflowError:  # each of them is a number, their sum is none
        return math.nan
