"""Instructions whose replies are still to come, where rounds do not wait for all of them."""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import check_saved
from ..messages.records import OF_RUN, ClientInstruction, groups_setting, parse_groups, to_json

PENDING = "underway/"
"""Before the names of what a run saves of them."""

_CLOCK, _CLIENTS = "clock", "clients"


@dataclass(frozen=True)
class Sent:
    """An instruction that is under way.

    Attributes
    ----------
    instruction : ClientInstruction
    server_round : int
        The round that sent it.
    arrival : float
        When its reply is due on a simulated clock; NaN without one.
    """

    instruction: ClientInstruction
    server_round: int
    arrival: float


@dataclass
class PendingReplies:
    """What is on its way to clients and back. Where rounds wait for all replies it is empty.

    Attributes
    ----------
    sent : dict of int to Sent
        By client.
    training : set of int
        Clients that are not to be asked to evaluate now.
    clock : float
        Seconds that the training has taken, by the simulated clock where there is one.
    staleness : int
        Of the reply that was taken in last: how many others were since its client was asked.
    """

    sent: dict[int, Sent] = field(default_factory=dict)
    training: set[int] = field(default_factory=set)
    clock: float = 0.0
    staleness: int = 0

    def add(
        self, client: int, instruction: ClientInstruction, server_round: int, arrival: float
    ) -> None:
        """Note what a client is sent, without what names the run (`Outgoing.of_run`).

        With copies of the arrays, which may be views of a state.
        """
        groups = {
            group: {name: array.copy() for name, array in arrays.items()}
            for group, arrays in instruction.groups.items()
        }
        config = {name: value for name, value in instruction.config.items() if name not in OF_RUN}
        self.sent[client] = Sent(ClientInstruction(groups, config), server_round, arrival)

    def keep(self, clients: Collection[int]) -> None:
        """Forget what is under way to all but these."""
        for client in self.sent.keys() - set(clients):
            del self.sent[client]

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything that outlives the process; nothing where nothing ever was under way."""
        if not self.sent and not self.clock:
            return {}
        arrays: dict[str, NDArray[Any]] = {
            _CLOCK: np.array(self.clock),
            _CLIENTS: np.array(sorted(self.sent), dtype=np.uint64),
        }
        for client, sent in self.sent.items():
            instruction = sent.instruction
            saved = {
                "round": sent.server_round,
                "arrival": sent.arrival,
                "groups": groups_setting(instruction.groups),
                "config": {name: _as_json(value) for name, value in instruction.config.items()},
            }
            arrays[f"{client}"] = np.frombuffer(to_json(saved).encode(), np.uint8)
            arrays |= {f"{client}/{k}": array for k, array in enumerate(instruction.flat())}
        return arrays

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned; raise anything if that is none."""
        if not arrays:
            return
        ids, clock = ((-1,), np.dtype(np.uint64)), ((), np.dtype(np.float64))
        check_saved(arrays, {_CLIENTS: ids, _CLOCK: clock})
        self.clock = float(arrays[_CLOCK])
        if not 0 <= self.clock < math.inf:
            raise ValueError(f"the clock is {self.clock}")
        self.sent = {int(client): _read_one(int(client), arrays) for client in arrays[_CLIENTS]}


def _read_one(client: int, arrays: Mapping[str, NDArray[Any]]) -> Sent:
    saved = json.loads(arrays[f"{client}"].tobytes())
    named = parse_groups({"groups": saved["groups"]}) or {}
    numbers = iter(range(sum(map(len, named.values()))))
    groups = {
        group: {name: np.array(arrays[f"{client}/{next(numbers)}"]) for name in names}
        for group, names in named.items()
    }
    config = {name: _from_json(value) for name, value in saved["config"].items()}
    return Sent(ClientInstruction(groups, config), int(saved["round"]), float(saved["arrival"]))


def _as_json(value: Any) -> Any:
    return {"base64": b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return b64decode(value["base64"]) if isinstance(value, dict) else value
