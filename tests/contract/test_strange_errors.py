"""Whatever a client raises, it fails alone: in this process, in workers, on Ray, in both APIs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import FedProxClient, client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.support.cases import NUM_CLIENTS, case_of
from tests.support.federation import make_client, run_on_ray, trained
from tests.support.legacy import run_legacy
from tests.support.refusals import Warned


class Mute(Exception):  # noqa: N818
    """An error that raises another one when it is shown."""

    def __str__(self) -> str:
        raise LookupError

    __repr__ = __str__


class Exiting(ValueError):  # noqa: N818
    def __str__(self) -> str:
        sys.exit(3)


class BadNotes(ValueError):  # noqa: N818
    @property
    def __notes__(self) -> list[str]:
        raise KeyboardInterrupt


STRANGE: list[Callable[[], BaseException]] = [
    Mute,
    Exiting,
    BadNotes,
    KeyboardInterrupt,
    lambda: SystemExit(0),
    GeneratorExit,
    lambda: ValueError("\x1b[2J\u202e" + "x" * 10**6),
]
NAMES = [
    *("Mute: (no text: its __str__ raises LookupError)", "__str__ raises SystemExit", "BadNotes"),
    *("KeyboardInterrupt", "SystemExit: 0", "GeneratorExit", "xxxxx"),
]
VICTIM = 3
ROUNDS = 1 + len(STRANGE)


class StrangeClient(FedProxClient):
    """A client that in every round raises something else."""

    def train(self, asked: Any, config: Any) -> Any:
        result = super().train(asked, config)
        # Who has never answered leaves the run; this one has, in round 1.
        if self.context.node_config["partition-id"] == VICTIM and config["server-round"] > 1:
            raise STRANGE[config["server-round"] - 2]()
        return result


def client_fn(context: Context) -> Any:
    return make_client(StrangeClient, context).to_client()


def app_of(api: str) -> ClientApp:
    if api == "legacy":
        return ClientApp(client_fn=client_fn)
    return client_app(client_fn, num_clients=NUM_CLIENTS if api == "packed" else None)


def run(api: str, grid: Grid) -> StatefulStrategy:
    case = case_of("FedProx")
    strategy = case.strategy(fraction_evaluate=0.0)
    if api == "legacy":
        run_legacy(grid, strategy, case.initial_arrays(), ROUNDS)
    else:
        strategy.start(grid, case.initial_arrays(), ROUNDS)
    return strategy


def assert_that_only_the_victim_failed(strategy: StatefulStrategy, warned: Warned) -> None:
    others = [client for client in range(NUM_CLIENTS) if client != VICTIM]
    everybody = {1: list(range(NUM_CLIENTS))}
    assert trained(strategy) == everybody | dict.fromkeys(range(2, ROUNDS + 1), others)
    lines = warned(f"client {VICTIM} refused")
    assert len(lines) == len(STRANGE)
    for line, name in zip(lines, NAMES, strict=True):
        assert name in line
        assert line.isprintable()
        assert len(line) < 600


@pytest.mark.parametrize(
    ("api", "workers"),
    [
        ("packed", 0),
        *(
            pytest.param(api, workers, marks=pytest.mark.slow)
            for api, workers in (
                *(("current", 0), ("legacy", 0)),
                *(("current", 2), ("packed", 2), ("legacy", 2)),
            )
        ),
    ],
)
def test_in_process(api, workers, warned, caplog):
    num_nodes = 2 if api == "packed" else NUM_CLIENTS
    with InProcessGrid(app_of(api), num_nodes, workers=workers) as grid:
        before = [worker.pid for worker in grid._idle]
        strategy = run(api, grid)
        assert sorted(worker.pid for worker in grid._idle) == sorted(before)
    assert_that_only_the_victim_failed(strategy, warned)
    text = "".join(record.getMessage() for record in caplog.records)
    assert not {"\x1b", "\u202e"}.intersection(text)
    assert len(text) < 200_000


@pytest.mark.parametrize(
    "api",
    [
        pytest.param("current", marks=pytest.mark.slow),
        # How they pack an error is seen in process; these need a Ray of their own each.
        pytest.param("packed", marks=pytest.mark.long),
        pytest.param("legacy", marks=pytest.mark.long),
    ],
)
def test_on_ray(api: str, warned: Warned) -> None:
    server, strategies = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grid.pull_interval = 0.01  # type: ignore[attr-defined]
        strategies.append(run(api, grid))

    run_on_ray(server, app_of(api), 2 if api == "packed" else NUM_CLIENTS)
    assert_that_only_the_victim_failed(strategies[0], warned)
