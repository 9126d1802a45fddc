"""The clients that a process keeps from one message to the next, in place of making them anew.

A client's context stays the truth: one that is kept gets the context of the new message, and the
model as `client_fn` gave it, so that it does to the bit what one that is made anew would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient

Make = Callable[[dict[str, Any]], tuple[NumPyClient, Context]]

MOST_BYTES = 2**28
"""Of the models of all clients that a process keeps, each twice; others are made anew: 256 MiB."""


Kept = tuple[NumPyClient, Context, list[tuple[Any, Any]]]
"""A client, its context, and each tensor of its model with a copy of what `client_fn` gave it.

Between two messages the state of the context is empty: that is in the node's.
"""


class Residents:
    """The clients of one app that a process keeps.

    They are those of this package's classes, which keep nothing on themselves, as far as their
    models fit into `MOST_BYTES`. A client that fails is made anew, and all are for another run.
    They go with the app; but Ray unpickles that for every message, so there they are the process's.

    Parameters
    ----------
    app_id : str
    """

    def __init__(self, app_id: str) -> None:
        self._app_id = app_id
        self._run_id: int | None = None
        self._kept: dict[int, Kept] = {}
        self._room = MOST_BYTES

    def __reduce__(self) -> tuple[Callable[[str], Residents], tuple[str]]:
        """Travel as the id of the app."""
        return _of_this_process, (self._app_id,)

    def client(self, make: Make, fields: dict[str, Any]) -> tuple[NumPyClient, Context]:
        """Return a client, kept or made, and its context, which has these fields."""
        if fields["run_id"] != self._run_id:
            self._run_id, self._kept, self._room = fields["run_id"], {}, MOST_BYTES
        client_id = fields["node_config"]["partition-id"]
        if client_id in self._kept:
            client, context, model = self._kept[client_id]
            context.state.update(fields["state"])
            vars(context).update(fields | {"state": context.state})
            for tensor, given in model:
                tensor.copy_(given)
            return client, context
        made: Any
        made, context = make(fields)
        if getattr(made, "only_reads", False):  # a `MethodClient` of this package
            model = made.model_copies()
            num_bytes = 2 * sum(given.nbytes for _, given in model)
            if num_bytes <= self._room:
                self._room -= num_bytes
                self._kept[client_id] = made, context, model
        return made, context

    def leave(self, client_id: int, failed: bool) -> None:
        """Let go of a client that failed, and of the state of one that did not."""
        if failed:
            self._kept.pop(client_id, None)
        elif client_id in self._kept:
            self._kept[client_id][1].state.clear()


_UNPICKLED: dict[str, Residents] = {}


def _of_this_process(app_id: str) -> Residents:
    """Return what this process keeps of an app that came to it; of any other it keeps nothing."""
    if app_id not in _UNPICKLED:
        _UNPICKLED.clear()
        _UNPICKLED[app_id] = Residents(app_id)
    return _UNPICKLED[app_id]
