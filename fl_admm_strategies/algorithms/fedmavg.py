"""FedMAvg: matrix completion by averaging the items' factors.

Every client moves its users' factors U_i by gradient steps at the V that it received; of some
clients V is moved as well, and the server takes the mean of what they made of it.

Wang, Chang, "Federated Matrix Factorization: Algorithm Design and Application to Data Clustering",
IEEE Transactions on Signal Processing 70, 2022, arXiv:2002.04930, in the form for incomplete
matrices that section 5.2 of arXiv:2503.12733 compares FedMC-ADMM with; see docs/methods/fedmavg.md.
The steps are the client's, `clients.FedMAvgClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays
from ..maths.checks import Count
from ..maths.regularizers import squared_l2_weight
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.completion import CompletionStrategy
from .shared.everyone import EveryoneTrains


@dataclass
class FedMAvgState:
    """V, the items' factors, shape (r, n)."""

    items: NDArray[Any]


@dataclass(frozen=True)
class FedMAvgInstruction(Instruction):
    """What a client gets: V, and what weighs its data's gradient in V: 1/p or 1.

    Where `upload` is there it is empty: the client moves its users' factors only.
    """

    factors: Arrays
    factor_seed: int
    factor_scale: float
    gamma: float
    data_weight: float
    user_steps: int
    item_steps: int
    upload: list[str] | None


class FedMAvg(EveryoneTrains, CompletionStrategy):
    """Federated matrix completion by model averaging (FedMAvg).

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`.

    Parameters
    ----------
    regularizer : SquaredL2
        R = gamma/2 |V|^2, on the items' factors; the method takes gradient steps.
    step : {"unscaled", "paper"} (default: "unscaled")
        What weighs the data's gradient in the steps on V, of the length 1/(5 lambda_max(U_i^T
        U_i)) in both: 1, or 1/p as the formula in FedMC-ADMM's paper has it, with which V moves
        p times less far (docs/methods/fedmavg.md, P2).
    user_steps : int (default: 10)
        Q_1, gradient steps on U_i in a round.
    item_steps : int (default: 10)
        Q_2, those on V.
    everyone_trains : bool (default: True)
        Whether all clients move their U_i in every round, as in the paper, or only those that
        upload V. `fraction_train` is the share of the latter.
    **base
        The parameters of `CompletionStrategy`.

    Notes
    -----
    V is the plain mean over those who sent theirs. Evaluation is that of `CompletionStrategy`. A
    client that lost its U_i draws U_i^0 again; one that connects later starts there; one that
    leaves has no part in V any more. p stays what it was at the start.

    Examples
    --------
    >>> strategy = FedMAvg(SquaredL2(1e-6), fraction_train=0.1, seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=20)
    >>> rmse = result.evaluate_metrics_clientapp[20]["rmse"]
    """

    method: ClassVar = "FedMAvg"
    paper: ClassVar = "Wang, Chang, IEEE TSP 2022, arXiv:2002.04930"
    upload = Upload("mean")
    message_type: ClassVar = FedMAvgInstruction

    step: Literal["unscaled", "paper"] = "unscaled"
    user_steps: Count = 10
    item_steps: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gamma = squared_l2_weight("regularizer", self.regularizer)

    def init_state(self, arrays: Arrays) -> FedMAvgState:
        """Start with V^0."""
        return FedMAvgState(self.first_factors(arrays))

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return V, and what weighs the gradients."""
        weight = 1 / self.membership.num_initial if self.step == "paper" else 1.0
        return super().shared_fields(server_round) | {"gamma": self._gamma, "data_weight": weight}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set V to the mean of the W_i that came up."""
        uploads = [items for reply in replies.values() for items in reply.arrays.values()]
        if uploads:
            mean = np.mean(uploads, axis=0, dtype=np.float64)
            self.state.items = mean.astype(self.state.items.dtype)
