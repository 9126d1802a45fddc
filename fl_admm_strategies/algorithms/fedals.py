"""FedALS: matrix completion by alternating least squares; the server adds up normal equations.

With the items' factors V fixed, a client solves for its users' factors exactly, and sends what
these bring to the items' normal equations; the server adds up, and solves for V:

    v_j = (gamma I + sum_i A_ij)^{-1} sum_i b_ij,    A_ij = sum_t w_tj x_t x_t^T,   b_ij alike

over the users t of client i. So a round in which all take part is a sweep of alternating least
squares with all ratings in one place. Clients that sit out count with the users' factors they last
had: a round then minimises the same objective over V and some of the users' factors.

Hu, Koren, Volinsky, "Collaborative Filtering for Implicit Feedback Datasets", ICDM 2008, has the
least squares of both kinds of feedback; Ammad-ud-din et al., arXiv:1901.09888, the federated form
with gradients. See docs/methods/fedals.md. The client is `clients.FedALSClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec
from ..maths.normal import packed_size, solve_rows
from ..maths.regularizers import squared_l2_weight
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.completion import ExactCompletion
from .shared.totals import Totals, TotalsStrategy


@dataclass
class FedALSState:
    """V, shape (r, n), and the sums of the clients' parts in the items' normal equations."""

    items: NDArray[Any]
    totals: Totals


@dataclass(frozen=True)
class FedALSInstruction(Instruction):
    """What a client gets: V, and whether the server's sums have nothing of it yet."""

    factors: Arrays
    begins: bool
    feedback: str
    confidence: float
    upload: list[str]


class FedALS(TotalsStrategy, ExactCompletion):
    """Federated matrix completion by alternating least squares (FedALS).

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`. With explicit
    feedback the last row of V are the items' biases, which start at 0, so that the rank is r - 1.

    Parameters
    ----------
    regularizer : SquaredL2
        gamma/2 |V|^2, of the sum of all clients' losses. The clients have one for their users.
    **base
        The parameters of `ExactCompletion`; `init_scale` does nothing.

    Notes
    -----
    A client sends the change of its part in the sums since its last accepted upload, so the server
    knows the sum alone, and its memory is O(r^2 n): r (r + 3)/2 numbers for each item go up. When
    a client has left, or has lost its state, all send their whole part again, since no
    part can be taken out of the sum. Until then V is that of the clients in the sums.

    Evaluation reports ``loss``, the objective over the number of clients, and what else
    `CompletionStrategy` says; the users' factors are those that minimise at the V of the message.

    Examples
    --------
    >>> strategy = FedALS(SquaredL2(8.0), seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=5)
    >>> rmse = result.evaluate_metrics_clientapp[5]["rmse"]
    """

    method: ClassVar = "FedALS"
    paper: ClassVar = "Hu, Koren, Volinsky, ICDM 2008; Zhou et al., AAIM 2008"
    message_type: ClassVar = FedALSInstruction
    upload = Upload("statistic")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gamma = squared_l2_weight("regularizer", self.regularizer)
        if not self._gamma > 0:
            raise ValueError(
                "regularizer is SquaredL2(0), expected a weight above 0: the equations of an item "
                "that no client rated have no solution without."
            )

    def init_state(self, arrays: Arrays) -> FedALSState:
        """Start with V^0, and empty sums."""
        items = self.first_factors(arrays)
        (r, n), dtype = items.shape, items.dtype
        self._sums: Spec = {
            "matrices": ((n, packed_size(r)), dtype),
            "vectors": ((n, r), dtype),
        }
        if self.feedback == "implicit":
            self._sums |= {"gram": ((packed_size(r),), dtype)}
        return FedALSState(items, Totals.start(self._sums))

    def upload_spec(self) -> Spec:
        """Return the shapes of a client's part in the sums."""
        return self._sums

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return V, and what to upload."""
        return super().shared_fields(server_round) | {"upload": [*self._sums]}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return whether the sums have nothing of a client yet."""
        return {"begins": self.is_fresh(client_id)}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Add the changes to the sums, and solve for V."""
        state = self.state
        state.totals.add(reply.arrays for reply in replies.values())
        sums, items = state.totals.sums, state.items
        matrices = sums["matrices"] + sums.get("gram", 0.0)
        try:
            solved = solve_rows(matrices, sums["vectors"], self._gamma)
        except np.linalg.LinAlgError:  # of false numbers: the run ends by name
            solved = np.full_like(sums["vectors"], np.nan)
        state.items = np.ascontiguousarray(solved.T.astype(items.dtype))
