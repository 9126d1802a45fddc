"""w and the sum of all clients' variables, for the servers of SCAFFOLD and pFedMe's FLAME form."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .blocks import pieces

REBUILD_EVERY = 256
"""Rounds after which a sum of messages is added up anew, where they are known."""


@dataclass
class Consensus:
    """w and the sum of the clients' messages.

    A message is z_i = u_i + pi_i/rho, or pi_i/rho where w is of the participants' u_i.

    Attributes
    ----------
    w : ndarray of shape (d,)
    total : ndarray of shape (d,), float64
        The sum of all messages, kept up to date by the changes, so that a round costs O(d) for each
        participant.
    first : ndarray of shape (d,)
        Where clients that keep their own variables start, if they have not uploaded anything since
        round `began_in`.
    began_in : int
        0, or the round of the last `restart`.
    of_participants : bool
        Whether w is of the participants' u_i.
    """

    w: NDArray[Any]
    total: NDArray[np.float64]
    first: NDArray[Any]
    began_in: int = 0
    of_participants: bool = False

    @classmethod
    def start(cls, first: NDArray[Any], *, of_participants: bool = False) -> Self:
        """Start with w = `first`, whose dtype is kept, and no client."""
        total = np.zeros(first.shape)
        return cls(first.copy(), total, first.copy(), of_participants=of_participants)

    def add_change(self, change: NDArray[Any]) -> None:
        """Take in the change of one client's message, shape (d,)."""
        self.total += change

    def aggregate(self, num_clients: int) -> None:
        """Set w to the mean of all messages, once the replies of a round are in."""
        w = np.empty_like(self.w)
        for part in pieces(len(w)):
            w[part] = self.total[part] / num_clients
        self.w = w

    def join(self, count: int) -> None:
        """Let new clients count, with u_i = w, pi_i = 0, which leaves w as it is."""
        if not self.of_participants:
            self.total += count * self.w.astype(np.float64)

    def rebuild(self, messages: Iterable[NDArray[Any]]) -> None:
        """Add up the messages of all clients anew, where they are known; w follows.

        When a client has left: ADMM for the clients that are left converges from any start, this
        one included. And every `REBUILD_EVERY` rounds: what a large upload once rounded away of the
        others' small changes would otherwise be missing for ever.
        """
        self.total = np.zeros_like(self.total)
        for message in messages:
            self.total += message

    def restart(self, server_round: int, num_clients: int) -> None:
        """Set every u_i to w and every pi_i to 0, where clients keep them.

        The sum holds a message of a client that has lost it, or has left, and it cannot be taken
        out. The strategy must send all clients where they start: see `starting_point`.
        """
        self.total = np.zeros_like(self.total)
        self.join(num_clients)
        self.first = self.w.copy()
        self.began_in = server_round
        logging.getLogger("flwr").info("All clients go on from the global model with duals of 0")

    def starting_point(self, last_accepted: int) -> NDArray[Any] | None:
        """Return what a client that keeps its variables starts from; None if it has started.

        Parameters
        ----------
        last_accepted : int
            The round of its last accepted upload, 0 before the first.
        """
        return self.first if last_accepted <= self.began_in else None
