"""All clients train in every round; those that are drawn upload, and only they are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.messages.schema import Instruction
from .models import OneMessageStrategy


class EveryoneTrains(OneMessageStrategy):
    """Base of the methods in which all clients train, and the sampled ones upload.

    Parameters
    ----------
    everyone_trains : bool (default: True)
        False: only the sampled clients train.
    **base
        The parameters of `StatefulStrategy`.
    """

    everyone_trains: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._idle = frozenset[int]()  # clients that train in this round and upload nothing

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> Mapping[int, Instruction]:
        """Send it to all clients that train; those that were not sampled upload nothing."""
        everyone = self.client_ids if self.everyone_trains else client_ids
        self._idle = frozenset(everyone).difference(client_ids)
        return super().train_instructions(server_round, sorted({*client_ids} | self._idle))

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return the arrays that a client uploads: none, or all (None)."""
        return super().client_fields(client_id) | {
            "upload": [] if client_id in self._idle else None
        }
