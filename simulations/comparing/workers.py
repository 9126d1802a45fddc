"""Worker processes: as many cells at a time as there are cores and memory for, here or on Ray."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import psutil

from ..reports import write_text

_FIRST = 600e6  # bytes a cell is taken to need until one has ended
_SPARE = 1.5  # that much more than the largest so far must be free before another one starts


def num_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Pool(Protocol):
    """What has jobs done, each of which writes a file."""

    largest: float
    """Bytes of the largest cell so far."""

    @property
    def running(self) -> int:
        """The number of jobs that have begun and not ended."""

    def room(self) -> bool:
        """Return whether another job may start."""

    def start(self, path: Path, work: Callable[..., None], job: Any) -> None:
        """Have ``work(job, path)`` done."""

    def ended(self) -> Iterator[tuple[Path, str]]:
        """Wait until a job has ended; yield the paths of those that have, and what went wrong."""


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
        self._running: dict[Any, Path] = {}
        self.largest = _FIRST

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

    def start(self, path: Path, work: Callable[..., None], job: Any) -> None:
        """Start a job in a process."""
        process = self._context.Process(target=_quietly, args=(work, job, path), daemon=True)
        process.start()
        self._running[process] = path

    def ended(self) -> Iterator[tuple[Path, str]]:
        """Wait until a process has ended; yield those that have, as `Pool.ended` does."""
        ready = wait([process.sentinel for process in self._running])
        for process in [p for p in self._running if p.sentinel in ready]:
            process.join()
            code, failure = process.exitcode, ""
            if code:
                killed = ", most likely for want of memory" if code == -9 else ""
                failure = f"the worker process ended with exit code {code}{killed}."
            yield self._running.pop(process), failure

    def stop(self) -> None:
        """End all processes."""
        for process in self._running:
            process.kill()
            process.join()
        self._running.clear()


def _quietly(work: Callable[..., None], job: Any, path: Path) -> None:
    """Do a job in a worker, whose parent hears of Ctrl-C and of all that went wrong."""
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    work(job, path)


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


class RayWorkers:
    """A Ray task for each job, in a process of its own on a cluster's node.

    Its file is written there and comes back, so that no folder need be shared.
    """

    def __init__(self) -> None:
        import ray

        self._ray: Any = ray
        self._task = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(_text_of)
        self._running: dict[Any, Path] = {}
        self.largest = 0.0

    @property
    def running(self) -> int:
        """The number of tasks."""
        return len(self._running)

    def room(self) -> bool:
        """Return whether a processor of the cluster may be free."""
        resources: dict[str, float] = self._ray.cluster_resources()
        return len(self._running) < resources.get("CPU", 1)

    def start(self, path: Path, work: Callable[..., None], job: Any) -> None:
        """Have a job done on a node."""
        self._running[self._task.remote(work, job, path.name)] = path

    def ended(self) -> Iterator[tuple[Path, str]]:
        """Wait until a task has ended; write the files of those that have."""
        ready, _ = self._ray.wait(list(self._running))
        for task in ready:
            path, failure = self._running.pop(task), ""
            try:
                write_text(path, self._ray.get(task))
            except self._ray.exceptions.RayError as error:
                failure = f"on the cluster: {str(error).strip().splitlines()[-1]}"
            yield path, failure


def _text_of(work: Callable[..., None], job: Any, name: str) -> str:
    """Do a job on a node and return what is in its file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        _quietly(work, job, path)
        return path.read_text(encoding="utf-8")


@contextmanager
def ray_workers(address: str) -> Iterator[RayWorkers]:
    """Yield a cluster's workers, whose tasks end with the `with` block."""
    import ray

    one_thread = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    ray.init(address, runtime_env=one_thread, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield RayWorkers()
    finally:
        ray.shutdown()
