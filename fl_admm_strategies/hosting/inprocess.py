"""A Flower ``Grid`` that runs the ClientApp in this process: no Ray, no start-up time.

``ServerApp`` and ``ClientApp`` are plain callables and ``Grid`` is Flower's public interface
between them, so the same two apps that run on Ray or in a deployment run
here unchanged: in tests, notebooks, a debugger. Node ids, the order of ``get_node_ids()`` and the
order of the replies are fixed, which Flower's own engines do not promise.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from io import BytesIO
from logging import ERROR
from typing import NamedTuple, Self, TypeAlias, TypeVar, cast

from flwr.app import Array, Context, Error, Message, RecordDict, UserConfigValue
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import ServerApp

from ..maths.checks import check_count
from ..runtime.common.interrupts import Interrupted, interruptible
from ..runtime.messages.identity import IN_PROCESS
from ..runtime.messages.records import describe, printable
from .grid import LocalGrid, set_message_id
from .workers import Worker, WorkerDiedError, pack_job

ClientAppLike: TypeAlias = Callable[[Message, Context], Message]
Given = TypeVar("Given")

_FIRST_NODE_ID = 2  # Flower never gives a client the ids 0 and 1, which is the server

_LONGEST_TRACEBACK = 10_000  # characters of a client's


class _Failure(NamedTuple):
    """Why a message has no reply of its own."""

    code: int
    reason: str
    details: str


class _Task(NamedTuple):
    """A message on its way, under the id that its reply will answer to."""

    message_id: str
    message: Message


class InProcessGrid(LocalGrid):
    """Run a ClientApp on simulated nodes in this process, or in worker processes.

    Parameters
    ----------
    client_app : ClientApp
        The app under test, or any callable ``(message, context) -> reply``.
    num_nodes : int
        Number of simulated nodes. Node ``i`` (from 0) has the node id ``i + 2`` in every run
        (Flower keeps 0 and 1 for itself).
    workers : int (default: 0)
        0 runs the clients in this process, one after another, in the order of the messages.
        ``k > 0`` starts ``k`` worker processes here in the constructor. Each gets a copy of the
        ClientApp as it is now, by cloudpickle: functions of a notebook or a script with all they
        refer to, so load large data in a ``client_fn``, once a process, not outside it. Needs an
        operating system that can fork.
    run_config : Mapping, optional
        ``context.run_config`` of every client. Empty by default.
    node_configs : Sequence of Mapping, optional
        ``context.node_config`` of each node. By default, as in Flower's simulation,
        ``{"partition-id": i, "num-partitions": num_nodes}``.

    Raises
    ------
    TypeError
        If ``client_app`` cannot be called, or not be pickled for workers, or a number is not an
        integer.
    ValueError
        If ``num_nodes`` or ``workers`` is out of range, ``node_configs`` has another length than
        ``num_nodes``, or workers are asked for where processes cannot fork.
    RuntimeError
        If a worker cannot load the ClientApp.

    Notes
    -----
    *Clients.* A client gets a pickled copy of its message and of its context, so nothing it
    changes reaches the server or another client. Its context is taken over only when it has
    returned a reply: a client that raises, dies or overruns the timeout leaves no trace in its
    state. Whatever it raises becomes a reply with ``Error(code=2, reason="<type>: <message>")``,
    and the traceback is logged; Ctrl-C ends the run. A worker process that dies gives the message
    it ran ``Error(code=0)`` and is replaced (on Ray it is not). An unknown node gives
    ``Error(code=5)``. Several messages to one node run one after another. Replies come in the
    order of the messages.

    *Timeout.* With workers, clients that are late are killed and their messages have no reply.
    With ``workers=0`` the timeout is not enforced: a client cannot be interrupted, and a
    breakpoint in it should not change the run. A message's time-to-live is never enforced.

    *Same numbers for any number of workers* holds for a client that draws its randomness from
    generators of its own and keeps its memory in ``context.state``: module globals live on in
    whichever process ran the client. Workers use one PyTorch thread; where the last bit of a
    PyTorch reduction matters, call ``torch.set_num_threads(1)`` in the parent too.

    *Threads.* All methods may be called from several threads at once.

    Examples
    --------
    >>> with InProcessGrid(app, num_nodes=4) as grid:
    ...     result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3)
    """

    def __init__(
        self,
        client_app: ClientAppLike,
        num_nodes: int,
        *,
        workers: int = 0,
        run_config: Mapping[str, UserConfigValue] | None = None,
        node_configs: Sequence[Mapping[str, UserConfigValue]] | None = None,
    ) -> None:
        if not callable(client_app):
            raise TypeError(
                "client_app must be a ClientApp, or a callable that takes a message and a context, "
                f"got {client_app!r}"
            )
        check_count("num_nodes", num_nodes, least=1)
        check_count("workers", workers, least=0)
        if workers and not hasattr(os, "fork"):
            raise ValueError(
                f"workers={workers} needs processes that can fork, which {sys.platform} does not "
                "offer; use workers=0"
            )
        if node_configs is None:
            node_configs = [
                {"partition-id": i, "num-partitions": num_nodes} for i in range(num_nodes)
            ]
        if len(node_configs) != num_nodes:
            raise ValueError(
                f"node_configs must have one entry for each of the num_nodes={num_nodes} nodes, "
                f"got {len(node_configs)}"
            )
        super().__init__()
        self._client_app = client_app
        self._contexts = {
            _FIRST_NODE_ID + i: Context(
                run_id=self._run.run_id,
                node_id=_FIRST_NODE_ID + i,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i, config in enumerate(node_configs)
        }
        self._num_workers = workers
        self._closed = False
        # One condition guards all that follows and is notified whenever a client has finished.
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, _Task] = OrderedDict()
        self._running: dict[Future[bytes | _Failure], tuple[_Task, Worker]] = {}
        self._replies: dict[str, Message] = {}
        self._job = pack_job(client_app, _run_client) if workers else b""
        self._idle = [Worker(self._job) for _ in range(workers)]
        for worker in self._idle:
            worker.check()

    def context(self, node_id: int) -> Context:
        """Return a node's context as the last successful message to it left it.

        Parameters
        ----------
        node_id : int
            One of ``get_node_ids()``.

        Returns
        -------
        Context
            The context itself, not a copy: what is put into its state, the next message finds.

        Raises
        ------
        ValueError
            If the grid has no such node.
        """
        if node_id not in self._contexts:
            raise ValueError(self._no_such_node(node_id))
        return self._contexts[node_id]

    def get_node_ids(self) -> list[int]:
        """Return the node ids in the order of the partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand messages over and return at once.

        With workers the clients start in the background; with ``workers=0`` they run in the next
        ``pull_messages``.

        Parameters
        ----------
        messages : Iterable[Message]
            The messages; their ``metadata.message_id`` is set, as Flower's own grids do.

        Returns
        -------
        list of str
            The message ids, in the order of the messages.

        Raises
        ------
        TypeError
            If something is not a ``Message``.
        RuntimeError
            If the grid has been closed.
        """
        messages = list(messages)
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"messages must be flwr Message objects, got {message!r}")
        with self._changed:
            if self._closed:
                raise RuntimeError("this InProcessGrid has been closed; make a new one")
            message_ids = []
            for message in messages:
                message_id = self.number(message)
                message_ids.append(message_id)
                task = _Task(message_id, message)
                if message.metadata.dst_node_id in self._contexts:
                    self._waiting[message_id] = task
                else:
                    reason = self._no_such_node(message.metadata.dst_node_id)
                    self._finish(task, _Failure(ErrorCode.NODE_UNAVAILABLE, reason, reason))
            if self._num_workers:
                self._advance()
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return, once, the replies that are ready.

        Parameters
        ----------
        message_ids : Iterable[str]
            Ids that ``push_messages`` gave. With ``workers=0`` all of them are ready.

        Returns
        -------
        list of Message
            The replies in the order of the ids; ids without a reply yet, or whose reply has been
            pulled, are left out.
        """
        with self._changed:
            self._advance()
            return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and wait for the replies.

        Parameters
        ----------
        messages : Iterable[Message]
            The messages.
        timeout : float, optional
            Seconds to wait with workers; clients that run longer are killed and have no reply. Not
            enforced with ``workers=0``.

        Returns
        -------
        list of Message
            The replies in the order of the messages.

        Raises
        ------
        TypeError, RuntimeError
            As ``push_messages``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        messages = list(messages)
        with self._changed:
            message_ids = self.push_messages(messages)
            missing = deque(message_ids)
            try:
                while not self._closed:
                    self._advance()
                    while missing and missing[0] in self._replies:
                        missing.popleft()
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if not missing or (remaining is not None and remaining <= 0):
                        break
                    # A client can be done before its future is watched: nobody will notify then.
                    if not any(future.done() for future in self._running):
                        self._changed.wait(remaining)
                return [self._replies[i] for i in message_ids if i in self._replies]
            finally:
                # After a timeout or Ctrl-C nothing of this batch may go on in the background.
                self._drop(set(message_ids))

    def close(self) -> None:
        """Stop the workers and drop what they run. Contexts stay readable; sending raises."""
        with self._changed:
            self._closed = True
            self._drop({*self._waiting, *(task.message_id for task, _ in self._running.values())})
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for worker in idle:
            worker.dismiss()
        for worker in idle:
            worker.stop()

    def abandon(self) -> None:
        """Close the grid from a signal handler: at once, whoever holds its lock."""
        self._closed = True
        threading.Thread(target=self.close, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Take in the clients that have finished and start those that can start; lock held."""
        outcome: bytes | tuple[Message, Context] | _Failure
        for future in [future for future in self._running if future.done()]:
            task, worker = self._running.pop(future)
            try:
                outcome = future.result()
            except WorkerDiedError as death:
                reason = (
                    f"worker process {worker.pid} died while it ran this message: it {death} "
                    "(os._exit, a crash in native code, or no memory left); debug it with workers=0"
                )
                outcome = _Failure(ErrorCode.UNKNOWN, reason, reason)
            else:
                self._idle.append(worker)
            self._finish(task, outcome)
        if self._num_workers:
            for task in self._next_tasks():
                del self._waiting[task.message_id]
                self._start(task)
        else:
            while self._waiting and not self._closed:
                _, task = self._waiting.popitem(last=False)
                context = self._contexts[task.message.metadata.dst_node_id]
                with interruptible():
                    outcome = _run(self._client_app, (task.message, context), _copied, _copied)
                self._finish(task, outcome)
        self._changed.notify_all()  # another thread's replies may be among them

    def _next_tasks(self) -> list[_Task]:
        """Return the first waiting tasks for the free workers, one at a time for each node."""
        busy = {task.message.metadata.dst_node_id for task, _ in self._running.values()}
        tasks: list[_Task] = []
        for task in self._waiting.values():
            if len(self._running) + len(tasks) == self._num_workers:
                break
            node_id = task.message.metadata.dst_node_id
            if node_id not in busy:
                busy.add(node_id)
                tasks.append(task)
        return tasks

    def _start(self, task: _Task) -> None:
        # Packed only now, one message for each worker: a packed round of many large models would
        # not fit into memory.
        context = self._contexts[task.message.metadata.dst_node_id]
        packed = _pickled((task.message, context))
        worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.has_died():  # between two messages
            worker.kill()
            worker = None
        if worker is None:
            worker = Worker(self._job)
            worker.check()
        future = worker.submit(packed)
        self._running[future] = (task, worker)
        future.add_done_callback(self._wake)

    def _wake(self, _: Future[bytes | _Failure]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _finish(self, task: _Task, outcome: bytes | tuple[Message, Context] | _Failure) -> None:
        """Commit a client's context and keep its reply, or keep an error reply; lock held."""
        node_id = task.message.metadata.dst_node_id
        if isinstance(outcome, bytes):
            try:
                outcome = cast(tuple[Message, Context], pickle.loads(outcome))
            except Exception as error:
                outcome = _failure(error)
        if isinstance(outcome, _Failure):
            log(ERROR, f"Node {node_id}, {task.message.metadata.message_type!r}: {outcome.details}")
            reply = Message(Error(outcome.code, outcome.reason), reply_to=task.message)
        else:
            reply, self._contexts[node_id] = outcome
        set_message_id(reply, f"reply-{task.message_id}")
        self._replies[task.message_id] = reply

    def _drop(self, message_ids: set[str]) -> None:
        """Forget messages, wherever they are, and kill the workers that run one; lock held."""
        for message_id in message_ids:
            self._waiting.pop(message_id, None)
            self._replies.pop(message_id, None)
        for future, (task, worker) in list(self._running.items()):
            if task.message_id in message_ids:
                del self._running[future]
                worker.kill()

    def _no_such_node(self, node_id: int) -> str:
        node_ids = self.get_node_ids()
        return (
            f"no node {node_id}: the {len(node_ids)} nodes of this grid have the ids {node_ids[0]} "
            f"to {node_ids[-1]}; take them from grid.get_node_ids()"
        )


def run_in_process(
    server_app: ServerApp,
    client_app: ClientAppLike,
    num_nodes: int,
    *,
    workers: int = 0,
    run_config: Mapping[str, UserConfigValue] | None = None,
) -> Context:
    """Run a ServerApp against a ClientApp in this process.

    Takes what ``flwr.simulation.run_simulation`` takes: ServerApps with ``@app.main()`` as well as
    those with ``server_fn``, ClientApps with ``@app.train()`` as well as those with ``client_fn``.

    Parameters
    ----------
    server_app : ServerApp
        The server's app.
    client_app : ClientApp
        The clients' app.
    num_nodes, workers
        As in ``InProcessGrid``.
    run_config : Mapping, optional
        ``context.run_config`` of the server and of every client.

    Returns
    -------
    Context
        The server's context, with whatever the ServerApp left in its state.

    Raises
    ------
    TypeError, ValueError
        As ``InProcessGrid``; what the ServerApp raises comes through unchanged.
    """
    if not callable(server_app):
        raise TypeError(f"server_app must be a ServerApp, got {server_app!r}")
    with InProcessGrid(client_app, num_nodes, workers=workers, run_config=run_config) as grid:
        context = Context(
            run_id=grid.run.run_id,
            node_id=SUPERLINK_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=dict(run_config or {}),
        )
        with interruptible(grid.abandon):
            server_app(grid=grid, context=context)
    return context


def _run_client(client_app: ClientAppLike, packed: bytes) -> bytes | _Failure:
    """Run the app on unpickled copies; return its reply and context pickled, or why not."""
    return _run(client_app, packed, pickle.loads, _pickled)


def _run(
    client_app: ClientAppLike,
    sent: Given,
    taken: Callable[[Given], tuple[Message, Context]],
    returned: Callable[[tuple[Message, Context]], Given],
) -> Given | _Failure:
    """Run the app on what `taken` makes; return its reply and context, or why there are none."""
    try:
        return returned(_reply_of(client_app, *taken(sent)))
    except Interrupted:
        raise
    except BaseException as error:  # a client's sys.exit() must not end the server
        return _failure(error)


def _pickled(pair: tuple[Message, Context]) -> bytes:
    return pickle.dumps(pair, protocol=pickle.HIGHEST_PROTOCOL)


def _reply_of(
    client_app: ClientAppLike, message: Message, context: Context
) -> tuple[Message, Context]:
    message_id, run_config = message.metadata.message_id, dict(context.run_config)
    before = IN_PROCESS.set(True)
    try:
        reply = client_app(message, context)
    finally:
        IN_PROCESS.reset(before)
    if not isinstance(reply, Message) or reply.metadata.reply_to_message_id != message_id:
        raise TypeError(
            "the ClientApp must return Message(content, reply_to=message) for the message it "
            f"got, returned {reply!r}"
        )
    if context.run_config != run_config:  # Flower's engines refuse it as well
        raise ValueError("the client changed context.run_config; keep values in context.state")
    return reply, context


def _copied(pair: tuple[Message, Context]) -> tuple[Message, Context]:
    """Return a copy by pickle, but for the bytes of arrays: nobody can change these."""
    arrays: list[Array] = []
    file = BytesIO()
    _Pickler(file, arrays).dump(pair)
    file.seek(0)
    return cast(tuple[Message, Context], _Unpickler(file, arrays).load())


class _Pickler(pickle.Pickler):
    """Puts arrays into a list, and their places into the file."""

    def __init__(self, file: BytesIO, arrays: list[Array]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._arrays = arrays

    def persistent_id(self, item: object) -> int | None:
        if type(item) is not Array:
            return None
        self._arrays.append(item)
        return len(self._arrays) - 1


class _Unpickler(pickle.Unpickler):
    """Takes copies of the arrays out of a list again."""

    def __init__(self, file: BytesIO, arrays: list[Array]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, place: int) -> Array:
        twin = Array.__new__(Array)  # what copy.copy does, in a third of the time
        vars(twin).update(vars(self._arrays[place]))
        return twin


def _failure(error: BaseException) -> _Failure:
    """Return what a client raised as the failure of its message."""
    return _Failure(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, describe(error), _traceback(error))


def _traceback(error: BaseException) -> str:
    try:
        return printable("".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:])
    except Interrupted:
        raise
    except BaseException:  # what belongs to it may raise, too
        return describe(error)
