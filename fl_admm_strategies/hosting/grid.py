"""What the grids of this library share: a run, and ids for their messages."""

from __future__ import annotations

import itertools

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid

# The only two private imports, both unavoidable: Grid's abstract `run` / `set_run` are typed with
# `Run`, and `Message(...)` raises unless the process has a `TaskIdentity`.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """A grid that numbers its messages in this process."""

    def __init__(self) -> None:
        self._run = Run.create_empty(run_id=_process_run_id())
        self._message_numbers = itertools.count(1)

    def set_run(self, run: Run) -> None:
        """Set the run this grid operates in (for Flower; nothing here depends on it)."""
        if not isinstance(run, Run):
            raise TypeError(f"run must be a flwr Run, got {run!r}")
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid operates in."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; the same as calling ``Message(...)``, which Flower now prefers."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def number(self, message: Message) -> str:
        """Give a message its id, and return it."""
        message_id = str(next(self._message_numbers))
        set_message_id(message, message_id)
        return message_id


def set_message_id(message: Message, message_id: str) -> None:
    """Set a message's id, for which Flower's metadata has no setter: its own grids do the same."""
    message.metadata.__dict__["_message_id"] = message_id


def _process_run_id() -> int:
    """Give this process Flower's identity of a server unless it has one; return its run id.

    What is set already is kept, so there is nothing to restore when a grid is closed, in whatever
    order several grids are.
    """
    for name, value in (("task_id", 1), ("run_id", 1), ("node_id", SUPERLINK_NODE_ID)):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, value)
    return TaskIdentity.run_id
