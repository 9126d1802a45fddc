"""A typed message as a `NumPyClient` receives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies.runtime.messages.records import UPLOAD, ClientInstruction, to_json
from fl_admm_strategies.runtime.messages.schema import Instruction

Received = tuple[list[NDArray[Any]], dict[str, Any]]


def received(instruction: Instruction, **config: Any) -> Received:
    """Return the parameters and the config of an instruction, with what every round adds.

    By default it is round 1, nothing of the client was accepted yet, and its seed is 5. A list is
    sent as JSON: ``upload=["w"]``.
    """
    message = instruction.encode()
    common = {"version": 0, "server-round": 1, "seed": 5}
    settings = {
        name.replace("_", "-"): to_json(value) if name == UPLOAD else value
        for name, value in config.items()
    }
    full = ClientInstruction(message.groups, common | message.config | settings)
    return full.flat(), full.full_config()


def changed(
    instruction: Instruction, *, version: int = 0, server_round: int = 1, **changes: Any
) -> Received:
    """Return an instruction with some other fields, as `received` does."""
    asked = replace(instruction, **changes)
    return received(asked, version=version, server_round=server_round)


def handshake() -> Received:
    """Return the parameters and the config of a handshake without arrays."""
    message = ClientInstruction({"nothing": {}}, {"handshake": True})
    return message.flat(), message.full_config()


def scalars(**values: float) -> dict[str, NDArray[Any]]:
    """Return named arrays of one float64 each."""
    return {name: np.array([value], dtype=float) for name, value in values.items()}
