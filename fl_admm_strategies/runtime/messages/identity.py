"""What a node says of itself when it is asked: which clients it hosts, and how many there are."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ...maths.checks import listing
from . import records as wire
from .records import brief

_LEGACY_APP = (
    "Node {node} runs a ClientApp of Flower's legacy API (ClientApp(client_fn=...)), which this "
    "strategy cannot address. Either build the app with clients.client_app(client_fn), or run the "
    "strategy as LegacyStrategy(strategy, initial_arrays) in a ServerApp(server_fn=...)."
)


# Flower puts a dead actor back into its pool, where every later message to it fails.
# An engine names its own error by its class; a client's words stand in the text of another's.
_DEAD_ACTOR = re.compile(
    r"<class 'ray\.exceptions\.(ActorDiedError|RayActorError|OutOfMemoryError)'>"
)

# Nobody's federation is larger; a node that says so is mistaken, or wants the others to wait.
MOST_CLIENTS = 2**31


def runs_on_ray() -> bool:
    """Return whether Flower's simulation engine runs in this process."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def check_actor(reason: str) -> None:
    """Raise RuntimeError if the reason of an error is that a Ray actor died.

    Anywhere else than on Ray these are words of a client, who could end the run with them.
    """
    if _DEAD_ACTOR.search(reason) and runs_on_ray():
        raise RuntimeError(
            "A Ray actor died: its process ran out of memory, crashed or was killed. Flower does "
            "not replace it, so every later round would lose the clients that it is given. Run "
            "again from the last checkpoint (--resume, or resume=True), with "
            "more memory or fewer workers (more CPUs per client), or look for the cause with "
            f"--engine inprocess. Ray says: {brief(reason)}"
        )


def is_client_id(value: object) -> TypeGuard[int]:
    """Return whether a value that came from a node can be a client's id."""
    return type(value) is int and 0 <= value < 2**64


class NoAnswer(Exception):  # noqa: N818 - nothing is wrong
    """A node's app does not answer queries."""


class UnclearError(Exception):
    """A node's answer to a query cannot be used."""


class BrokenAppError(UnclearError):
    """A node's app is none that could take part."""


def ask(grid: Grid, nodes: Sequence[int]) -> dict[str, int]:
    """Ask nodes which clients they host; return them by the id of the message."""
    queries = [Message(RecordDict(), node, MessageType.QUERY, group_id="0") for node in nodes]
    if queries:
        grid.push_messages(queries)
    return {query.metadata.message_id: query.metadata.dst_node_id for query in queries}


def most_common(totals: Iterable[int]) -> int:
    """Return the number that occurs most often, the smaller of two; 0 where there is none."""
    counts = Counter(totals)
    return min(counts, key=lambda total: (-counts[total], total), default=0)


def check_free(node: int, clients: Sequence[int], hosted: Mapping[int, list[int]]) -> None:
    """Raise unless no other node hosts one of these clients."""
    for other, own in hosted.items():
        if taken := sorted(set(clients).intersection(own)):
            raise UnclearError(
                f"Node {node} is left out: it says that it is client {listing(taken)}, as does "
                f"node {other}. Give every node its own partition-id (flower-supernode "
                '--node-config "partition-id=N num-partitions=M").'
            )


def read_identity(node: int, reply: Message, most_per_node: int | None) -> tuple[list[int], int]:
    """Return the ids of a node's clients and how many its federation has (0: it does not know)."""
    if reply.has_error():
        reason = reply.error.reason or "no reason given"
        check_actor(reason)
        if reply.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION:
            raise BrokenAppError(f"Node {node} cannot load its ClientApp: {brief(reason)}")
        if "Invalid message type" in reason:
            raise BrokenAppError(_LEGACY_APP.format(node=node))
        if "No query function registered" in reason:
            raise NoAnswer
        raise UnclearError(f"Node {node} could not say which clients it hosts: {brief(reason)}")
    for record in reply.content.config_records.values():
        ids, total = record.get(wire.CLIENT_IDS), record.get(wire.NUM_CLIENTS, 0)
        if ids is None:
            continue
        clients = [i for i in ids if is_client_id(i)] if isinstance(ids, list) else []
        if clients != ids or len(set(clients)) < len(clients) or type(total) is not int:
            raise UnclearError(
                f"Node {node} could not say which clients it hosts: it replied {wire.CLIENT_IDS}="
                f"{brief(repr(ids))}, {wire.NUM_CLIENTS}={brief(repr(total))}, expected different "
                "integers >= 0 and an integer."
            )
        if not 0 <= total < MOST_CLIENTS:
            raise UnclearError(
                f"Node {node} is left out: it says that its federation has {total} clients, "
                f"expected 0 to {MOST_CLIENTS}."
            )
        if most_per_node is not None and len(clients) > most_per_node:
            raise UnclearError(
                f"Node {node} is left out: it hosts {len(clients)} clients, expected at most "
                f"{most_per_node} (max_clients_per_node)."
            )
        return clients, total
    return [node], 0
