"""A run that is killed at any moment and resumed gives the bits of one that never was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kill_support import outcome, run
from tests.support import assert_same_bits

CASES = ["FPFC", "FedAPM-client-duals", "FedMC-ADMM-client-duals"]


def assert_same_outcome(actual: Path, expected: Path) -> None:
    (last, arrays, history), (whole, state, record) = outcome(actual), outcome(expected)
    assert last == whole
    assert_same_bits(arrays, state)
    assert history == record


def kill_and_resume(
    name: str, num_rounds: int, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fork of a server that has imported everything: a run takes a fraction of what imports do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kill_support"])

    def life(folder: Path, seconds: float | None) -> tuple[float, int | None]:
        began = time.monotonic()
        process: Any = context.Process(target=run, args=(name, "inprocess", num_rounds, folder))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        return time.monotonic() - began, process.exitcode

    life(tmp_path / "first", None)  # the preload
    seconds, code = life(tmp_path / "whole", None)
    assert code == 0
    rng = np.random.default_rng()
    hits = 0
    for _ in range(kills):
        _, code = life(tmp_path / "killed", float(rng.uniform(0, 2 * seconds / kills)))
        assert code in (0, -signal.SIGKILL)
        hits += code != 0
    assert hits > kills / 2
    _, code = life(tmp_path / "killed", None)
    assert code == 0
    assert_same_outcome(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("name", CASES[1:])
def test_a_few_kills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_and_resume(name, 6, 2, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_25_kills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_and_resume(name, 60, 25, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="ends a group of processes")
def test_kills_on_ray(tmp_path: Path) -> None:
    name, num_rounds, kills = "FedAPM-client-duals", 12, 4
    run(name, "inprocess", num_rounds, tmp_path / "whole")
    arguments = [name, "ray", str(num_rounds), str(tmp_path / "killed")]
    command = [sys.executable, "-m", "tests.kill_support", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def life(until: int | None) -> int:
        """Run until a round has been saved, or to the end; a group, for Ray's own processes."""
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            path = tmp_path / "killed" / "checkpoints" / f"round-{until or 0:06d}.safetensors"
            while process.poll() is None and not (until and path.exists()):
                time.sleep(0.05)
            time.sleep(float(np.random.default_rng().uniform(0, 0.5)) if until else 0)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    for number in range(kills):
        life(2 * (number + 1))
    assert life(None) == 0
    assert_same_outcome(tmp_path / "killed", tmp_path / "whole")
