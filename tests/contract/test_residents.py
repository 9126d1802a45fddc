"""A process that keeps its clients: every method gives the bits that it gives with new ones."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import DittoClient, client_app
from clients.toolkit.round import residents
from fl_admm_strategies import StatefulStrategy
from tests.support.cases import NUM_CLIENTS, Case, at_any_pace, case_of, sampling
from tests.support.federation import (
    ClientFn,
    WatchedGrid,
    assert_same_runs,
    client_fn_of,
    raising_client_fn,
    run_on_ray,
)
from tests.support.pace import fast
from tests.support.refusals import refused


def counting(client_fn: ClientFn, made: Counter[int]) -> ClientFn:
    """Return a client_fn that counts how often it made each client."""

    def counted(context: Context) -> Any:
        made[int(context.node_config["partition-id"])] += 1
        return client_fn(context)

    return counted


def app_of(client_fn: ClientFn, *, keep_clients: bool = True, cohort: Any = False) -> ClientApp:
    return client_app(client_fn, num_clients=NUM_CLIENTS, keep_clients=keep_clients, cohort=cohort)


def run(case: Case, app: ClientApp, **options: Any) -> StatefulStrategy:
    """Return four rounds on three nodes, one of whose replies of round 2 is lost."""
    strategy = sampling(case)
    lost = {2: lambda replies: replies[1:]}
    with WatchedGrid(app, 3, spoil=lost, **options) as grid:
        strategy.start(grid, case.initial_arrays(), 4)
    return strategy


@at_any_pace
@pytest.mark.parametrize("cohort", fast([True], [False, True]))
def test_kept_clients_give_the_bits_of_new_ones(case: Case, cohort: bool) -> None:
    made: Counter[int] = Counter()
    client_fn = client_fn_of(case.client_class)
    kept = run(case, app_of(counting(client_fn, made), cohort=cohort))
    assert made == Counter(range(NUM_CLIENTS)) & made  # none was made twice
    assert_same_runs(kept, run(case, app_of(client_fn, keep_clients=False, cohort=cohort)))


@pytest.mark.slow
@at_any_pace
def test_workers_that_keep_cohorts_give_the_same_bits(case: Case) -> None:
    app = app_of(client_fn_of(case.client_class), cohort=True)
    assert_same_runs(run(case, app, workers=2), run(case, app))


@pytest.mark.slow
def test_ray_has_the_same_bits(tmp_path: Path) -> None:
    case, server, made = case_of("FedAPM"), ServerApp(), tmp_path / "made"
    client_fn = client_fn_of(case.client_class)
    strategy = sampling(case)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, case.initial_arrays(), 4)

    def noting(context: Context) -> Any:
        with made.open("a") as file:
            file.write(f"{os.getpid()} {context.node_config['partition-id']}\n")
        return client_fn(context)

    run_on_ray(server, app_of(noting), 2)
    lines = made.read_text().splitlines()
    assert len(lines) == len(set(lines))  # no process made a client twice
    expected = sampling(case)
    with WatchedGrid(app_of(client_fn, keep_clients=False), 1) as grid:
        expected.start(grid, case.initial_arrays(), 4)
    assert_same_runs(strategy, expected)


def test_a_client_that_fails_is_made_anew() -> None:
    made: Counter[int] = Counter()

    class Failing(DittoClient):
        def train(self, asked: Any, config: Any) -> Any:
            if config["server-round"] == 2 and self.context.node_config["partition-id"] == 4:
                raise OSError("the disk is full")
            return super().train(asked, config)

    Failing.__module__ = DittoClient.__module__  # else none is kept
    case = case_of("Ditto")
    strategy = case.strategy(seed=1, fraction_evaluate=0)
    app = app_of(counting(client_fn_of(Failing), made))
    strategy.start(WatchedGrid(app, 2), case.initial_arrays(), 4)
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 3, 5]
    assert made == Counter([*range(NUM_CLIENTS), 4])


def test_clients_of_a_class_of_ones_own_are_made_anew() -> None:
    made: Counter[int] = Counter()
    case = case_of("Ditto")
    strategy = case.strategy(seed=1, fraction_evaluate=0)
    app = app_of(counting(raising_client_fn(case.client_class, {}), made))
    strategy.start(WatchedGrid(app, 2), case.initial_arrays(), 3)
    assert made == Counter(4 * [*range(NUM_CLIENTS)])  # asked once before round 1


def test_models_that_do_not_fit_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 16 + 15 numbers of 4 bytes, twice: two models fit.
    monkeypatch.setattr(residents, "MOST_BYTES", 2 * 2 * 4 * 31)
    made: Counter[int] = Counter()
    case = case_of("FedProx")
    strategy = case.strategy(seed=1, fraction_evaluate=0)
    app = app_of(counting(client_fn_of(case.client_class), made))
    strategy.start(WatchedGrid(app, 1), case.initial_arrays(), 3)
    assert made == Counter([0, 1] + 4 * [2, 3, 4, 5])  # asked once before round 1


def test_a_run_does_not_get_the_clients_of_another_app() -> None:
    case, made = case_of("FedProx"), (Counter[int](), Counter[int]())
    for counter in made:
        app = app_of(counting(client_fn_of(case.client_class), counter))
        run(case, app)
    assert made[0] == made[1]
    assert made[0]


def test_they_travel_with_an_app_as_its_id() -> None:
    here = residents.Residents("an app")
    there = pickle.loads(pickle.dumps(here))
    assert there is not here
    assert pickle.loads(pickle.dumps(here)) is there
    other = pickle.loads(pickle.dumps(residents.Residents("another")))
    assert other is not there
    assert pickle.loads(pickle.dumps(here)) is not there  # one app's at a time


def test_it_takes_hosted_clients() -> None:
    with refused(ValueError, "keep_clients", "num_clients"):
        client_app(client_fn_of(DittoClient), keep_clients=True)
