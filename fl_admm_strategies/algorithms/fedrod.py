"""FedRoD: one network, two heads: a generic one that is everybody's and a personal one beside it.

The generic head and the features under it are trained on balanced softmax, as if all clients had
all classes alike, and averaged; the personal head is trained on the client's own loss on top of
both, and stays.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022, arXiv:2107.00778: section 4; see docs/methods/fedrod.md. The client is `clients.FedRoDClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import Count, NotNegative
from ..maths.schedules import StepSize
from ..runtime.messages.schema import Instruction
from .shared.split import PERSONAL_HEAD, SplitState, SplitStrategy, check_two_headed


@dataclass(frozen=True)
class FedRoDInstruction(Instruction):
    """What a client gets: the features' arrays and those of the generic head."""

    shared: Arrays
    personal: str
    gamma: float
    lr: float
    local_epochs: int


class FedRoD(SplitStrategy):
    """Federated learning with a generic and a personal head (FedRoD).

    Parameters
    ----------
    gamma : float (default: 1.0)
        gamma, how much the generic head's loss makes up for the client's numbers of examples by
        class: their logarithms times it are added to the logits. 0: not at all.
    lr : float or callable (default: 0.1)
        eta, the step size.
    local_epochs : int (default: 1)
        Local epochs.
    **base
        The parameters of `SplitStrategy`.

    Notes
    -----
    The clients' model is a `clients.TwoHeaded`, and so are the initial arrays. Its personal head is
    what the client's model holds when it is built, a copy of the other. The global model has the
    features and the generic head.

    Examples
    --------
    >>> strategy = FedRoD(gamma=1.0, lr=0.1)
    >>> first = ArrayRecord(TwoHeaded.of(model).state_dict())
    >>> result = strategy.start(grid, first, num_rounds=100)
    """

    method: ClassVar = "FedRoD"
    paper: ClassVar = "Chen, Chao, ICLR 2022, arXiv:2107.00778"
    message_type: ClassVar = FedRoDInstruction
    kinds: ClassVar = {"personal": "personal head", "global": "generic head"}

    personal = PERSONAL_HEAD
    gamma: NotNegative = 1.0
    lr: StepSize = 0.1
    local_epochs: Count = 1

    def init_state(self, arrays: Arrays) -> SplitState:
        """Start with the initial features and generic head."""
        check_two_headed(arrays, "TwoHeaded")
        return super().init_state(arrays)
