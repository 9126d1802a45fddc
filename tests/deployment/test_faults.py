"""What a federation makes of training, and of a server, that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
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

# As a system does that is out of memory.
DYING = """
import os
import signal


class Dying(FPFCClient):
    def __init__(self, context, *args, **kwargs):
        super().__init__(context, *args, **kwargs)
        self.site = context.node_config["partition-id"]

    def fit(self, parameters, config):
        if self.site == 1 and config["server-round"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(parameters, config)


CLIENTS["fpfc"] = Dying
"""


@contextmanager
def added(federation: Federation, module: str, text: str) -> Iterator[None]:
    """Add to a module of the app, for the runs that are started meanwhile."""
    path = federation.folder / "sites" / module
    before = path.read_text(encoding="utf-8")
    path.write_text(before + text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


@pytest.mark.long
def test_training_that_is_killed_costs_its_client_one_round(shown: Federation) -> None:
    settings = THREE_ROUNDS | {"name": "killed-training", "strategy": "fpfc"}
    with added(shown, "client_app.py", DYING), running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    assert shown.has_logged("run", r"round 2: client 1 refused: .*ClientApp stopped responding")
    out = shown.folder / "results" / "killed-training"
    assert trained(out) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert_same_results(out, run_here(shown.folder, {2: [1]}, **settings))


@pytest.mark.long
def test_a_server_app_that_is_killed_has_failed_and_goes_on(shown: Federation) -> None:
    settings = THREE_ROUNDS | {"name": "killed-server", "strategy": "fpfc"}
    out = shown.folder / "results" / "killed-server"
    with running(shown, **settings) as run:
        shown.wait("round 1 is over", lambda: len(rounds(out)) == 1)
        for process in shown.processes("flwr-serverapp", "8000"):
            os.kill(process, signal.SIGKILL)
        assert run.wait(PATIENCE) == 0
    said = shown.run(f"({STATUS}) || true")
    assert "finished:failed No heartbeat received from the task" in said
    with running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    assert_same_bits(state_of(out), state_of(run_here(shown.folder, {}, **settings)))
