"""Worker processes: a process for each cell."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from fl_admm_strategies.hosting.workers import Worker, WorkerDiedError, pack_function

_PRELOAD = ["simulations.comparing.cell", "sklearn.datasets", "sklearn.metrics"]


class Workers:
    """A process for each job, so that one that dies takes nothing along and all memory comes back.

    How many there are at a time is for the caller to observe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: set[Worker] = set()
        self._stopped = False

    def run(self, path: Path, work: Callable[..., None], job: Any) -> str:
        """Have ``work(job, path)`` done; return what went wrong, if any."""
        with self._lock:
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
            with self._lock:
                self._running.remove(worker)
        return ""

    def stop(self) -> None:
        """End all processes, and start none."""
        with self._lock:
            self._stopped = True
            for worker in self._running:
                worker.kill()


def _unpack_and_work(packed: bytes) -> bytes:
    """Do a job in a worker; its parent gets all that went wrong.

    It has one thread: what it computes must not depend on how many workers there are.
    """
    import torch
    from threadpoolctl import threadpool_limits

    work, job, path = pickle.loads(packed)
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with threadpool_limits(1):
        work(job, path)
    return b""
