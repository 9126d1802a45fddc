"""How a run reaches its clients under Flower's current API: over a grid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message, Metadata
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid

from .common.collector import collector_paused
from .members.client_keys import ClientKeys
from .members.discovery import Discovery
from .messages.identity import check_actor
from .messages.packing import Known, pack_instructions, unpack_replies
from .messages.records import (
    NOT_CONNECTED,
    ClientInstruction,
    ClientReply,
    RawReply,
    brief,
)

_MODS = (
    "Give mods not to the handler, but to client_app(client_fn, mods=[...]) or answer(client, "
    "message, mods=[...], context=context), which keep questions from them."
)


@dataclass
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
    client_keys : ClientKeys
        The keys of the nodes that the clients' ids belong to.

    Attributes
    ----------
    discovery : Discovery
        Which node hosts which clients.
    """

    at_least: int
    timeout: float
    most_per_node: int | None
    client_keys: ClientKeys

    def __post_init__(self) -> None:
        self.discovery = Discovery(self.client_keys, self.most_per_node)
        self._sent: list[Metadata] = []  # of the messages of this phase

    def connect(self, grid: Grid, wanted: Collection[int], *, allow_missing: bool) -> None:
        """Wait for the clients that the run needs; see `Discovery.find`."""
        self.discovery = Discovery(self.client_keys, self.most_per_node)
        self.discovery.find(
            grid,
            at_least=self.at_least,
            timeout=self.timeout,
            wanted=wanted,
            allow_missing=allow_missing,
        )

    def refresh(self, grid: Grid) -> list[int]:
        """Before a phase, see who is connected, and wait where it is too few.

        Returns
        -------
        list of int
            Clients that may have lost what they keep.
        """
        return self.discovery.refresh(grid, at_least=self.at_least, timeout=self.timeout)

    def exchange(
        self, grid: Grid, timeout: float, asked: dict[int, ClientInstruction], message_type: str
    ) -> Iterable[ClientReply]:
        """Send instructions to their clients and return what came back."""
        messages = self.messages(asked, message_type)
        return self.replies(grid.send_and_receive(messages, timeout=timeout), asked)

    @collector_paused()
    def messages(
        self, instructions: Mapping[int, ClientInstruction], message_type: str
    ) -> list[Message]:
        """Return one message for every connected node that hosts one of the clients."""
        by_node: dict[int, dict[int, ClientInstruction]] = {}
        for client, instruction in instructions.items():
            if self.discovery.is_connected(client):
                by_node.setdefault(self.discovery.node_of[client], {})[client] = instruction
        known: Known = {}
        messages = [
            Message(
                pack_instructions(hosted, hosted=self.discovery.num_hosted(node) > 1, known=known),
                node,
                message_type,
                group_id=str(next(iter(hosted.values())).config["server-round"]),
            )
            for node, hosted in by_node.items()
        ]
        self._sent = [message.metadata for message in messages]
        return messages

    @collector_paused()
    def replies(self, messages: Iterable[Message], asked: Collection[int]) -> list[ClientReply]:
        """Return what every client replied, unchecked; None for an unknown client.

        Parameters
        ----------
        messages : iterable of Message
            What came back.
        asked : collection of int
            The clients that were asked: a node that fails as a whole fails for these, and those
            whose node was not connected have failed already.
        """
        connected = self.discovery.is_connected
        absent = [(client, NOT_CONNECTED) for client in asked if not connected(client)]
        return [*absent, *self.read(messages, asked, self._sent)]

    def read(
        self, messages: Iterable[Message], asked: Collection[int], sent: Collection[Metadata]
    ) -> list[ClientReply]:
        """Return what is in messages that came back; `sent` are those that they answer."""
        replies: list[ClientReply] = []
        for message in messages:
            node = _asked_node(message, sent)
            clients = self.discovery.clients_on(node)
            if message.has_error():
                reason = message.error.reason or "no reason given"
                check_actor(message.error)
                if message.error.code == ErrorCode.MOD_FAILED_PRECONDITION:
                    reason = f"{reason} {_MODS}"
                error = RawReply(error=brief(reason))
                concerned = [client for client in clients if client in asked]
                replies += [(client, error) for client in concerned or clients] or [(None, error)]
                continue
            # A node speaks for its own clients only; a single one needs no label.
            alone = clients[0] if clients and self.discovery.num_hosted(node) == 1 else None
            found = list(unpack_replies(message.content))
            hosts = set(clients)
            for label, reply in found:
                speaker = alone if label is None else label
                if speaker in hosts:
                    replies.append((speaker, reply))
                elif label is None and clients and reply.error is not None:
                    # An error without a label concerns all clients that did not reply.
                    said = {client for client, _ in found}
                    replies += [(c, reply) for c in clients if c in asked and c not in said]
                else:
                    client = "its client" if label is None else f"client {label}"
                    reason = f"node {node} replied for {client}, which this run does not know there"
                    replies.append((None, RawReply(error=reason)))
        return replies


def _asked_node(reply: Message, sent: Iterable[Metadata]) -> int:
    """Return the node that a reply comes from, or is about.

    For a node that is gone the SuperLink itself replies, with an error.
    """
    if reply.metadata.src_node_id == SUPERLINK_NODE_ID:
        for question in sent:
            if question.message_id == reply.metadata.reply_to_message_id:
                return question.dst_node_id
    return reply.metadata.src_node_id
