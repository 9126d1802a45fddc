"""Worker processes that call one function again and again, for a grid or a comparison.

They are forked from a process of its own, `multiprocessing`'s fork server, which is started once,
knows the large modules and runs no thread: a fork of this process would copy the locks that its
threads hold, and Python deprecates it from 3.12 on. Nothing of this process gets into a worker but
the pickled function, its arguments and the module path. Of `concurrent.futures`, a process that
dies breaks the whole pool; here it ends one call.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from types import ModuleType

import cloudpickle

from ..runtime.messages.records import describe

_PRELOAD = ["torch", "torch._dynamo", "clients"]  # the second is loaded by torch's optimizers

_starting = threading.Lock()


class WorkerDiedError(Exception):
    """A worker ended before it replied; the text says how."""


class Worker:
    """A process that calls a function, one call at a time.

    Parameters
    ----------
    function : bytes
        From `pack_function`.
    preload : sequence of str, optional
        Modules that all workers need; what the first worker names is imported once for all. By
        default PyTorch and our clients, where this process has them.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, function: bytes, preload: Sequence[str] | None = None) -> None:
        if preload is None:
            preload = [name for name in _PRELOAD if name in sys.modules]
        context = get_context("forkserver")
        self._pipe, theirs = Pipe()
        with theirs, _starting, _without_main():
            context.set_forkserver_preload([*preload])
            self._process = context.Process(target=_work, args=(theirs,), daemon=True)
            self._process.start()
        self.pid = self._process.pid
        self._ending = threading.Lock()
        with suppress(OSError):  # of one that has ended, which `check` says
            self._pipe.send_bytes(function)

    def check(self) -> None:
        """Wait until the function is loaded, once; raise RuntimeError if it cannot be."""
        try:
            error = self._pipe.recv()
        except (EOFError, OSError):
            error = f"the process {self.kill()}"
        if error:
            self.kill()
            raise RuntimeError(
                f"A worker process cannot load what it is to run: {error}. Workers import what "
                "that refers to as a new Python process would; see what differs there."
            )

    def call(self, argument: bytes) -> bytes:
        """Call the function and return what it returns; `WorkerDiedError` if the process ends."""
        try:
            self._pipe.send_bytes(argument)
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDiedError(
                f"worker process {self.pid} {self.kill()} (os._exit, a crash in native code, or "
                "no memory left)"
            ) from None

    def has_died(self) -> bool:
        """Return whether an idle worker has ended."""
        return self._pipe.poll()  # an idle one sends nothing, so that is the pipe's end

    def kill(self) -> str:
        """End the process, unless it has ended; return how it did."""
        with self._ending:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"


def pack_function(function: Callable[[bytes], bytes]) -> bytes:
    """Return a function for a `Worker`; raise TypeError if it cannot be pickled."""
    try:
        return bytes(cloudpickle.dumps(function))
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


def _work(pipe: Connection) -> None:
    """Answer calls until there are no more: what a worker does."""
    # Ctrl-C reaches the whole process group. The parent takes it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever the function forks must not hold the pipe, or its end would show no death.
    os.register_at_fork(after_in_child=pipe.close)
    threading.Thread(target=_exit_with_the_parent, args=(pipe.fileno(),), daemon=True).start()
    try:
        function = pickle.loads(pipe.recv_bytes())
    except BaseException as error:
        pipe.send(describe(error))
        return
    # The last bits of a sum depend on the number of threads, and the workers share the processors.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    pipe.send("")
    with suppress(EOFError, OSError):
        while True:
            result = function(pipe.recv_bytes())
            sys.stdout.flush()  # a worker that is killed does not take along what it printed
            pipe.send_bytes(result)


def _exit_with_the_parent(descriptor: int) -> None:
    """End a worker, whatever it is doing, when its parent has gone."""
    poll = select.poll()
    poll.register(descriptor, 0)  # the end of the pipe is always reported
    poll.poll()
    os._exit(1)
