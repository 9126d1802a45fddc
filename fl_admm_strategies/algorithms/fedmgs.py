"""FedMGS: matrix completion by sharing gradients in the items' factors.

Some clients move their users' factors U_i at the V that they received, and upload the gradient of
their loss in V; the server keeps the last one of every client and takes a gradient step on V. GS is
for gradient sharing, M for matrix: nothing is masked, encrypted or compressed. Ratings can be
inferred from such gradients, for which FedMC-ADMM's paper leaves the method out of its comparison.

Wang, Chang, "Federated Matrix Factorization: Algorithm Design and Application to Data Clustering",
IEEE Transactions on Signal Processing 70, 2022, arXiv:2002.04930; its statistics U_i^T U_i and
U_i^T M_i become gradients over the observed entries; see docs/methods/fedmgs.md. The client is
`clients.FedMGSClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays
from ..maths.checks import Count
from ..maths.clienttable import ClientTable, Row
from ..maths.regularizers import squared_l2_weight
from ..runtime.algorithm import Handshake
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.completion import CompletionStrategy, FedMCFactors
from .shared.curvature import check_curvature, too_large_curvatures

CURVATURE = "user-curvature"
"""The metric of a reply with lambda_i, a bound on the curvature of f_i in V."""
_LEAST_CURVATURE = 1e-12  # where all users' factors are 0, and gamma is


@dataclass
class FedMGSState:
    """V, shape (r, n), and rows ``gradient``, G_i of that shape, and ``curvature``, lambda_i."""

    items: NDArray[Any]
    clients: ClientTable


@dataclass(frozen=True)
class FedMGSInstruction(Instruction):
    """What a client gets: V, and what it needs to draw its U_i^0."""

    factors: Arrays
    factor_seed: int
    factor_scale: float
    user_steps: int


class FedMGS(CompletionStrategy):
    """Federated matrix completion by gradient sharing (FedMGS).

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`.

    Parameters
    ----------
    regularizer : SquaredL2
        R = gamma/2 |V|^2, on the items' factors; the method takes gradient steps.
    user_steps : int (default: 10)
        Q_1, gradient steps on U_i in a round.
    **base
        The parameters of `CompletionStrategy`.

    Notes
    -----
    Before round 1 every client sends its gradient and its lambda_max(U_i^T U_i) at (U_i^0, V^0), as
    does one that connects later. The gradient of one that has left leaves the mean, that of one
    that sits out stays. The strategy's memory is O(p r n). A client that lost its U_i draws U_i^0
    again. Evaluation is that of `CompletionStrategy`.

    The server sees gradients of the ratings. No promise of privacy comes with it.

    Examples
    --------
    >>> strategy = FedMGS(SquaredL2(1e-6), fraction_train=0.1, seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=20)
    >>> rmse = result.evaluate_metrics_clientapp[20]["rmse"]
    """

    method: ClassVar = "FedMGS"
    paper: ClassVar = "Wang, Chang, IEEE TSP 2022, arXiv:2002.04930"
    message_type: ClassVar = FedMGSInstruction
    upload = Upload("statistic")  # a gradient

    user_steps: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gamma = squared_l2_weight("regularizer", self.regularizer)

    def init_state(self, arrays: Arrays) -> FedMGSState:
        """Start with V^0."""
        first = self.first_factors(arrays)
        return FedMGSState(first, ClientTable(gradient=np.zeros_like(first), curvature=0.0))

    def handshake(self, client_ids: Sequence[int]) -> Handshake[FedMCFactors]:
        """Ask for G_i and lambda_i at the start."""
        questions = self.evaluate_instructions(0, client_ids)
        return Handshake(questions, self.upload_spec(), partial(too_large_curvatures, CURVATURE))

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with G_i and lambda_i as they were reported."""
        if reply is None:
            return {}
        self.check_reply(client_id, reply)
        (gradient,) = reply.arrays.values()
        return {"gradient": gradient, "curvature": reply.metrics[CURVATURE]}

    def check_reply(self, client_id: int, reply: Reply) -> None:
        """Raise ValueError if lambda_i is none, or far above those of the others."""
        check_curvature(CURVATURE, client_id, reply, self.state.clients.column("curvature"))

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure a gradient from 0."""
        return {}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the G_i, then V <- V - [mean G_i + gamma V]/c_V over all clients."""
        state = self.state
        for client, reply in replies.items():
            row = state.clients[client]
            (row.gradient,), row.curvature = reply.arrays.values(), reply.metrics[CURVATURE]
        curvature = float(state.clients.column("curvature").mean()) + self._gamma
        gradient = state.clients.column("gradient").mean(axis=0, dtype=np.float64)
        gradient += self._gamma * state.items
        moved = state.items - gradient / max(curvature, _LEAST_CURVATURE)
        state.items = moved.astype(state.items.dtype)
