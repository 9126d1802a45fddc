"""FedSim: a model of which a part is personal; clients train both parts at once.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated Learning with Partial Model
Personalization", ICML 2022, arXiv:2204.03809: Algorithms 1 and 3; see docs/methods/fedalt.md. With
the upper layers personal it is FedPer. The client is `clients.FedSimClient`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..maths.blocks import Arrays, Pattern
from ..maths.checks import Count
from ..maths.schedules import StepSize
from ..runtime.messages.schema import Instruction
from .shared.split import SplitStrategy


@dataclass(frozen=True)
class FedSimInstruction(Instruction):
    """What a client gets: u."""

    shared: Arrays
    personal: str | None
    lr: float
    local_epochs: int


class FedSim(SplitStrategy):
    """Federated learning with a personal part of the model, trained at the same time (FedSim).

    Parameters
    ----------
    personal : str or None
        Regular expression searched in the names of the arrays: v_i, which stays with the clients,
        as in `FedAlt`.
    lr : float or callable (default: 0.1)
        eta, the step size of both parts.
    local_epochs : int (default: 1)
        tau, local epochs.
    **base
        The parameters of `SplitStrategy`.
    """

    method: ClassVar = "FedSim"
    paper: ClassVar = "Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, ICML 2022, arXiv:2204.03809"
    message_type: ClassVar = FedSimInstruction

    personal: Pattern | None = field(kw_only=False)
    lr: StepSize = 0.1
    local_epochs: Count = 1
