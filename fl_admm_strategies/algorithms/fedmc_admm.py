"""FedMC-ADMM: federated matrix completion, for recommenders.

Each client holds the ratings M_i of its own users; all rate the same items. The factors U_i of the
users stay with their client, the factors V of the items are shared:

    minimise  (1/p) sum_i [1/2 |P_i(M_i - U_i V)|_F^2 + R_i(U_i)] + R(V)              (1), (2)

where P_i keeps the observed ratings. Every client has a copy W_i of V, and W_i = V is kept by ADMM.

Hytla, Nghia, Phan, Rice, "A Linearized Alternating Direction Multiplier Method for Federated Matrix
Completion Problems", arXiv:2503.12733: Algorithm 1; see docs/methods/fedmc-admm.md. Here are (13)
and (16); (14) and (15) are the client's, `clients.FedMCADMMClient`, and so are the exact minimisers
that take their place by default (docs/methods/fedmc-admm-notes.md, P15).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, Spec, spec_of
from ..maths.checks import Count, Positive
from ..maths.clienttable import Row
from ..maths.consensus import REBUILD_EVERY, ConsensusADMM
from ..maths.rated import RATED, RatedConsensus
from ..runtime.messages.records import Reply
from ..runtime.trust.means import those_too_large
from .shared.base import ConsensusForm, ConsensusInstruction
from .shared.completion import CURVATURE, CompletionStrategy, FedMCFactors


@dataclass
class FedMCState:
    """V, and W_i and Y_i of every client, or a sum over them; see `Consensus`."""

    consensus: ConsensusADMM | RatedConsensus


@dataclass(frozen=True)
class FedMCInstruction(ConsensusInstruction):
    """What a client gets: V - Y_i/beta, or V where it has or gets Y_i; W_i where it starts with it.

    An empty `dual` is Y_i^0. Where `item_curvature` is there, that of where the client starts, all
    are of the items that it rated.
    """

    factor_seed: int
    factor_scale: float
    num_clients: int
    beta: float
    inner_steps: int
    y0: str
    solve: str = "linear"
    feedback: str = "explicit"
    confidence: float = 1.0
    item_curvature: float | None = None


class FedMCADMM(ConsensusForm, CompletionStrategy):
    """Federated matrix completion by ADMM (FedMC-ADMM).

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`. With exact
    solutions and explicit feedback the last row are the items' biases, which start at 0, so that
    the rank is r - 1.

    Parameters
    ----------
    regularizer : Regularizer
        R, on the items' factors: `SquaredL2(gamma)`, `L1Norm(gamma)`, or an object of your own with
        a proximal operator. The clients have one for their users' factors.
    beta : float (default: 1.0)
        beta, the ADMM penalty parameter; the paper does not say which it used (see Notes).
    solve : {"exact", "linear"}, optional
        A client's two steps in a round. "exact", the default: the minimisers in U_i, at V, and in
        W_i, with biases of users and items and the client's mean rating in the model. The objective
        is a sum over the clients, not their mean, so that no weight depends on their number; the
        clients' regulariser must be `SquaredL2`. "linear": the paper's proximal gradient steps on
        its objective, which `published` means.
    feedback : {"explicit", "implicit"} (default: "explicit")
        What the clients' ratings are. "implicit", with exact solutions only: interactions, numbers
        above 0; what is not listed counts as a 0, and there are no biases.
    confidence : float (default: 1.0)
        With "implicit" an interaction r is a 1 of weight 1 + confidence r, what is none a 0 of
        weight 1.
    inner_steps : int (default: 10)
        N, proximal gradient steps of a client on each of its two blocks in a round; exact
        minimisers need none.
    y0 : {"zero", "handshake"} (default: "zero")
        How the duals start. "zero": Y_i^0 = 0, as in the authors' code. "handshake": the paper's
        Y_i^0 = -(1/p) grad_V f_i(U_i^0, V^0), which clients send before round 1; one whose
        handshake fails joins with 0. They share a gradient of their raw data, and V^1 can be far
        off where beta is small.
    duals : {"strategy", "client"} (default: "strategy")
        Where Y_i and the last W_i are kept. "strategy": V - Y_i/beta goes down, W_i comes up, and
        the strategy updates Y_i; its memory is O(p r n). "client": V goes down, the change of
        Z_i = W_i + Y_i/beta comes up, which is all that (16) needs; the strategy's memory is
        O(r n), and it sees neither W_i nor Y_i but their sum alone. The trajectory is the same.
    rows : {"all", "rated"} (default: "all")
        What is kept and sent of a client's W_i and Y_i. "rated": only the items that it rated; the
        others follow one recursion (docs/methods/fedmc-admm-notes.md, P13). The same trajectory to
        rounding, with memory and bytes by the number of ratings in place of clients times items:
        for many clients with few ratings each. Before round 1 every client says which items it
        rated, which the strategy can otherwise see by which columns of its W_i follow the
        recursion. Goes with ``duals="strategy"`` and ``y0="zero"``, and with explicit feedback.
    **base
        The parameters of `ConsensusForm` (u_i, w and pi_i are W_i, V and Y_i here), with
        ``start_at="own"`` by default where `solve` is "linear", and of `CompletionStrategy`,
        `init_scale` among them.

    Notes
    -----
    Evaluation reports ``loss``, Phi (17), ``rmse``, in stars, and what else `CompletionStrategy`
    says. They are the paper's with ``fraction_evaluate=1``.

    Of ``solve="linear"`` two settings of what the paper leaves open work
    (docs/methods/fedmc-admm-notes.md, P1):
    ``beta=1`` and ``init_scale=1`` on ratings as they are, and that of the authors' code,
    ``beta=1e4`` and ``init_scale=2e-4`` on standardised ratings. A beta well above |U^T U|_F / p
    freezes V, one far below is unstable. The bound on beta of Theorems 4.7 and 4.8 (a max where the
    paper prints min) is some five orders above what works best, so it is not checked.

    U_i never leaves its client. One that lost it starts again at U_i^0, which is drawn from a seed
    in the message, with W_i as the strategy has it; with ``duals="client"`` the strategy has its
    Z_i in a sum only, which cannot be put right, so all clients go on with W_i = V, Y_i = 0.

    A client that connects in mid-run starts with W_i = V, Y_i = 0 and counts in the mean from its
    first accepted upload. When a client has left, its Z_i leaves the mean; with ``duals="client"``
    all others go on with W_i = V, Y_i = 0. In the paper's objective p stays what it was at the
    start, in the clients' steps and in that of R's proximal operator: with p' clients this is
    Algorithm 1 for p'/p times (2), so that the minimiser is that of the p' clients and no Y_i
    changes its scale.

    That U_i stays is no promise of privacy: by Lemma 4.5 Y_i is a gradient with a proximal term,
    from which something can be inferred about the ratings. With ``duals="client"`` the
    server needs no more than a sum over the clients.

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
    default_start: ClassVar = "own"  # where few take part the better solution (P14)
    told: ClassVar = FedMCInstruction
    title = "FedMC-ADMM"

    beta: Positive = 1.0
    solve: Literal["exact", "linear"] | None = None
    feedback: Literal["explicit", "implicit"] = "explicit"
    confidence: Positive = 1.0
    inner_steps: Count = 10
    y0: Literal["zero", "handshake"] = "zero"
    rows: Literal["all", "rated"] = "all"

    def __post_init__(self) -> None:
        if self.published and self.solve == "exact":
            raise ValueError(
                "solve is 'exact', expected 'linear' with published=True, which is the paper's "
                "iteration. Leave out one of the two."
            )
        self.solve = self.solve or ("linear" if self.published else "exact")
        if self.solve == "exact" and self.start_at is None:
            self.start_at = "global"
        super().__post_init__()
        if self.solve == "exact" and self.y0 == "handshake":
            raise ValueError(
                "y0 is 'handshake', expected 'zero' with exact solutions, which need no first "
                "duals. Leave it out, or give solve='linear'."
            )
        if self.feedback == "implicit" and (self.solve == "linear" or self.rows == "rated"):
            raise ValueError(
                f"feedback is 'implicit' with solve={self.solve!r} and rows={self.rows!r}, "
                "expected 'exact' and 'all': every item counts for every client. Leave both out."
            )
        if self.rows == "rated" and (self.duals, self.y0) != ("strategy", "zero"):
            raise ValueError(
                f"rows is 'rated' with duals={self.duals!r} and y0={self.y0!r}, expected "
                "'strategy' and 'zero': the strategy follows what clients did not rate. Leave both "
                "out, or give rows='all'."
            )

    @property
    def is_summed(self) -> bool:
        """Whether the objective is a sum over the clients."""
        return self.solve == "exact"

    @property
    def _more(self) -> str:
        """What else `form` says of the local steps."""
        if self.solve == "linear":
            return ""
        biases = " of a model with biases" if self.feedback == "explicit" else ""
        return f", they are exact solutions{biases}"

    def init_state(self, arrays: Arrays) -> FedMCState:
        """Start with W_i = V = V^0 and Y_i = 0 for every client."""
        if self.solve == "exact":
            first = self.first_items(arrays, self.feedback)
            arrays = dict.fromkeys(arrays, first)
        first = self.first_factors(arrays)
        self._block = Block(spec_of(arrays))
        self._shape = first.shape
        from_v, of_participants = self.start_at == "global", self.averaging == "participants"
        if self.rows == "rated":
            rated = RatedConsensus(
                first.T, self._prox_of_rows, from_v=from_v, of_participants=of_participants
            )
            return FedMCState(rated)
        dense = ConsensusADMM(
            self._block.vector(arrays),
            self.beta,
            on_clients=self.duals == "client",
            from_w=from_v,
            of_participants=of_participants,
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

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, FedMCFactors]:
        """Ask every client for its Y_i^0 before round 1, or for the items that it rated."""
        if self.rows == "rated":
            first = self.global_model()
            return {
                c: FedMCFactors(first, **self.first_users(c), rated_only=True) for c in client_ids
            }
        if self.y0 == "zero":
            return {}
        first = self._block.arrays(self.state.consensus.mean.first)
        members = self.membership  # those that come later start with 0
        return {c: FedMCFactors(first, **self.first_users(c)) for c in client_ids if c in members}

    def handshake_spec(self) -> Spec:
        """Return the shape of Y_i^0, which is that of V, or of what says which items are rated."""
        if self.rows == "rated":
            return {RATED: (self._shape[1:], np.dtype(np.bool_))}
        return self._block.spec

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the items that it rated."""
        return {} if self.rows == "all" or reply is None else reply.arrays

    def check_handshake(self, replies: Mapping[int, Reply]) -> dict[int, str]:
        """Return whose Y_i^0 is so large that the first mean would be its own."""
        if self.rows == "rated":
            return {}
        said = {c: float(abs(self._block.vector(r.arrays)).max()) for c, r in replies.items()}
        return those_too_large("Y_i^0 up to", said)

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Take in Y_i^0 of all clients. They enter V with the first V step; V^0 stays."""
        if self.rows == "all":
            for client, reply in replies.items():
                self.state.consensus.set_dual(client, self._block.vector(reply.arrays))

    def given(self, server_round: int) -> dict[str, Any]:
        """Return the name of V."""
        return {"optimised": self._block.names}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return V - Y_i/beta, or V where the client has or gets Y_i; W_i where it needs it."""
        of_rows = self._of_all if self.rows == "all" else self._of_rated
        return super().given_to(client_id) | of_rows(client_id)

    def _of_rated(self, client: int) -> dict[str, Any]:
        (name,), consensus = self._block.names, self._rated
        return {
            "anchor": {name: np.ascontiguousarray(consensus.anchor(client).T)},
            "start": {name: np.ascontiguousarray(consensus.start(client).T)},
            "dual": None,
            "item_curvature": consensus.curvature(client),
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
        from_zero = consensus.mean.began_in > 0 or client in members.joining
        if dual is not None and not from_zero and (self.duals, self.y0) == ("client", "handshake"):
            start, dual = consensus.mean.first, None  # the client makes its Y_i^0 at V^0 again
        anchor = self._block.arrays(consensus.anchor(client))
        y0 = "zero" if from_zero else self.y0
        return {"anchor": anchor, **self.variables(start, dual), "y0": y0}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in W_i, update Y_i by the old V (13); then V, (16) where it is the paper's."""
        if self.rows == "all":
            joined = self._block.joined
            uploads = {client: joined(reply.arrays) for client, reply in replies.items()}
            self.state.consensus.update(uploads)
        else:
            for client, reply in replies.items():
                (uploaded,) = reply.arrays.values()
                self._rated.update(client, uploaded.T.copy(), self._decay(reply))
        self.state.consensus.aggregate(anew=server_round % REBUILD_EVERY == 0)
        from_v = self.duals == "client" or self.start_at == "global"  # so distances are measured
        is_first = not any(self.membership.last_accepted.values())
        if self.max_norm == "auto" and from_v and is_first and self.y0 == "handshake":
            # The Y_i^0 have just entered V and moved it by their mean: distances say that now (P3).
            self.run.bound.begin_anew()

    def adopt(self, model: Arrays, num_replies: int) -> None:
        """Go on from another V."""
        self.state.consensus.adopt(self._block.vector(model), num_replies)

    @property
    def how_counted(self) -> str:
        """What the sum of the changes of Z_i asks for."""
        more = " and leave out rows='rated'" if self.rows == "rated" else ""
        return super().how_counted + more

    @property
    def why_not_noised(self) -> str:
        """Say what clients are asked for beside V's change, where it is of their ratings."""
        if self.rows == "rated":
            return "it asks every client which items it rated. Leave out rows='rated'."
        if self.y0 == "handshake":
            return "it asks every client for Y_i^0. Leave out y0='handshake'."
        return super().why_not_noised

    @property
    def why_not_private(self) -> str:
        """Say where V has parts that no clipped upload changed."""
        if self.rows == "rated":
            return (
                "of the items that a client did not rate its copy follows V, so that V tells "
                "which those are, whatever is clipped. Leave out rows='rated'."
            )
        if self.y0 == "handshake":
            return (
                "the clients' Y_i^0 enter V as they are, gradients of the ratings. Leave out "
                "y0='handshake'."
            )
        return super().why_not_private

    @property
    def why_not_adopted(self) -> str:
        """Why no V can be put in the place of the method's own."""
        all_rows = self.rows == "all"
        return "" if all_rows else "with rows='rated' it follows every V there was, so give 'all'"

    def _decay(self, reply: Reply) -> float:
        """Return q = (L/(L + p beta))^N, L being the client's ||U_i^T U_i||_F."""
        curvature = reply.metrics.get(CURVATURE, 0.0)
        if not 0 <= curvature < math.inf:  # of a client that is not ours
            curvature = 0.0
        pull = self.membership.num_initial * self.beta
        return float((curvature / (curvature + pull)) ** self.inner_steps)

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedMCFactors]:
        """Send V, which with ``rows="rated"`` the clients do not keep."""
        if self.solve == "exact":
            asked = self.exact_evaluations(client_ids, self.feedback, self.confidence)
        else:
            asked = super().evaluate_instructions(server_round, client_ids)
        if self.rows == "all":
            return asked
        return {client: replace(one, rated_only=True) for client, one in asked.items()}

    @property
    def item_factors(self) -> NDArray[Any]:
        """V, shape (r, n)."""
        consensus = self.state.consensus
        if isinstance(consensus, RatedConsensus):
            return consensus.v.T
        (factors,) = self._block.arrays(consensus.w).values()
        return factors
