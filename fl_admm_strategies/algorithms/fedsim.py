"""FedSim: a model of which a part is personal; clients train both parts at once.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated Learning with Partial Model
Personalization", ICML 2022, arXiv:2204.03809: Algorithms 1 and 3; see docs/methods/fedalt.md. With
the upper layers personal it is FedPer. The client is `clients.FedSimClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

from ..maths.blocks import Arrays, compile_pattern
from ..maths.checks import check_count, check_positive
from ..runtime.messages.schema import Instruction
from .shared.split import SplitSettings, SplitStrategy


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
    lr : float (default: 0.1)
        eta, the step size of both parts.
    local_epochs : int (default: 1)
        tau, local epochs.
    **base
        The parameters of `SplitStrategy`.
    """

    method: ClassVar = "FedSim"
    paper: ClassVar = "Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, ICML 2022, arXiv:2204.03809"

    def __init__(
        self,
        personal: str | None,
        *,
        lr: float = 0.1,
        local_epochs: int = 1,
        **base: Unpack[SplitSettings],
    ) -> None:
        super().__init__(**base)
        compile_pattern("personal", personal)
        check_positive("lr", lr)
        check_count("local_epochs", local_epochs, least=1)
        self.personal = personal
        self.lr = lr
        self.local_epochs = local_epochs

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> Mapping[int, FedSimInstruction]:
        """Send u to everybody."""
        instruction = FedSimInstruction(
            self.state.shared, self.personal, self.lr, self.local_epochs
        )
        return dict.fromkeys(client_ids, instruction)
