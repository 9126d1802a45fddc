"""The same seed gives the same bits: five runs, on both engines, with one and two workers.

All strategies share one simulation on Ray, whose start takes longer than all of their runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.cases import CASES, NUM_CLIENTS, Case, each_case, forks
from tests.support import assert_same_bits, client_fn_of, run_on_ray

SETTINGS: dict[str, Any] = {"fraction_train": 0.67, "fraction_evaluate": 0.5, "seed": 1}
BY_NAME = {case.name: case for case in CASES}


class Shuffled(Grid):
    """Another grid, whose replies come in an order of chance."""

    def __init__(self, grid: Grid, seed: int) -> None:
        self.grid, self.random = grid, random.Random(seed)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self.random.shuffle(replies)
        return replies

    def get_node_ids(self) -> list[int]:
        nodes = list(self.grid.get_node_ids())
        self.random.shuffle(nodes)
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)


def run(case: Case, grid: Grid, number: int) -> StatefulStrategy:
    fraction = 1.0 if case.everybody_trains else SETTINGS["fraction_train"]
    strategy = case.strategy(**{**SETTINGS, "fraction_train": fraction})
    config = ConfigRecord({"case": case.name, "run": number})
    strategy.start(
        Shuffled(grid, number),
        case.initial_arrays(),
        num_rounds=2,
        train_config=config,
        evaluate_config=config,
        evaluate_every=2,
    )
    return strategy


def assert_same_runs(actual: StatefulStrategy, expected: StatefulStrategy) -> None:
    assert_same_bits(actual.state_dict(), expected.state_dict())
    assert actual.train_metrics == expected.train_metrics
    assert actual.evaluate_metrics == expected.evaluate_metrics


def long(workers: int, runs: int) -> Any:
    return pytest.param(workers, runs, marks=pytest.mark.long)


@forks
@each_case
@pytest.mark.parametrize(("workers", "runs"), [(2, 1), long(1, 5), long(2, 5)])
def test_runs_in_process_have_the_same_bits(case: Case, workers: int, runs: int) -> None:
    app = client_app(client_fn_of(case.client_class))
    expected = run(case, InProcessGrid(app, NUM_CLIENTS), 0)
    for number in range(1, runs + 1):
        with InProcessGrid(app, NUM_CLIENTS, workers=workers) as grid:
            assert_same_runs(run(case, grid, number), expected)


def app_of_all_cases() -> ClientApp:
    """Return an app whose clients are those of the case that the message names.

    Every run has a state of its own on the nodes, as if it were a simulation of its own.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        (config,) = message.content.config_records.values()
        prefix = f"{config['case']}/{config['run']}/"
        mine = [
            (key.removeprefix(prefix), record)
            for key, record in context.state.items()
            if key.startswith(prefix)
        ]
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=context.node_config,
            state=RecordDict(dict(mine)),
            run_config=context.run_config,
        )
        case = BY_NAME[str(config["case"])]
        reply = client_app(client_fn_of(case.client_class))(message, own)
        context.state = RecordDict({prefix + key: record for key, record in own.state.items()})
        return reply

    app.train()(handle)
    app.evaluate()(handle)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return client_app(lambda context: None)(message, context)

    return app


@pytest.mark.parametrize(
    ("workers", "runs"), [pytest.param(2, 1, marks=pytest.mark.slow), long(1, 2), long(2, 3)]
)
def test_runs_on_ray_have_the_same_bits(workers: int, runs: int) -> None:
    server = ServerApp()
    compared: list[tuple[str, int]] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grid.pull_interval = 0.01  # type: ignore[attr-defined] # seconds, Flower's is 0.1
        for case in CASES:
            clients = client_app(client_fn_of(case.client_class))
            expected = run(case, InProcessGrid(clients, NUM_CLIENTS), 0)
            for number in range(1, runs + 1):
                assert_same_runs(run(case, grid, number), expected)
                compared.append((case.name, number))

    run_on_ray(server, app_of_all_cases(), NUM_CLIENTS, num_cpus=workers)
    assert len(compared) == runs * len(CASES)
