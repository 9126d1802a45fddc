"""How a run reaches its clients under Flower's current API: over a grid."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from .members.discovery import ClientDirectory
from .members.owners import Owners
from .messages.records import ClientInstruction, ClientReply


class GridLink:
    """The nodes of a grid, and what is said to their clients.

    Parameters
    ----------
    at_least : int
        Clients that must be connected before every phase.
    timeout : float
        Seconds to wait for them.
    most_per_node : int or None
        Clients that a node may host.
    owners : Owners
        Whose the clients' ids are.
    """

    def __init__(
        self, at_least: int, timeout: float, most_per_node: int | None, owners: Owners
    ) -> None:
        self._at_least = at_least
        self._timeout = timeout
        self._most_per_node = most_per_node
        self._owners = owners
        self.directory = ClientDirectory({})

    def connect(self, grid: Grid, wanted: Collection[int], *, allow_missing: bool) -> None:
        """Wait for the clients that the run needs; see `ClientDirectory.find`."""
        self.directory = ClientDirectory.find(
            grid,
            at_least=self._at_least,
            timeout=self._timeout,
            wanted=wanted,
            allow_missing=allow_missing,
            most_per_node=self._most_per_node,
            owners=self._owners,
        )

    def refresh(self, grid: Grid) -> list[int]:
        """Before a phase, see who is connected, and wait where it is too few.

        Returns
        -------
        list of int
            Clients that may have lost what they keep.
        """
        return self.directory.refresh(grid, at_least=self._at_least, timeout=self._timeout)

    def exchange(
        self, grid: Grid, timeout: float, asked: dict[int, ClientInstruction], message_type: str
    ) -> Iterable[ClientReply]:
        """Send instructions to their clients and return what came back."""
        messages = self.directory.messages(asked, message_type)
        replies: Iterable[Message] = grid.send_and_receive(messages, timeout=timeout)
        return self.directory.replies(replies, asked)

    def train(
        self,
        grid: Grid,
        timeout: float,
        server_round: int,
        asked: dict[int, ClientInstruction],
    ) -> Iterable[ClientReply]:
        """Send the instructions of a round of training; return the replies that it takes in."""
        return self.exchange(grid, timeout, asked, MessageType.TRAIN)

    def pause(self, grid: Grid, timeout: float, *, last: bool) -> None:
        """Before an evaluation, see to those that are still training; `last`: no round follows."""
