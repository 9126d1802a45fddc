"""Local training: every client for itself, which is what a federation has to beat.

Nothing travels but the common initial model, once; see docs/methods/local.md. The client is
`clients.LocalClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays, Spec
from ..maths.checks import Count
from ..maths.schedules import StepSize
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from .shared.models import OwnModelsStrategy


@dataclass
class LocalState:
    """The model that clients start from."""

    initial: Arrays


@dataclass(frozen=True)
class LocalInstruction(Instruction):
    """What a client gets; `start` is empty but before its first accepted reply."""

    start: Arrays
    lr: float
    local_epochs: int


class Local(OwnModelsStrategy):
    """Training without a federation: the clients report metrics only.

    Parameters
    ----------
    lr : float or callable (default: 0.1)
        eta, the clients' step size.
    local_epochs : int (default: 1)
        Local epochs of a round.
    **base
        The parameters of `StatefulStrategy`.
    """

    method: ClassVar = "Local"
    paper: ClassVar = "no paper: what each client reaches alone"
    kinds: ClassVar = {"personal": "own model"}
    message_type: ClassVar = LocalInstruction

    lr: StepSize = 0.1
    local_epochs: Count = 1

    def init_state(self, arrays: Arrays) -> LocalState:
        """Start with the initial model on every client."""
        return LocalState(arrays)

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return the initial model for a client without one of its own."""
        return {"start": self.state.initial if self.membership.is_new(client_id) else {}}

    def upload_spec(self) -> Spec:
        """Return that nothing is uploaded."""
        return {}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Change nothing."""
