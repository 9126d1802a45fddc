"""All clients train in every round; those that are drawn upload, and only they are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.messages.schema import Instruction
from .models import OneMessageStrategy


class EveryoneTrains(OneMessageStrategy):
    """Who trains and who uploads, where a method's personal part moves in every client.

    Parameters
    ----------
    everyone_trains : bool (default: True)
        False: only those who are drawn train.
    **base
        The parameters of `StatefulStrategy`.
    """

    everyone_trains: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._idle = frozenset[int]()  # who trains in this round and uploads nothing

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> Mapping[int, Instruction]:
        """Send it to all who train; those that were not drawn upload nothing."""
        everyone = self.client_ids if self.everyone_trains else client_ids
        self._idle = frozenset(everyone).difference(client_ids)
        return super().train_instructions(server_round, sorted({*client_ids} | self._idle))

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return the arrays that a client uploads: none, or all (None)."""
        return super().client_fields(client_id) | {
            "upload": [] if client_id in self._idle else None
        }
