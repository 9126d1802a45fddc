"""Worker processes: as many cells at a time as there are cores and memory for."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import Any

import psutil

from fl_admm_strategies.hosting.workers import Worker, WorkerDiedError, pack_function

_PRELOAD = ["simulations.comparing.cell", "sklearn.datasets", "sklearn.metrics"]
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
        The most processes at a time, which is for who asks for jobs to observe.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.largest = _FIRST
        """Bytes of the largest job so far."""
        self._turn = Condition()
        self._running: set[Worker] = set()
        self._stopped = False

    def run(self, path: Path, work: Callable[..., None], job: Any) -> str:
        """Have ``work(job, path)`` done once there is memory; return what went wrong, if any."""
        with self._turn:
            self._turn.wait_for(self._has_room)
            if self._stopped:
                return "the comparison was interrupted."
            worker = Worker(pack_function(_unpack_and_work), _PRELOAD)
            self._running.add(worker)
        try:
            worker.check()
            worker.call(pickle.dumps((work, job, path)))
        except (WorkerDiedError, RuntimeError) as error:
            return f"{error}."
        finally:
            worker.kill()
            with self._turn:
                self._running.remove(worker)
                self._turn.notify_all()
        return ""

    def _has_room(self) -> bool:
        free = psutil.virtual_memory().available > _SPARE * self.largest
        return self._stopped or not self._running or free

    def stop(self) -> None:
        """End all processes, and start none."""
        with self._turn:
            self._stopped = True
            for worker in self._running:
                worker.kill()
            self._turn.notify_all()


def _unpack_and_work(packed: bytes) -> bytes:
    work, job, path = pickle.loads(packed)
    _quietly(work, job, path)
    return b""


def _quietly(work: Callable[..., None], job: Any, path: Path) -> None:
    """Do a job in a worker; its parent gets all that went wrong.

    It has one thread: what it computes must not depend on how many workers there are.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with threadpool_limits(1):
        work(job, path)
