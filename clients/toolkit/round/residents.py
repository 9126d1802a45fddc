"""The clients that a process keeps from one message to the next, in place of making them anew.

A client's context stays the truth: one that is kept gets the context of the new message, and the
model as `client_fn` gave it, so that it does to the bit what one that is made anew would do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient

Make = Callable[[dict[str, Any]], tuple[NumPyClient, Context]]

MOST_BYTES = 2**28
"""Of the models of all clients that a process keeps, each twice; others are made anew: 256 MiB."""


@dataclass(frozen=True)
class Resident:
    """A client that is kept.

    Attributes
    ----------
    client : NumPyClient
    context : Context
        The client's own. Between two messages its state is empty: that is in the node's.
    restore : callable
        Makes its model again what `client_fn` gave it.
    num_bytes : int
    """

    client: NumPyClient
    context: Context
    restore: Callable[[], None]
    num_bytes: int

    def renew(self, fields: dict[str, Any]) -> None:
        """Make it what it would be if it were made anew, with these fields of its context."""
        self.context.state.update(fields["state"])
        vars(self.context).update(fields | {"state": self.context.state})
        self.restore()


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
        self._kept: dict[int, Resident] = {}
        self._bytes = 0

    def __reduce__(self) -> tuple[Callable[[str], Residents], tuple[str]]:
        """Travel as the id of the app."""
        return _of_this_process, (self._app_id,)

    def client(self, make: Make, fields: dict[str, Any]) -> tuple[NumPyClient, Context]:
        """Return a client, kept or made, and its context, which has these fields."""
        if fields["run_id"] != self._run_id:
            self._run_id, self._kept, self._bytes = fields["run_id"], {}, 0
        client_id = fields["node_config"]["partition-id"]
        if (resident := self._kept.get(client_id)) is not None:
            resident.renew(fields)
            return resident.client, resident.context
        client: Any
        client, context = make(fields)
        if getattr(client, "only_reads", False):  # a `MethodClient` of this package
            num_bytes = 2 * client.model_bytes()
            if self._bytes + num_bytes <= MOST_BYTES:
                self._bytes += num_bytes
                self._kept[client_id] = Resident(client, context, client.restorer(), num_bytes)
        return client, context

    def leave(self, client_id: int, failed: bool) -> None:
        """Let go of a client that failed, and of the state of one that did not."""
        if (resident := self._kept.get(client_id)) is None:
            return
        if failed:
            self._bytes -= resident.num_bytes
            del self._kept[client_id]
        else:
            resident.context.state.clear()


_UNPICKLED: dict[str, Residents] = {}


def _of_this_process(app_id: str) -> Residents:
    """Return what this process keeps of an app that came to it; of any other it keeps nothing."""
    if app_id not in _UNPICKLED:
        _UNPICKLED.clear()
        _UNPICKLED[app_id] = Residents(app_id)
    return _UNPICKLED[app_id]
