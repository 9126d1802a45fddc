"""Worker processes: as many cells at a time as there are cores and memory for."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import psutil

_FIRST = 600e6  # bytes a cell is taken to need until one has ended
_SPARE = 1.5  # that much more than the largest so far must be free before another one starts


def num_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Workers:
    """A process for each job, so that one that dies takes nothing along and all memory comes back.

    Parameters
    ----------
    most : int
        The most processes at a time.
    """

    def __init__(self, most: int) -> None:
        # Each is forked from a server that has imported what all need, and runs nothing itself.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["simulations.comparing.cell", "sklearn.datasets", "sklearn.metrics"]
        )
        self._most = most
        self._running: dict[Any, str] = {}
        self.largest = _FIRST
        """Bytes of the largest cell so far."""

    @property
    def running(self) -> int:
        """The number of processes."""
        return len(self._running)

    def room(self) -> bool:
        """Return whether another process may start."""
        if not self._running:
            return True
        enough = psutil.virtual_memory().available > _SPARE * self.largest
        return len(self._running) < self._most and enough

    def start(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        """Start a job in a process."""
        process = self._context.Process(target=_quietly, args=(work, arguments), daemon=True)
        process.start()
        self._running[process] = name

    def ended(self) -> Iterator[tuple[str, int]]:
        """Wait until a process has ended; yield name and exit code of those that have."""
        ready = wait([process.sentinel for process in self._running])
        for process in [p for p in self._running if p.sentinel in ready]:
            process.join()
            yield self._running.pop(process), process.exitcode

    def stop(self) -> None:
        """End all processes."""
        for process in self._running:
            process.kill()
            process.join()
        self._running.clear()


def _quietly(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Do a job in a worker, whose parent hears of Ctrl-C and of all that went wrong."""
    import logging
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    work(*arguments)


@contextmanager
def workers(most: int) -> Iterator[Workers]:
    """Yield workers that end with the `with` block."""
    # One thread each: what a worker computes must not depend on how many there are.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    made = Workers(most)
    try:
        yield made
    finally:
        made.stop()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
