"""The same seed gives the same bits: five runs, on both engines, with one and two workers.

All strategies share one simulation on Ray, under both of Flower's APIs: to start it takes longer
than all of their runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp import Grid, ServerApp

from clients import client_app
from fl_admm_strategies import InProcessGrid, LegacyStrategy, StatefulStrategy
from tests.support.cases import CASES, NUM_CLIENTS, Case, each_case, forks
from tests.support.federation import assert_same_bits, client_fn_of, run_on_ray

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


def run(case: Case, grid: Grid, number: int, context: Context | None = None) -> StatefulStrategy:
    """Run a case; with a context under Flower's older API."""
    fraction = 1.0 if case.everybody_trains else SETTINGS["fraction_train"]
    strategy = case.strategy(**{**SETTINGS, "fraction_train": fraction})
    config = ConfigRecord({"case": case.name, "run": number, "legacy": context is not None})
    configs: dict[str, Any] = {"train_config": config, "evaluate_config": config}
    if context is None:
        strategy.start(
            Shuffled(grid, number), case.initial_arrays(), 2, evaluate_every=2, **configs
        )
    else:
        legacy = LegacyStrategy(strategy, case.initial_arrays(), evaluate_every=2, **configs)
        two = ServerConfig(num_rounds=2)
        DefaultWorkflow()(
            Shuffled(grid, number), LegacyContext(context=context, config=two, strategy=legacy)
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


class AllCases(ClientApp):
    """The clients of all cases, under both APIs: a message says which one it is for.

    Every run has a state of its own on the nodes, as if it were a simulation of its own.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        named = [c for c in message.content.config_records.values() if "case" in c]
        if not named:  # a question who the clients are, which all answer alike
            legacy = message.metadata.message_type != MessageType.QUERY
            return self.app(CASES[0], legacy)(message, context)
        (config,) = named
        prefix = f"{config['case']}/{config['run']}/{config['legacy']}/"
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
        app = self.app(BY_NAME[str(config["case"])], bool(config["legacy"]))
        reply = app(message, own)
        context.state = RecordDict({prefix + key: record for key, record in own.state.items()})
        return reply

    @staticmethod
    def app(case: Case, legacy: bool) -> ClientApp:
        client_fn = client_fn_of(case.client_class)
        return ClientApp(client_fn=client_fn) if legacy else client_app(client_fn)


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
                assert_same_runs(run(case, grid, number, context), expected)
                compared.append((case.name, number))

    run_on_ray(server, AllCases(), NUM_CLIENTS, num_cpus=workers)
    assert len(compared) == runs * len(CASES)
