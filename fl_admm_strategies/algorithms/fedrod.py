"""FedRoD: one network, two heads: a generic one for all clients and a personal one beside it.

The generic head and the features under it are trained on balanced softmax, as if all classes were
equally frequent, and averaged; the personal head is trained on the client's own loss on top of
both, and stays.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022, arXiv:2107.00778: section 4; see docs/methods/fedrod.md. The client is `clients.FedRoDClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..maths.checks import NotNegative
from .shared.split import PERSONAL_HEAD, SplitInstruction, SplitStrategy


@dataclass(frozen=True)
class FedRoDInstruction(SplitInstruction):
    """What a client gets: the features' arrays and those of the generic head."""

    gamma: float


class FedRoD(SplitStrategy):
    """Federated learning with a generic and a personal head (FedRoD).

    Parameters
    ----------
    gamma : float (default: 1.0)
        gamma, how much the generic head's loss makes up for the client's numbers of examples by
        class: their logarithms times it are added to the logits. 0: not at all.
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
    two_headed: ClassVar = "TwoHeaded"
    gamma: NotNegative = 1.0
