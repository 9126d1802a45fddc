"""Which node hosts which clients, and how to reach them."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from logging import INFO, WARNING

from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from . import wire
from .wire import ClientReply, Order, RawReply

_LEGACY_APP = (
    "node {node} runs a ClientApp of Flower's older API (ClientApp(client_fn=...)), which this "
    "strategy cannot address. Either build the app with clients.client_app(client_fn), or run the "
    "strategy as LegacyStrategy(strategy, initial_arrays) in a ServerApp(server_fn=...)."
)


class _NoAnswer(Exception):  # noqa: N818 - nothing is wrong
    """A node's app does not answer queries."""


class ClientDirectory:
    """The nodes of a run and the clients they host.

    Parameters
    ----------
    hosted : mapping of int to list of int
        The ids of the clients of every node.

    Raises
    ------
    ValueError
        If two nodes host a client of the same id.
    """

    def __init__(self, hosted: Mapping[int, list[int]]) -> None:
        self._hosted = dict(sorted(hosted.items()))
        self._node_of: dict[int, int] = {}
        for node, clients in self._hosted.items():
            for client in clients:
                if (other := self._node_of.get(client)) is not None:
                    raise ValueError(
                        f"Nodes {other} and {node} both say that they are client {client}. Give "
                        "every node its own partition-id (flower-supernode --node-config "
                        '"partition-id=N num-partitions=M").'
                    )
                self._node_of[client] = node

    @classmethod
    def find(cls, grid: Grid, *, at_least: int, timeout: float) -> ClientDirectory:
        """Ask every node which clients it hosts, until all that are needed are known.

        A node whose app does not answer queries hosts one client, whose id is the node's. Nodes
        that know the size of their federation are waited for in full.

        Parameters
        ----------
        grid : Grid
            Where the nodes are.
        at_least : int
            Clients that are needed.
        timeout : float
            Seconds to wait for them.

        Raises
        ------
        TimeoutError
            If they are too few by then; the message says what to do.
        ValueError
            If two nodes host a client of the same id, or a node runs an app of the older API.
        """
        deadline = time.monotonic() + timeout
        next_word = time.monotonic() + 10.0
        hosted: dict[int, list[int]] = {}
        announced, trouble, probing, mute = 0, "", True, False
        while True:
            remaining = deadline - time.monotonic()
            new = sorted(set(grid.get_node_ids()) - hosted.keys())
            if mute:
                hosted |= {node: [node] for node in new}
            elif new:
                # One node first: all run the same app, and where it has no query handler Flower
                # logs a traceback for every node that is asked. A silent one must not stop us.
                asked, patience = (new[:1], remaining / 2) if probing else (new, remaining)
                queries = [
                    Message(RecordDict(), node, MessageType.QUERY, group_id="0") for node in asked
                ]
                for reply in grid.send_and_receive(queries, timeout=max(patience, 1.0)):
                    node = reply.metadata.src_node_id
                    try:
                        hosted[node], total = _read_identity(node, reply)
                        announced = max(announced, total)
                    except _NoAnswer:
                        hosted[node], mute = [node], True
                    except RuntimeError as error:
                        hosted[node], trouble = [], f" {error}"
                        log(WARNING, "%s", error)
                if probing:
                    probing = False
                    continue
            found = sum(map(len, hosted.values()))
            needed = max(at_least, announced)
            if found >= needed:
                return cls(hosted)
            if remaining <= 0:
                raise TimeoutError(too_few(found, len(hosted), needed, timeout) + trouble)
            if time.monotonic() >= next_word:
                next_word += 10.0
                log(INFO, "waiting for clients: %s of %s connected", found, needed)
            time.sleep(min(0.1, max(remaining, 0.0)))

    @property
    def client_ids(self) -> list[int]:
        """All clients, sorted."""
        return sorted(self._node_of)

    def messages(self, orders: Mapping[int, Order], message_type: str) -> list[Message]:
        """Return one message for every node that hosts one of the clients."""
        by_node: dict[int, dict[int, Order]] = {}
        for client, order in orders.items():
            by_node.setdefault(self._node_of[client], {})[client] = order
        return [
            Message(
                wire.pack_orders(own, hosted=len(self._hosted[node]) > 1),
                node,
                message_type,
                group_id=str(next(iter(own.values())).config["server-round"]),
            )
            for node, own in by_node.items()
        ]

    def replies(self, messages: Iterable[Message], asked: Container[int]) -> list[ClientReply]:
        """Return what every client replied, unchecked; None for a client that nobody knows.

        Parameters
        ----------
        messages : iterable of Message
            What came back.
        asked : container of int
            The clients that were asked: a node that fails as a whole fails for these.
        """
        replies: list[ClientReply] = []
        for message in messages:
            node = message.metadata.src_node_id
            own = self._hosted.get(node, [])
            if message.has_error():
                error = RawReply(error=message.error.reason or "no reason given")
                concerned = [client for client in own if client in asked]
                replies += [(client, error) for client in concerned or own] or [(None, error)]
                continue
            # A node speaks for its own clients only; a single one needs no label.
            labels: dict[str | None, int] = {str(client): client for client in own}
            if len(own) == 1:
                labels = {None: own[0]}
            for label, reply in wire.unpack_replies(message.content):
                if (speaker := labels.get(label)) is None:
                    name = "its client" if label is None else f"client {label}"
                    reason = f"node {node} replied for {name}, which this run does not know there"
                    reply = RawReply(error=reason)
                replies.append((speaker, reply))
        return replies


def too_few(found: int, nodes: int, needed: int, timeout: float) -> str:
    """Return what to tell a user for whom too few clients connected in time."""
    return (
        f"Waited {timeout:g} s: {found} clients on {nodes} nodes connected, the strategy needs "
        f"{needed}. In a simulation, ask for more nodes: flwr run . --federation-config "
        f"'num-supernodes={needed}' (the default is 2). In a deployment, start more SuperNodes, or "
        "lower min_available_nodes, or raise node_timeout."
    )


def _read_identity(node: int, reply: Message) -> tuple[list[int], int]:
    """Return the ids of a node's clients and how many its federation has (0: it does not know)."""
    if reply.has_error():
        reason = reply.error.reason or "no reason given"
        if "Invalid message type" in reason:
            raise ValueError(_LEGACY_APP.format(node=node))
        if "No query function registered" in reason:
            raise _NoAnswer
        raise RuntimeError(f"Node {node} could not say which clients it hosts: {reason}")
    for record in reply.content.config_records.values():
        ids, total = record.get(wire.CLIENT_IDS), record.get(wire.NUM_CLIENTS, 0)
        if ids is None:
            continue
        clients = [i for i in ids if isinstance(i, int) and i >= 0] if isinstance(ids, list) else []
        if clients != ids or len(set(clients)) < len(clients) or not isinstance(total, int):
            raise RuntimeError(
                f"Node {node} could not say which clients it hosts: it replied {wire.CLIENT_IDS}="
                f"{ids!r}, {wire.NUM_CLIENTS}={total!r}, expected different integers >= 0 and an "
                "integer."
            )
        return clients, total
    return [node], 0
