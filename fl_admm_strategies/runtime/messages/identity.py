"""What a node says of itself when it is asked: which clients it hosts, and how many there are."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeGuard

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from . import records as wire
from .records import brief

_OTHER_API = (
    "runs a ClientApp of another of Flower's APIs than this server. Run clients.client_app(...) "
    "with strategy.start(...), or ClientApp(client_fn=...) with LegacyServer(strategy, "
    "initial_arrays) in a ServerApp(server_fn=...)."
)


# Flower puts a dead actor back into its pool, where every later message to it fails.
# An engine names its own error by its class; a client's words stand in the text of another's. Where
# Ray has not heard of the death within a second, it calls the actor unavailable.
_DEAD_ACTOR = re.compile(
    r"<class 'ray\.exceptions\."
    r"(ActorDiedError|ActorUnavailableError|RayActorError|OutOfMemoryError)'>"
)

MOST_CLIENTS = 2**31
"""A node that announces more is mistaken, or wants the others to wait."""


def runs_on_ray() -> bool:
    """Return whether Flower's simulation engine runs in this process."""
    ray = sys.modules.get("ray")
    # Another thread may be importing it.
    return bool(getattr(ray, "is_initialized", bool)())


IN_PROCESS: ContextVar[bool] = ContextVar("IN_PROCESS", default=False)
"""Whether an `InProcessGrid` runs the code."""


def is_simulated() -> bool:
    """Return whether a simulation runs this client, with a server of the same user."""
    in_actor = runs_on_ray() and sys.modules["ray"].get_runtime_context().get_actor_id()
    return IN_PROCESS.get() or bool(in_actor)


def check_actor(error: Error) -> None:
    """Raise RuntimeError if the reason of an error is that a Ray actor died.

    Anywhere else than on Ray, and in what a client raised, these are words of a client, who could
    end the run with them.
    """
    reason = error.reason or ""
    is_raised = error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    if _DEAD_ACTOR.search(reason) and runs_on_ray() and not is_raised:
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


class Identity(NamedTuple):
    """What a node said of itself.

    Attributes
    ----------
    clients : list of int
        The ids of its clients.
    num_clients : int
        How many its federation has; 0 where it does not know.
    trouble : str
        Why its word cannot be used, as words that follow "it"; "" if it can.
    broken : bool
        Whether its app is none that could take part.
    """

    clients: list[int]
    num_clients: int = 0
    trouble: str = ""
    broken: bool = False


def ask(grid: Grid, nodes: Sequence[int]) -> dict[str, int]:
    """Ask nodes which clients they host; return them by the id of the message."""
    queries = [Message(RecordDict(), node, MessageType.QUERY, group_id="0") for node in nodes]
    if queries:
        grid.push_messages(queries)
    return {query.metadata.message_id: query.metadata.dst_node_id for query in queries}


def read_identity(node: int, reply: Message) -> Identity | None:
    """Return what a node's reply to a query says; None if its app does not answer queries."""
    if reply.has_error():
        reason = reply.error.reason or "no reason given"
        check_actor(reply.error)
        if reply.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION:
            trouble = f"cannot load its ClientApp: {brief(reason)}"
            return Identity([], trouble=trouble, broken=True)
        if "Invalid message type" in reason:
            return Identity([], trouble=_OTHER_API, broken=True)
        if "No query function registered" in reason:
            return None
        return Identity([], trouble=f"could not say which clients it hosts: {brief(reason)}")
    for record in reply.content.config_records.values():
        if (ids := record.get(wire.CLIENT_IDS)) is None:
            continue
        total: object = record.get(wire.NUM_CLIENTS, 0)
        clients = [i for i in ids if is_client_id(i)] if isinstance(ids, list) else []
        differ = clients == ids and len(set(clients)) == len(clients)
        if differ and type(total) is int and 0 <= total < MOST_CLIENTS:
            return Identity(clients, total)
        trouble = (
            f"replied {wire.CLIENT_IDS}={brief(repr(ids))}, {wire.NUM_CLIENTS}="
            f"{brief(repr(total))}, expected different integers >= 0 and an integer below "
            f"{MOST_CLIENTS}"
        )
        return Identity([], trouble=trouble)
    return Identity([node])
