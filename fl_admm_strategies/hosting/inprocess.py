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
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from io import BytesIO
from logging import ERROR
from queue import SimpleQueue
from typing import NamedTuple, Self, TypeAlias, cast

from flwr.app import Array, Context, Error, Message, RecordDict, UserConfigValue
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import ServerApp

from ..maths.checks import check_count
from ..runtime.common.interrupts import Interrupted, interruptible
from ..runtime.messages.identity import IN_PROCESS
from ..runtime.messages.records import describe
from .grid import LocalGrid, set_message_id
from .workers import Worker, WorkerDiedError, pack_function

ClientAppLike: TypeAlias = Callable[[Message, Context], Message]
Done: TypeAlias = tuple[Message, Context]
"""A client's reply and the context that it left."""

_FIRST_NODE_ID = 2  # Flower never gives a client the ids 0 and 1, which is the server


class _Failure(NamedTuple):
    """Why a message has no reply of its own."""

    code: int
    reason: str
    details: str


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
        self._lock = threading.RLock()  # of all that follows, and of the contexts
        self._closed = False
        self._last_of_node: dict[int, Future[Message]] = {}
        self._shown: set[str] = set()  # failures, each of which is logged once
        self._running: dict[str, Worker] = {}  # by message id
        self._dropped: set[str] = set()  # messages of which no reply is wanted any more
        self._function = pack_function(partial(_run_client, client_app)) if workers else b""
        self._workers = [Worker(self._function) for _ in range(workers)]
        for worker in self._workers:
            worker.check()
        self._idle: SimpleQueue[int] = SimpleQueue()  # places in the list of workers
        for place in range(workers):
            self._idle.put(place)
        self._threads = ThreadPoolExecutor(workers) if workers else None

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

    def close(self) -> None:
        """End the workers and drop what they run. Contexts stay readable; sending raises."""
        with self._lock:
            self._closed = True
            for message_id, reply in reversed(list(self._replies.items())):
                self._drop(message_id, reply)
            for worker in self._workers:
                worker.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def abandon(self) -> None:
        """Close the grid from a signal handler: at once, also while its lock is held."""
        self._closed = True
        threading.Thread(target=self.close, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, message: Message) -> Future[Message]:
        """Have a client answer a message: at once, or in a worker after its earlier messages."""
        node = message.metadata.dst_node_id
        with self._lock:
            if self._closed:
                raise RuntimeError("this InProcessGrid has been closed; make a new one")
            if self._threads is not None and node in self._contexts:
                previous = self._last_of_node.get(node)
                reply = self._threads.submit(self._answer_of_worker, message, previous)
                self._last_of_node[node] = reply
                reply.add_done_callback(partial(self._forget, node))
                return reply
            reply = Future()
            reply.set_result(self._finished(message, self._outcome_here(message)))
        return reply

    def _forget(self, node: int, reply: Future[Message]) -> None:
        """Let go of a node's last reply, which later messages to it need not wait for any more."""
        with self._lock:
            if self._last_of_node.get(node) is reply:
                del self._last_of_node[node]

    def _outcome_here(self, message: Message) -> Done | _Failure:
        """Run a message's client in this process; lock held."""
        node = message.metadata.dst_node_id
        if node not in self._contexts:
            reason = self._no_such_node(node)
            return _Failure(ErrorCode.NODE_UNAVAILABLE, reason, reason)
        try:
            with interruptible():
                given = _copied((message, self._contexts[node]))
                return _copied(_reply_of(self._client_app, *given))
        except Interrupted:
            raise
        except BaseException as error:  # a client's sys.exit() must not end the server
            return _failure(error)

    def _answer_of_worker(self, message: Message, previous: Future[Message] | None) -> Message:
        """Run a message's client on a worker, and on a new one in its place if it has died.

        Raises
        ------
        CancelledError
            If the message was dropped.
        """
        if previous is not None:
            wait([previous])
        message_id, place = message.metadata.message_id, self._idle.get()
        outcome: Done | _Failure
        try:
            worker = self._begin(message_id, place)
            # Packed only now: a packed round of many large models would not fit into memory.
            packed = _pickled((message, self._contexts[message.metadata.dst_node_id]))
            outcome = pickle.loads(worker.call(packed))
        except (WorkerDiedError, RuntimeError) as error:
            reason = f"{error}; debug it with workers=0"
            outcome = _Failure(ErrorCode.UNKNOWN, reason, reason)
        except Exception as error:  # what a client's reply raises where it is unpacked
            outcome = _failure(error)
        finally:
            self._idle.put(place)  # a worker that was killed is replaced there
        with self._lock:
            self._running.pop(message_id, None)
            if self._closed or message_id in self._dropped:
                self._dropped.discard(message_id)
                raise CancelledError
            return self._finished(message, outcome)

    def _begin(self, message_id: str, place: int) -> Worker:
        """Return the worker in a place, which runs a message from now on."""
        with self._lock:
            if message_id in self._dropped:
                raise CancelledError
            if self._workers[place].has_died():
                self._workers[place].kill()
                self._workers[place] = Worker(self._function)
                self._workers[place].check()
            self._running[message_id] = self._workers[place]
            return self._workers[place]

    def _finished(self, message: Message, outcome: Done | _Failure) -> Message:
        """Commit a client's context and return its reply, or an error reply; lock held."""
        node_id = message.metadata.dst_node_id
        if isinstance(outcome, _Failure):
            if outcome.details not in self._shown:
                self._shown.add(outcome.details)
                log(ERROR, f"Node {node_id}, {message.metadata.message_type!r}: {outcome.details}")
            reply = Message(Error(outcome.code, outcome.reason), reply_to=message)
        else:
            reply, self._contexts[node_id] = outcome
        set_message_id(reply, f"reply-{message.metadata.message_id}")
        return reply

    def _drop(self, message_id: str, reply: Future[Message]) -> None:
        """Forget a reply that is to come, and end the worker on which its client runs."""
        with self._lock:
            if reply.cancel() or reply.done():
                return
            self._dropped.add(message_id)
            if worker := self._running.get(message_id):
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


def _run_client(client_app: ClientAppLike, packed: bytes) -> bytes:
    """Run the app in a worker; return its reply and context pickled, or why there are none."""
    try:
        return _pickled(_reply_of(client_app, *pickle.loads(packed)))
    except BaseException as error:
        return _pickled(_failure(error))


def _pickled(outcome: Done | _Failure) -> bytes:
    return pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)


def _reply_of(client_app: ClientAppLike, message: Message, context: Context) -> Done:
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


def _copied(pair: Done) -> Done:
    """Return a copy by pickle, but for the bytes of arrays, which cannot be changed."""
    arrays: list[Array] = []
    file = BytesIO()
    _Pickler(file, arrays).dump(pair)
    file.seek(0)
    return cast(Done, _Unpickler(file, arrays).load())


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
    frames = "".join(traceback.format_tb(error.__traceback__))  # not its text, which may raise
    reason = describe(error)
    return _Failure(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason, f"{reason}\n{frames}")
