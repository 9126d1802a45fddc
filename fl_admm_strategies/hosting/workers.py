"""Worker processes that run a ClientApp for a grid of this process.

They are forked from a process of its own, which is started once, knows the large modules and runs
no thread: a fork of this process would copy the locks that its threads hold, and Python deprecates
it from 3.12 on. Nothing of this process gets into a worker but the pickled app, its messages and
the module path. A worker has a pipe of its own, at whose end one sees that it died.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from ..runtime.messages.records import describe
from .background import in_background

Run = Callable[[Any, bytes], Any]
"""What a worker does with the app and a packed message; what it returns is pickled."""

_PRELOAD = ["torch", "torch._dynamo", "clients"]  # the second is loaded by torch's optimizers

_GRACE = 5.0  # seconds for an idle worker to end by itself
_NUMBER = struct.Struct("q")


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
        self._server = _fork_server()
        self.pid, self._pipe = self._server.fork()
        self._ending = threading.Lock()
        self._ended = ""
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
            if not self._ended:
                self._ended = _wording(self._server.end(self.pid))
        return self._ended

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


class _ForkServer:
    """The process that forks the workers; its requests and replies are one number each."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        # Imported once for all workers: what takes long, where this process has it.
        preload = [name for name in _PRELOAD if name in sys.modules]
        code = (
            f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; "
            f"from {__name__} import serve; serve({theirs.fileno()}, {preload!r})"
        )
        # Ctrl-C reaches the whole process group. This process takes it and ends the workers it
        # must; they inherit that it is blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    def fork(self) -> tuple[int, Connection]:
        """Return the id of a new worker and the end of its pipe."""
        ours, theirs = Pipe()
        with theirs:
            return self._ask(0, [theirs.fileno()]), ours

    def end(self, pid: int) -> int | None:
        """Kill a worker that may have ended already; return its exit code, None if unknown."""
        try:
            return self._ask(pid)
        except RuntimeError:  # then its children are nobody's
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def _ask(self, number: int, descriptors: list[int] | None = None) -> int:
        with self._lock:
            try:
                socket.send_fds(self._control, [_NUMBER.pack(number)], descriptors or [])
                (answer,) = _NUMBER.unpack(self._control.recv(_NUMBER.size))
            except (OSError, struct.error):
                raise RuntimeError(
                    "The process that forks the workers died: it was killed, or could not start "
                    "(then its error is above). Try workers=0."
                ) from None
        return int(answer)


_the_server: _ForkServer | None = None
_starting = threading.Lock()


def _fork_server() -> _ForkServer:
    """Return the process that forks the workers; start it the first time, or if it was killed."""
    global _the_server
    with _starting:
        if _the_server is not None and not _the_server.is_alive():
            _the_server.close()
            _the_server = None
        if _the_server is None:
            _the_server = _ForkServer()
        return _the_server


@atexit.register
def _close_fork_server() -> None:
    if _the_server is not None:
        _the_server.close()


def _forget_fork_server() -> None:
    """In a fork of this process: it must not speak to the server, whose replies are another's."""
    global _the_server, _starting
    _the_server, _starting = None, threading.Lock()


if os.name == "posix":
    os.register_at_fork(after_in_child=_forget_fork_server)


def _wording(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"


# --- In the process that forks, and in the workers ------------------------------------------------


def serve(descriptor: int, preload: list[str]) -> None:
    """Fork workers and reap them, until the process that asks for them has ended."""
    control = socket.socket(fileno=descriptor)
    for name in preload:
        with suppress(Exception):  # whoever needs it will say so
            import_module(name)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _NUMBER.size, 1)
        if not request:
            return
        if descriptors:
            if (answer := os.fork()) == 0:
                try:
                    control.close()
                    _work(Connection(descriptors[0]))
                    atexit._run_exitfuncs()
                    sys.stdout.flush()
                finally:
                    os._exit(0)  # to clear away a whole interpreter takes seconds
            os.close(descriptors[0])
        else:
            (pid,) = _NUMBER.unpack(request)
            os.kill(pid, signal.SIGKILL)  # a process that was not waited for keeps its id
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        control.sendall(_NUMBER.pack(answer))


def _work(pipe: Connection) -> None:
    """Run messages until there are no more."""
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
