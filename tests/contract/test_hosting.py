"""Where clients are hosted and what runs them changes no bit: what every strategy promises.

All strategies share one simulation on Ray, under both of Flower's APIs: to start it takes longer
than all of their runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.support.cases import (
    CASES,
    NUM_CLIENTS,
    Case,
    at_any_pace,
    case_of,
    each_case,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    WatchedGrid,
    assert_same_runs,
    client_fn_of,
    run_on_ray,
)
from tests.support.legacy import run_legacy


@at_any_pace
def test_it_does_not_matter_how_many_nodes_host_the_clients(case: Case) -> None:
    def host(num_nodes: int) -> StatefulStrategy:
        app = client_app(client_fn_of(case.client_class), num_clients=NUM_CLIENTS)
        return run(case, WatchedGrid(app, num_nodes), strategy=sampling(case))

    expected, _ = plain(case)
    assert expected.client_ids == list(range(NUM_CLIENTS))
    assert_same_runs(host(4), expected)  # some nodes host one client, some two


@each_case
def test_the_legacy_api_gives_the_same_bits(case: Case) -> None:
    strategy = sampling(case)
    grid = InProcessGrid(ClientApp(client_fn=client_fn_of(case.client_class)), NUM_CLIENTS)
    run_legacy(grid, strategy, case.initial_arrays(), 3)
    assert_same_runs(strategy, plain(case)[0])


# --- Any engine, any number of workers, any order of replies ------------------------------------


def run_numbered(
    case: Case, grid: Grid, number: int, context: Context | None = None
) -> StatefulStrategy:
    """Run a case over a grid that shuffles; with a context under Flower's legacy API."""
    strategy = case.strategy(fraction_train=0.67, fraction_evaluate=0.5, seed=1)
    config = ConfigRecord({"case": case.name, "number": number, "legacy": context is not None})
    configs: dict[str, Any] = {"train_config": config, "evaluate_config": config}
    arrays = case.initial_arrays()
    if context is None:
        strategy.start(grid, arrays, 2, evaluate_every=2, **configs)
    else:
        run_legacy(grid, strategy, arrays, 2, context, evaluate_every=2, **configs)
    return strategy


def long(*parameters: Any) -> Any:
    return pytest.param(*parameters, marks=pytest.mark.long)


@pytest.mark.slow
@each_case
@pytest.mark.parametrize(("workers", "runs"), [(2, 1), long(1, 5), long(2, 5)])
def test_runs_in_process_have_the_same_bits(case: Case, workers: int, runs: int) -> None:
    app = client_app(client_fn_of(case.client_class))
    expected = run_numbered(case, InProcessGrid(app, NUM_CLIENTS), 0)
    for number in range(1, runs + 1):
        with InProcessGrid(app, NUM_CLIENTS, workers=workers) as grid:
            assert_same_runs(run_numbered(case, grid, number), expected)


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
        prefix = f"{config['case']}/{config['number']}/{config['legacy']}/"
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
        app = self.app(case_of(str(config["case"])), bool(config["legacy"]))
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
            expected = run_numbered(case, InProcessGrid(clients, NUM_CLIENTS), 0)
            for number in range(1, runs + 1):
                assert_same_runs(run_numbered(case, grid, number), expected)
                assert_same_runs(run_numbered(case, grid, number, context), expected)
                compared.append((case.name, number))

    run_on_ray(server, AllCases(), NUM_CLIENTS, num_cpus=workers)
    assert len(compared) == runs * len(CASES)
