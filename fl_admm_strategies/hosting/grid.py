"""What the grids of this library share: a run, and ids for their messages."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, wait

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid

# The only two private imports, both unavoidable: Grid's abstract `run` / `set_run` are typed with
# `Run`, and `Message(...)` raises unless the process has a `TaskIdentity`.
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """A grid whose messages and replies stay in this process: subclasses say what answers them."""

    def __init__(self) -> None:
        self._run = Run.create_empty(run_id=_process_run_id())
        self._message_numbers = itertools.count(1)
        self._replies: dict[str, Future[Message]] = {}

    @abstractmethod
    def _submit(self, message: Message) -> Future[Message]:
        """Send a message, and return its reply or what it will be in."""

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

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, and return their ids in the order of the messages.

        Each message's ``metadata.message_id`` is set, as Flower's own grids do.

        Raises
        ------
        TypeError
            If something is not a ``Message``.
        """
        messages = list(messages)
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"messages must be flwr Message objects, got {message!r}")
        message_ids = []
        for message in messages:
            message_id = str(next(self._message_numbers))
            set_message_id(message, message_id)
            self._replies[message_id] = self._submit(message)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return, once, the replies that have come, in the order of the ids."""
        ready = [i for i in message_ids if i in self._replies and self._replies[i].done()]
        replies = [self._replies.pop(message_id) for message_id in ready]
        return [reply.result() for reply in replies if not reply.cancelled()]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and wait for the replies.

        Parameters
        ----------
        messages : Iterable[Message]
            The messages.
        timeout : float, optional
            Seconds to wait. What has not replied by then is dropped.

        Returns
        -------
        list of Message
            The replies in the order of the messages.
        """
        message_ids = self.push_messages(messages)
        try:
            wait([self._replies[message_id] for message_id in message_ids], timeout)
            return self.pull_messages(message_ids)
        finally:
            # After a timeout or Ctrl-C nothing of this batch may go on in the background: the last
            # first, since the end of one lets the next to its node begin.
            for message_id in reversed(message_ids):
                if (late := self._replies.pop(message_id, None)) is not None:
                    self._drop(message_id, late)

    def _drop(self, message_id: str, reply: Future[Message]) -> None:
        """End what is to become a reply, where that is possible."""


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
