"""Worker processes that run a ClientApp for a grid of this process.

They are forked from a process of its own, `multiprocessing`'s fork server, which is started once,
knows the large modules and runs no thread: a fork of this process would copy the locks that its
threads hold, and Python deprecates it from 3.12 on. Nothing of this process gets into a worker but
the pickled app, its messages and the module path. A worker has a pipe of its own, at whose end one
sees that it died.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import cloudpickle

from ..runtime.messages.records import describe
from .background import in_background

Run = Callable[[Any, bytes], Any]
"""What a worker does with the app and a packed message; what it returns is pickled."""

_PRELOAD = ["torch", "torch._dynamo", "clients"]  # the second is loaded by torch's optimizers

_GRACE = 5.0  # seconds for an idle worker to end by itself
_starting = threading.Lock()


class WorkerDiedError(Exception):
    """A worker ended before it replied; the text says how."""


class Worker:
    """A process that runs one message at a time.

    Parameters
    ----------
    job : bytes
        From `pack_job`.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, job: bytes) -> None:
        context = get_context("forkserver")
        self._pipe, theirs = Pipe()
        with theirs, _starting, _without_main():
            # Imported once for all workers: what takes long, where this process has it.
            context.set_forkserver_preload([name for name in _PRELOAD if name in sys.modules])
            self._process = context.Process(target=_work, args=(theirs,), daemon=True)
            self._process.start()
        self.pid = self._process.pid
        self._ending = threading.Lock()
        self._loaded = self.submit(job)

    def check(self) -> None:
        """Wait until the app is loaded; raise RuntimeError if it cannot be."""
        try:
            trouble = self._loaded.result()
        except WorkerDiedError as error:
            trouble = f"the process {error}"
        if trouble:
            self.kill()
            raise RuntimeError(
                f"A worker process cannot load the ClientApp: {trouble}. Workers import what the "
                "app refers to as a new Python process would; see what differs there, or use "
                "workers=0."
            )

    def submit(self, data: bytes) -> Future[Any]:
        """Send data and return a future of the reply, which may raise `WorkerDiedError`."""

        def ask() -> Any:
            try:
                self._pipe.send_bytes(data)
                return self._pipe.recv()
            except (EOFError, OSError):
                raise WorkerDiedError(self.kill()) from None

        return in_background(ask)

    def has_died(self) -> bool:
        """Return whether an idle worker has ended."""
        return self._pipe.poll()  # it says nothing unasked, so that is the pipe's end

    def kill(self) -> str:
        """End the process, unless it has ended; return how it did."""
        with self._ending:
            self._process.kill()
            self._process.join()
        return _wording(self._process.exitcode)

    def dismiss(self) -> None:
        """Tell an idle worker to end by itself; `stop` waits for it."""
        with suppress(OSError):
            self._pipe.send_bytes(b"")

    def stop(self) -> None:
        """Wait until a worker that was dismissed has ended; kill it if that takes long."""
        with suppress(OSError):
            self._pipe.poll(_GRACE)
        self.kill()


def pack_job(app: object, run: Run) -> bytes:
    """Return, for a `Worker`, an app and what to do with it and a message.

    Raises
    ------
    TypeError
        If the app cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps((app, run)))
    except Exception as error:  # whatever the objects' own methods raise
        raise TypeError(
            f"The ClientApp cannot be sent to worker processes ({describe(error)}). Make files, "
            "locks, generators and their like in a client_fn, not outside it; or use workers=0."
        ) from error


@contextmanager
def _without_main() -> Iterator[None]:
    """Start processes that do not run this one's script again, which need not guard against it."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _wording(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


def _work(pipe: Connection) -> None:
    """Run messages until there are no more: what a worker does."""
    # Ctrl-C reaches the whole process group. The grid's process takes it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a client forks must not hold the pipe, or nobody would see this process die.
    os.register_at_fork(after_in_child=pipe.close)
    threading.Thread(target=_exit_with_the_grid, args=(pipe.fileno(),), daemon=True).start()
    try:
        app, run = pickle.loads(pipe.recv_bytes())
    except BaseException as error:
        pipe.send(describe(error))
        return
    # The last bits of a sum depend on the number of threads, and the workers share the processors.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    pipe.send("")
    with suppress(EOFError, OSError):
        while data := pipe.recv_bytes():
            outcome = run(app, data)
            sys.stdout.flush()  # a worker that is killed does not take along what clients printed
            pipe.send(outcome)


def _exit_with_the_grid(descriptor: int) -> None:
    """End a worker, whatever it is doing, when nobody can get its reply any more."""
    poll = select.poll()
    poll.register(descriptor, 0)  # the end of the pipe is always reported
    poll.poll()
    os._exit(1)
