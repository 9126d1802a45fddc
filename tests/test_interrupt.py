"""Ctrl-C ends a run, whatever runs the clients, and says in one line how to go on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from clients import client_app
from fl_admm_strategies import InProcessGrid, LegacyServer, run_in_process
from fl_admm_strategies.runtime.common.interrupts import interruptible
from fl_admm_strategies.runtime.saving.checkpoints import rounds_in
from tests.support.cases import CHEAP, NUM_CLIENTS
from tests.support.federation import Adding, Mean, trained
from tests.support.legacy import app_of
from tests.support.refusals import refused

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0  # seconds until the processes of a run that has ended are gone


def assert_nothing_is_left_of(session: int, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while left := processes_of(session):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"a run left processes behind: {left}")
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


@pytest.fixture(autouse=True)
def ctrl_c_as_at_a_terminal() -> Iterator[None]:
    """Let Ctrl-C reach us and our processes: a shell starts what it runs in the background without.

    It then ignores the signal, and Python leaves it so.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def press_ctrl_c_and_swallow_it() -> None:
    with suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


class Pressing(Adding):
    """A client during whose third training the user does something."""

    def __init__(self, context: Context, what: Callable[[], None]) -> None:
        super().__init__(context)
        self.what = what

    def fit(self, parameters, config):
        if config["server-round"] == 3 and self.client == 1:
            self.what()
        return super().fit(parameters, config)


@pytest.mark.parametrize("what", [press_ctrl_c, press_ctrl_c_and_swallow_it])
@pytest.mark.parametrize("num_nodes", [2, NUM_CLIENTS])
def test_an_interrupt_while_a_client_trains_ends_the_run(num_nodes, what, tmp_path):
    app = client_app(lambda context: Pressing(context, what), num_clients=NUM_CLIENTS)
    strategy, before = Mean(), signal.getsignal(signal.SIGINT)
    with (
        InProcessGrid(app, num_nodes) as grid,
        refused(KeyboardInterrupt, "round 2", f"checkpoint_dir='{tmp_path}'"),
    ):
        strategy.start(grid, CHEAP.initial_arrays(), 5, checkpoint_dir=tmp_path)
    assert list(trained(strategy)) == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before
    with (
        InProcessGrid(app, num_nodes) as grid,
        refused(KeyboardInterrupt, "checkpoint_dir"),
    ):
        Mean().start(grid, CHEAP.initial_arrays(), 5)


def test_an_interrupt_ends_a_run_under_the_legacy_api_before_its_other_clients_train() -> None:
    done = []

    class Slow(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            done.append(1)
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGINT)  # the main thread waits for the clients'
            time.sleep(0.1)
            return parameters, 1, {}

    server = LegacyServer(Mean(min_available_nodes=50), CHEAP.initial_arrays())
    clients = ClientApp(client_fn=lambda context: Slow().to_client())
    with pytest.raises(KeyboardInterrupt):
        run_in_process(app_of(server, 3), clients, 50)
    assert len(done) < 10


def test_an_interrupt_ends_a_block_whose_code_swallows_it_and_fails_later() -> None:
    def swallow_and_fail() -> None:  # Python itself swallows in a weak reference's callback
        with interruptible():
            press_ctrl_c_and_swallow_it()
            raise RuntimeError("this InProcessGrid has been closed")

    with pytest.raises(KeyboardInterrupt):
        swallow_and_fail()


# --- As a process of its own ----------------------------------------------------------------------


@contextmanager
def started(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own, with nothing left of it in the end."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        assert_nothing_is_left_of(process.pid)


def saved(process: subprocess.Popen[str], checkpoints: Path) -> None:
    """Wait until two rounds are saved."""
    while len(rounds_in(checkpoints)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str], checkpoints: Path) -> tuple[str, float]:
    """Press Ctrl-C once two rounds are saved; return standard error and how long it took."""
    saved(process, checkpoints)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    return error, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [(), ("--engine", "inprocess"), ("--engine", "inprocess", "--workers", "2")]
)
def test_the_command_line_ends_with_130_and_the_command_that_goes_on(engine, tmp_path):
    run = (sys.executable, "-m", "simulations", "run", "digits-fpfc", *engine, "--out", "a run")
    with started(*run, "--set", "training.num-rounds=100000", cwd=tmp_path) as process:
        error, seconds = interrupt(process, tmp_path / "a run" / "checkpoints")
    print(f"It took {seconds:.1f} s.")
    assert process.returncode == 130, error
    found = re.fullmatch(
        r"Interrupted. The run is saved up to round (\d+); go on with: (python -m .* --resume)\n",
        error,
    )
    assert found is not None, error
    last = rounds_in(tmp_path / "a run" / "checkpoints")[-1]
    assert int(found[1]) <= last <= int(found[1]) + 1
    _, *again = shlex.split(found[2])
    if engine:
        rounds = f"training.num-rounds={last + 1}"
        with started(sys.executable, *again, "--set", rounds, cwd=tmp_path) as process:
            output, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        assert "Results:" in output


@pytest.mark.slow
def test_nothing_of_ray_is_left_where_its_raylet_is_slow_to_end(tmp_path: Path) -> None:
    # Ray kills a raylet that does not end within a second, and its agents then report the death
    # for a minute to a server that is gone; and what Flower's threads ask of Ray once it is shut
    # down starts another.
    run = (sys.executable, "-m", "simulations", "run", "digits-fpfc", "--out", "a run")
    with started(*run, "--set", "training.num-rounds=100000", cwd=tmp_path) as process:
        saved(process, tmp_path / "a run" / "checkpoints")
        (raylet,) = (pid for pid, name in processes_of(process.pid).items() if "/raylet " in name)
        os.kill(raylet, signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == 130
        assert_nothing_is_left_of(process.pid, patience=30.0)
