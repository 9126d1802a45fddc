"""What a federation makes of training that is killed and of disks that are full."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.support.deployment import (
    ALL_THREE,
    PATIENCE,
    STATUS,
    Federation,
    assert_same_results,
    rounds,
    run_here,
    running,
    state_of,
    status,
    trained,
)
from tests.support.federation import assert_same_bits

THREE_ROUNDS: dict[str, Any] = ALL_THREE | {"num-rounds": 3, "evaluate-every": 3}

# Appended to the app, which all its processes import.
FULL_DISK = """
import errno
import os


def _fsync(file, sync=os.fsync):
    if {name!r} in os.readlink(f"/proc/self/fd/{{file}}"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sync(file)


os.fsync = _fsync
"""


@contextmanager
def full_disk(federation: Federation, name: str) -> Iterator[None]:
    """Let no file with this in its path be written by the runs that are started meanwhile."""
    module = federation.folder / "sites" / "__init__.py"
    before = module.read_text(encoding="utf-8")
    module.write_text(before + FULL_DISK.format(name=name), encoding="utf-8")
    try:
        yield
    finally:
        module.write_text(before, encoding="utf-8")


@pytest.mark.long
def test_a_server_whose_disk_is_full_says_so_and_goes_on(shown: Federation) -> None:
    settings = THREE_ROUNDS | {"name": "server-disk", "strategy": "fpfc"}
    with full_disk(shown, "checkpoints/round-000002"), running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    said = shown.run(f"({STATUS}) || true")
    assert "finished:failed" in said
    assert "No space left on device" in said
    assert "The checkpoint of round 1 is whole" in said
    with running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    out = shown.folder / "results" / "server-disk"
    assert [line["round"] for line in rounds(out)] == [1, 2, 2, 3]
    assert_same_results(out, run_here(shown.folder, {}, **settings))


@pytest.mark.long
def test_a_site_whose_disk_is_full_is_refused_by_name(shown: Federation) -> None:
    settings = THREE_ROUNDS | {"name": "site-disk", "strategy": "fpfc"}
    with full_disk(shown, "client-1/round-000002"), running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    refusal = r"round 2: client 1 refused: .*No space left on device"
    assert shown.has_logged("run", refusal)
    out = shown.folder / "results" / "site-disk"
    assert trained(out) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert_same_results(out, run_here(shown.folder, {2: [1]}, **settings))


def kill_all(federation: Federation, program: str, port: str) -> None:
    """Kill what runs of a program, as a system does that is out of memory."""
    for process in federation.processes(program, port):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.long
def test_training_that_is_killed_costs_its_client_one_round(shown: Federation) -> None:
    settings = THREE_ROUNDS | {"name": "killed-training", "strategy": "fpfc"}
    out, log = shown.folder / "results" / "killed-training", shown.log("1")
    began = log.stat().st_size
    with running(shown, **settings) as run:
        shown.wait(
            "round 2 has reached site 1",
            lambda: "ROUND 2]" in log.read_text(errors="replace")[began:],
        )
        # Flower does not start it again for the same message.
        shown.wait(
            "round 2 is over",
            lambda: len(rounds(out)) == 2 or kill_all(shown, "flwr-clientapp", "9095"),
        )
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    assert shown.has_logged("run", r"round 2: client 1 refused: .*ClientApp stopped responding")
    assert trained(out) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert_same_results(out, run_here(shown.folder, {2: [1]}, **settings))


@pytest.mark.long
def test_a_server_app_that_is_killed_has_failed_and_goes_on(shown: Federation) -> None:
    settings = THREE_ROUNDS | {"name": "killed-server", "strategy": "fpfc"}
    out = shown.folder / "results" / "killed-server"
    with running(shown, **settings) as run:
        shown.wait("round 1 is over", lambda: len(rounds(out)) == 1)
        kill_all(shown, "flwr-serverapp", "8000")
        assert run.wait(PATIENCE) == 0
    said = shown.run(f"({STATUS}) || true")
    assert "finished:failed No heartbeat received from the task" in said
    with running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    assert_same_bits(state_of(out), state_of(run_here(shown.folder, {}, **settings)))
