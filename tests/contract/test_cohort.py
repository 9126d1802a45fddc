"""Clients of a node that train together: every method's promise.

With cohorts a run is that without to rounding; and the same bits on any number of nodes and
workers, on every engine, whoever takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from clients import SGDClient, client_app
from clients.toolkit.round import app as app_module
from clients.toolkit.solving import cohort as cohort_module
from fl_admm_strategies import FedProx, InProcessGrid, StatefulStrategy
from tests.support.cases import AT_ANY_PACE, NUM_CLIENTS, Case, case_of, sampling
from tests.support.federation import (
    ClientFn,
    assert_same_runs,
    client_fn_of,
    initial_arrays,
    raising_client_fn,
    run_on_ray,
)
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

DESCENTS = {"FPFC": 1, "FedADMM": 1, "FedAPM": 2, "FLAME": 1, "LpProjADMM": 1, "FedProx": 1}
DESCENTS |= {"Ditto": 2, "Local": 1, "FPFC-head": 1, "FedADMM-client-duals": 1}
DESCENTS |= {
    "LocalSGD": 3,
    "SCAFFOLD": 1,
    "FedDyn": 1,
    "PFedMe": 2,
    "PFedMeMatched": 1,
    "LpProj": 2,
}
"""How often a client descends in a round, in methods whose clients do."""


def app_of(case: Case, cohort: Any, client_fn: ClientFn | None = None) -> ClientApp:
    made = client_fn or client_fn_of(case.client_class)
    return client_app(made, num_clients=NUM_CLIENTS, cohort=cohort)


def run(case: Case, num_nodes: int, cohort: Any, **options: Any) -> StatefulStrategy:
    strategy = sampling(case)
    with InProcessGrid(app_of(case, cohort), num_nodes, **options) as grid:
        strategy.start(grid, case.initial_arrays(), 3)
    return strategy


@pytest.mark.parametrize("case", fast(["FPFC", "FedAPM"], AT_ANY_PACE))
def test_a_run_with_cohorts_is_that_without_to_rounding_on_any_number_of_nodes(case, monkeypatch):
    stacks: list[int] = []
    descend = cohort_module.descend

    def counted(members: Any, **options: Any) -> Any:
        stacks.append(len(members))
        return descend(members, **options)

    monkeypatch.setattr(cohort_module, "descend", counted)
    together = run(case, 1, True)
    if case.name in DESCENTS:
        # Three of six take part in each of three rounds.
        assert sum(stacks) == 9 * DESCENTS[case.name]
        assert max(stacks) == 3
    assert_same_runs(run(case, 4, True), together)
    without = run(case, 2, False).state_dict()
    for name, array in together.state_dict().items():
        np.testing.assert_allclose(array, without[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_ray_has_the_same_bits() -> None:
    case, server = case_of("Ditto"), ServerApp()
    strategy = sampling(case)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, case.initial_arrays(), 3)

    run_on_ray(server, app_of(case, True), 2)
    assert_same_runs(strategy, run(case, 1, True))


# --- Who fails ------------------------------------------------------------------------------------


def test_a_client_that_raises_fails_alone_and_leaves_no_trace(warned, caplog):
    case = case_of("Ditto")
    for num_nodes in (1, 2):
        app = app_of(case, True, raising_client_fn(case.client_class, {2: [2]}))
        strategy = case.strategy(seed=1)
        strategy.start(InProcessGrid(app, num_nodes), case.initial_arrays(), 3)
        assert sorted(strategy.train_metrics[2]) == [0, 1, 3, 4, 5]
        assert sorted(strategy.train_metrics[3]) == list(range(NUM_CLIENTS))
        assert warned("client 2", "OSError: the disk is full")
        caplog.clear()


def test_a_client_fn_that_raises_fails_its_client_alone(warned: Warned) -> None:
    case = case_of("FedProx")

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 4:
            raise SystemExit(3)
        return client_fn_of(case.client_class)(context)

    strategy = case.strategy(seed=1, fraction_evaluate=0)
    strategy.start(InProcessGrid(app_of(case, True, client_fn), 2), case.initial_arrays(), 1)
    assert sorted(strategy.train_metrics[1]) == [0, 1, 2, 3, 5]
    assert len(warned()) == len(warned("client 4", "SystemExit: 3")) == 1


# --- When -----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return of how many clients cohorts were asked for."""
    sizes: list[int] = []
    driven: Callable[..., Any] = app_module._driven

    def counted(run: Any, choice: Any, jobs: Any) -> Any:
        sizes.append(len(jobs))
        return driven(run, choice, jobs)

    monkeypatch.setattr(app_module, "_driven", counted)
    return sizes


@pytest.mark.parametrize(
    ("cohort", "num_clients", "expected"),
    [("auto", 15, []), ("auto", 16, [16]), (True, 3, [3]), (False, 16, []), (None, 16, [16])],
)
def test_auto_is_for_sixteen_clients_or_more(cohort, num_clients, expected, asked):
    options = {} if cohort is None else {"cohort": cohort}
    make = client_fn_of(case_of("FedProx").client_class)
    app = client_app(make, num_clients=num_clients, **options)
    FedProx(fraction_evaluate=0).start(InProcessGrid(app, 1), initial_arrays(), 1)
    assert asked[-1:] == expected  # the first is a question about names


def test_a_node_that_is_one_client_trains_it_alone(asked: list[int]) -> None:
    app = client_app(client_fn_of(case_of("FedProx").client_class), cohort=True)
    FedProx(fraction_evaluate=0).start(InProcessGrid(app, 2), initial_arrays(), 1)
    assert not asked


def test_another_value_is_refused() -> None:
    with refused(ValueError, "cohort", "always"):
        client_app(client_fn_of(SGDClient), num_clients=2, cohort="always")  # type: ignore[arg-type]


@pytest.mark.slow
def test_clients_of_flowers_fedavg_train_together(asked: list[int]) -> None:
    config = ConfigRecord({"lr": 0.5, "local-epochs": 2, "seed": 1})
    models = []
    for num_clients, cohort in ((None, False), (2, True)):
        app = client_app(client_fn_of(SGDClient), num_clients=num_clients, cohort=cohort)
        result = FedAvg(fraction_evaluate=0.0).start(
            InProcessGrid(app, 2), initial_arrays(), num_rounds=2, train_config=config
        )
        models.append(result.arrays.to_torch_state_dict())
    assert asked
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-4, atol=1e-6)
