"""The base of methods with a server that needs the sum over all clients, not of a round alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...maths.blocks import Arrays, Spec
from ...runtime.algorithm import MembersChange
from ...runtime.messages.records import ClientInstruction
from .models import OneMessageStrategy


@dataclass
class Totals:
    """Sums over the clients that have sent their part.

    Attributes
    ----------
    sums : Arrays
        By name, in double precision.
    began_in : int
        0, or the round in which they were last set to 0.
    """

    sums: Arrays
    began_in: int = 0

    @classmethod
    def start(cls, spec: Spec) -> Self:
        """Start with sums of 0."""
        return cls({name: np.zeros(shape) for name, (shape, _) in spec.items()})

    def add(self, parts: Iterable[Arrays]) -> None:
        """Add what clients sent."""
        for part in parts:
            for name, total in self.sums.items():
                total += part[name]

    def restart(self, server_round: int) -> None:
        """Set the sums to 0: all clients are to send their part again."""
        self.sums = {name: np.zeros_like(total) for name, total in self.sums.items()}
        self.began_in = server_round


class TotalsStrategy(OneMessageStrategy):
    """Base of the methods with `Totals` in the field ``totals`` of their state."""

    def is_fresh(self, client: int) -> bool:
        """Return whether the sums have nothing of a client's."""
        last_accepted = self.membership.last_accepted.get(client, 0)
        began_in: int = self.state.totals.began_in
        return last_accepted <= began_in

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure an upload from 0."""
        return {}

    def members_changed(self, change: MembersChange) -> None:
        """Begin again where a client's part is lost: it cannot be taken out of the sums."""
        if change.left or change.lost:
            self.state.totals.restart(change.server_round)
