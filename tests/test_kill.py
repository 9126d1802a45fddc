"""A run that is killed at any moment and resumed gives the bits of one that never was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies.runtime.saving.checkpoints import Checkpoints
from tests.support.federation import assert_same_bits
from tests.support.kill import outcome, run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks, and ends sessions of processes")

CASES = [
    ("FPFC", "inprocess"),
    ("AsyncFPFC", "inprocess"),
    ("FedMC-ADMM-client-duals", "inprocess"),
    *(("FedAPM-client-duals", engine) for engine in ("inprocess", "workers", "ray")),
]

# Seconds that killed processes may take to disappear, on however busy a machine: Ray's agents try
# for 60 to tell a server of their raylet's death.
PATIENCE = 120.0

# With what the first round of training would import; what does not exist is passed over.
PRELOAD = ["tests.support.kill", "torch._dynamo", "fl_admm_strategies.maths.pairs.kernels_numba"]

EVERY = 2  # rounds from checkpoint to checkpoint


class Lives:
    """Runs of a case in a folder, until they are at their end or killed.

    Every life is a fork of a server that has imported everything, which takes longer than a run.
    """

    def __init__(self, name: str, engine: str, num_rounds: int, ray_folder: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        warm_up = self.context.Process(target=int)
        warm_up.start()
        warm_up.join()
        self.name, self.engine, self.num_rounds = name, engine, num_rounds
        self.ray_folder = ray_folder

    def live(
        self, folder: Path, checkpoints: int | None = None, pause: float = 0.0
    ) -> tuple[int, list[float]]:
        """Run the case, or continue it, in a folder; kill it `pause` seconds after a checkpoint.

        Parameters
        ----------
        folder : Path
        checkpoints : int, optional
            That it may write; 0 kills it after `pause` seconds. By default nothing kills it.
        pause : float
            In seconds.

        Returns
        -------
        code : int
            The exit code.
        times : list of float
            Seconds from the start to each checkpoint that it wrote, and to its end.
        """
        arguments = (self.name, self.engine, self.num_rounds, EVERY, folder, self.ray_folder)
        process = self.context.Process(target=run, args=arguments)
        began = time.monotonic()
        last = newest(folder)
        process.start()
        times: list[float] = []
        while process.is_alive() and (checkpoints is None or len(times) < checkpoints):
            process.join(0.005)
            if newest(folder) > last:
                last = newest(folder)
                times.append(time.monotonic() - began)
        if checkpoints is not None:
            process.join(pause)
        process.kill()
        process.join()
        times.append(time.monotonic() - began)
        assert process.pid is not None
        assert process.exitcode is not None
        if self.engine == "ray":
            # Ray's processes go on for a while, its actors with what they were training.
            time.sleep(float(np.random.default_rng().uniform(0, 1)))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert_nothing_is_left_of(process.pid)
        return process.exitcode, times


def newest(folder: Path) -> int:
    return max(Checkpoints(folder / "checkpoints").rounds(), default=0)


def assert_nothing_is_left_of(session: int, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while left := processes_of(session):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"a killed run left processes behind: {left}")
        time.sleep(0.02)


def processes_of(session: int) -> dict[int, str]:
    """Return the processes of a session, without those that only wait for their parent."""
    command = ["ps", "-A", "-ww", "-o", "pid=,stat=,args="]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    left = {}
    for line in listed.splitlines():
        pid, stat, *args = line.split(maxsplit=2)
        with suppress(ProcessLookupError):
            if not stat.startswith("Z") and os.getsid(int(pid)) == session:
                left[int(pid)] = " ".join(args)
    return left


def assert_same_outcome(actual: Path, expected: Path) -> None:
    (last, arrays, history), (whole, state, record) = outcome(actual), outcome(expected)
    assert last == whole
    assert_same_bits(arrays, state)
    assert history == record


def survive(lives: Lives, kills: int, tmp_path: Path) -> None:
    """Kill a run so many times, and resume it; begin another whenever it comes to its end before.

    A third of the kills come at a random moment of the start of a process, with all that this
    takes on Ray; the others, so that the run gets on whatever else the machine does, after the
    process has written one or two checkpoints, at a random moment until the next.
    """
    code, times = lives.live(tmp_path / "whole")
    assert code == 0
    start, rounds = times[0], (times[-1] - times[0]) / max(1, len(times) - 1)
    rng = np.random.default_rng()
    moments = rng.permutation(np.arange(kills) % 3).tolist()
    runs: list[list[int]] = [[]]  # the round of the newest checkpoint at each kill
    while moments:
        folder = tmp_path / f"killed-{len(runs)}"
        pause = float(rng.uniform(0, rounds if moments[0] else start))
        code, _ = lives.live(folder, moments[0], pause)
        if code == 0:
            assert_same_outcome(folder, tmp_path / "whole")
            runs.append([])
        else:
            assert code == -signal.SIGKILL
            moments.pop(0)
            runs[-1].append(newest(folder))
    folder = tmp_path / f"killed-{len(runs)}"
    code, _ = lives.live(folder)
    assert code == 0
    assert_same_outcome(folder, tmp_path / "whole")
    print(f"Killed with these rounds saved, run by run, of {lives.num_rounds}: {runs}")


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for Ray, which makes sockets in it: its path has to be short."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), CASES)
def test_a_few_kills(name: str, engine: str, ray_folder: Path, tmp_path: Path) -> None:
    survive(Lives(name, engine, 8, ray_folder), 3, tmp_path)
