"""FedMC-ADMM: federated matrix completion, for recommenders.

Each client holds the ratings M_i of its own users; all rate the same items. The factors U_i of the
users stay with their client, the factors V of the items are shared:

    minimise  (1/p) sum_i [1/2 |P_i(M_i - U_i V)|_F^2 + R_i(U_i)] + R(V)              (1), (2)

where P_i keeps the observed ratings. Every client has a copy W_i of V, and W_i = V is kept by ADMM.

Hytla, Nghia, Phan, Rice, "A Linearized Alternating Direction Multiplier Method for Federated Matrix
Completion Problems", arXiv:2503.12733: Algorithm 1; see docs/methods/fedmc-admm.md. Here are (13)
and (16); (14) and (15) are the client's, `clients.FedMCADMMClient`, and so are the exact minimisers
that take their place by default (docs/methods/fedmc-admm-notes.md, P14).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, Spec, spec_of
from ..maths.checks import Count, Positive
from ..maths.clienttable import Row
from ..maths.consensus import REBUILD_EVERY, ConsensusADMM
from ..maths.rated import RATED, RatedConsensus
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.uploads import Upload
from .shared.base import ConsensusForm, ConsensusInstruction
from .shared.completion import ExactCompletion


@dataclass
class FedMCState:
    """V, and W_i and Y_i of every client, or a sum over them; see `Consensus`."""

    consensus: ConsensusADMM | RatedConsensus


@dataclass(frozen=True)
class FedMCInstruction(ConsensusInstruction):
    """What a client gets: V - Y_i/beta, or V where it has or gets Y_i; W_i where it starts with it.

    An empty `dual` is 0. Where `rated_only`, `anchor` is V - Y_i/beta and `start` is V, of the
    items that the client rated.
    """

    factor_seed: int
    factor_scale: float
    num_clients: int
    beta: float
    inner_steps: int
    published: bool
    feedback: str
    confidence: float
    rated_only: bool = False


class FedMCADMM(ConsensusForm, ExactCompletion):
    """Federated matrix completion by ADMM (FedMC-ADMM).

    A client's two steps in a round are the minimisers in U_i, at V, and in W_i, with biases of
    users and items and the client's mean rating in the model. The objective is a sum over the
    clients, not their mean, so that no weight depends on their number; the clients' regulariser
    must be `SquaredL2`. With ``published=True`` they are the paper's proximal gradient steps on its
    objective, without biases.

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`. With biases the
    last row are the items', so that the rank is r - 1.

    Parameters
    ----------
    regularizer : Regularizer
        R, on the items' factors: `SquaredL2(gamma)`, `L1Norm(gamma)`, or an object of your own with
        a proximal operator. The clients have one for their users' factors.
    beta : float (default: 1.0)
        beta, the ADMM penalty parameter; the paper does not say which it used (see Notes).
    inner_steps : int (default: 10)
        N, with ``published=True``: proximal gradient steps of a client on each of its two blocks in
        a round.
    rows : {"all", "rated"} (default: "all")
        What is kept and sent of a client's W_i and Y_i. "rated": only the items that it rated, on
        which alone they are not V and 0 (docs/methods/fedmc-admm-notes.md, P13). The same
        trajectory to rounding, with memory and bytes by the number of ratings in place of clients
        times items: for many clients with few ratings each. Before round 1 every client says which
        items it rated. Goes with ``duals="strategy"`` and explicit feedback.
    **base
        The parameters of `ConsensusForm` (u_i, w and pi_i are W_i, V and Y_i here) and of
        `ExactCompletion`; `init_scale` is for ``published=True``.

    Notes
    -----
    Evaluation reports ``loss``, Phi (17), ``rmse``, in stars, and what else `CompletionStrategy`
    says. They are the paper's with ``fraction_evaluate=1``.

    With ``published=True`` two settings of what the paper leaves open work
    (docs/methods/fedmc-admm-notes.md, P1): ``beta=1`` and ``init_scale=1`` on ratings as they are,
    and that of the authors' code, ``beta=1e4`` and ``init_scale=2e-4`` on standardised ratings. A
    beta well above |U^T U|_F / p freezes V, one far below is unstable. The bound on beta of
    Theorems 4.7 and 4.8 (a max where the paper prints min) is some five orders above what works
    best, so it is not checked. The duals start at Y_i = 0, as in the authors' code (P3).

    U_i never leaves its client. One that lost it starts again at U_i^0, which is drawn from a seed
    in the message.

    A client that connects in mid-run starts with W_i = V, Y_i = 0 and counts in the mean from its
    first accepted upload. When a client has left, its Z_i leaves the mean. In the paper's objective
    p stays what it was at the start, in the clients' steps and in that of R's proximal operator:
    with p' clients this is Algorithm 1 for p'/p times (2), so that the minimiser is that of the p'
    clients and no Y_i changes its scale.

    That U_i stays is no promise of privacy: by Lemma 4.5 Y_i is a gradient with a proximal term,
    from which something can be inferred about the ratings. With ``duals="client"`` the
    server needs no more than a sum over the clients, which secure aggregation can give it.

    Examples
    --------
    >>> strategy = FedMCADMM(SquaredL2(8.0), fraction_train=0.1, seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=20)
    >>> rmse = result.evaluate_metrics_clientapp[20]["rmse"]
    """

    method: ClassVar = "FedMCADMM"
    paper: ClassVar = "Hytla, Nghia, Phan, Rice, arXiv:2503.12733"
    remedy: ClassVar = "a larger beta"
    symbols: ClassVar = ("W_i", "W_i", "V", "Y_i/beta")
    told: ClassVar = FedMCInstruction
    title = "FedMC-ADMM"

    beta: Positive = 1.0
    inner_steps: Count = 10
    rows: Literal["all", "rated"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published and (self.feedback, self.rows) != ("explicit", "all"):
            raise ValueError(
                f"feedback is {self.feedback!r} and rows is {self.rows!r}, expected 'explicit' and "
                "'all' with published=True, the paper's iteration. Leave out one of the two."
            )
        if self.rows == "rated" and (self.duals, self.feedback) != ("strategy", "explicit"):
            raise ValueError(
                f"rows is 'rated' with duals={self.duals!r} and feedback={self.feedback!r}, "
                "expected 'strategy' and 'explicit': the strategy follows what clients did not "
                "rate, and without stars every item counts for every client. Give rows='all'."
            )

    @property
    def is_summed(self) -> bool:
        """Whether the objective is a sum over the clients."""
        return not self.published

    @property
    def in_evaluations(self) -> dict[str, Any]:
        """What the clients solve for; with ``rows="rated"`` that they do not keep V."""
        rated = {"rated_only": self.rows == "rated"}
        return rated if self.published else rated | super().in_evaluations

    @property
    def _more(self) -> str:
        """What else `form` says of the local steps."""
        if self.published:
            return ""
        biases = " of a model with biases" if self.feedback == "explicit" else ""
        return f", they are exact solutions{biases}"

    @property
    def has_biases(self) -> bool:
        """Whether the last row of V are biases."""
        return not self.published and super().has_biases

    def init_state(self, arrays: Arrays) -> FedMCState:
        """Start with W_i = V = V^0 and Y_i = 0 for every client."""
        first = self.first_factors(arrays)
        self._block, self._shape = Block(spec_of(arrays)), first.shape
        if self.rows == "rated":
            return FedMCState(RatedConsensus(first.T, self._prox_of_rows))
        dense = ConsensusADMM(
            first.ravel(),
            self.beta,
            on_clients=self.duals == "client",
            from_w=self.start_at == "global",
            of_participants=self.averaging == "participants",
            prox=self._prox,
        )
        return FedMCState(dense)

    def _prox(self, mean: NDArray[Any]) -> NDArray[Any]:
        """Return prox_{R/(p beta)}: (68) for the squared l2 norm, (73) for the l1 norm."""
        count = len(self.membership) if self.is_summed else self.membership.num_initial
        step = 1 / (count * self.beta)
        return self.regularizer.prox(mean.reshape(self._shape), step).ravel()

    def _prox_of_rows(self, mean: NDArray[Any]) -> NDArray[Any]:
        """Return the same of an array with one row for each item."""
        return self._prox(mean.T).reshape(self._shape).T

    @property
    def _rated(self) -> RatedConsensus:
        assert isinstance(self.state.consensus, RatedConsensus)
        return self.state.consensus

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, ClientInstruction]:
        """Ask every client which items it rated, where rows are by that."""
        if self.rows == "all":
            return {}
        return {client: ClientInstruction({"nothing": {}}) for client in client_ids}

    def handshake_spec(self) -> Spec:
        """Return the shape of what says which items are rated."""
        return {RATED: (self._shape[1:], np.dtype(np.bool_))}

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the items that it rated."""
        return {} if reply is None else reply.arrays

    def given(self, server_round: int) -> dict[str, Any]:
        """Return the name of V, and p."""
        return {"optimised": self._block.names, "num_clients": self.membership.num_initial}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return V - Y_i/beta, or V where the client has or gets Y_i; W_i where it needs it."""
        of_rows = self._of_all if self.rows == "all" else self._of_rated
        return super().given_to(client_id) | of_rows(client_id)

    def _of_rated(self, client: int) -> dict[str, Any]:
        (name,), consensus = self._block.names, self._rated
        v = consensus.v[consensus[client].items]
        return {
            "anchor": {name: np.ascontiguousarray(consensus.anchor(client).T)},
            "start": {name: np.ascontiguousarray(v.T)},
            "dual": None,
            "rated_only": True,
        }

    def upload_spec_of(self, client_id: int) -> Spec:
        """Return the shape of W_i, of the items that the client rated where only these travel."""
        if self.rows == "all":
            return self.upload_spec()
        ((name, (shape, dtype)),) = self._block.spec.items()
        return {name: ((shape[0], len(self._rated[client_id].items)), dtype)}

    def _of_all(self, client: int) -> dict[str, Any]:
        consensus, members = self.state.consensus, self.membership
        start, dual = consensus.beginning(
            client,
            holds_start=not members.is_new(client),
            # In half precision a client's Y_i and the strategy's would drift apart.
            holds_dual=members.has_current_state(client) and self.wire_dtype is None,
            last_accepted=members.last_accepted.get(client),
        )
        anchor = self._block.arrays(consensus.anchor(client))
        return {"anchor": anchor, **self.variables(start, dual)}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in W_i, update Y_i by the old V (13); then V, (16) where it is the paper's."""
        if self.rows == "all":
            joined = self._block.joined
            uploads = {client: joined(reply.arrays) for client, reply in replies.items()}
            self.state.consensus.update(uploads)
            self.state.consensus.aggregate(anew=server_round % REBUILD_EVERY == 0)
            return
        for client, reply in replies.items():
            (uploaded,) = reply.arrays.values()
            self._rated.update(client, uploaded.T)
        self._rated.aggregate()

    @property
    def upload(self) -> Upload:
        """With ``rows="rated"`` what is uploaded says what was rated."""
        return Upload("statistic") if self.rows == "rated" else super().upload

    @property
    def item_factors(self) -> NDArray[Any]:
        """V, shape (r, n)."""
        consensus = self.state.consensus
        if isinstance(consensus, RatedConsensus):
            return consensus.v.T
        (factors,) = self._block.arrays(consensus.w).values()
        return factors
