"""`max_norm`, and a bound on examples: what every strategy promises, whatever its algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from clients import FedProxClient, client_app
from fl_admm_strategies import FPFC, FedADMM, FedProx, InProcessGrid
from fl_admm_strategies.algorithms.fedadmm import FedADMMInstruction
from fl_admm_strategies.runtime.saving.state import arrays_of
from simulations.attacks import Attack, attacked_client_fn
from tests.support.cases import (
    CASES,
    CHEAP,
    NUM_CLIENTS,
    Case,
    at_any_pace,
    grid_of,
    plain,
    run,
    sampling,
)
from tests.support.federation import (
    Adding,
    Mean,
    assert_same_bits,
    assert_same_runs,
    client_fn_of,
    initial_arrays,
)
from tests.support.pace import fast
from tests.support.refusals import Warned

HUGE = Attack("one-huge", 0.17, seed=3)
(LIAR,) = HUGE.malicious(NUM_CLIENTS)

UPLOADING = [case for case in CASES if case.server_learns]


def sends_changes(case: Case) -> bool:
    """Return whether uploads beyond the bound are refused, since they cannot be clipped."""
    changes = "client-duals" in case.name
    return changes or case.name in (
        *("FedDyn", "SCAFFOLD", "FedALS", "FedALS-implicit", "FedGiA", "FedGiA-gram"),
        *("FedEASE", "FedMGS", "IFCA"),
    )


@pytest.mark.parametrize("case", UPLOADING, ids=lambda case: case.name)
def test_nothing_is_left_of_a_huge_number(case: Case, warned: Warned) -> None:
    strategy = case.strategy(seed=1, fraction_evaluate=0, max_norm="auto")
    fn = attacked_client_fn(client_fn_of(case.client_class), HUGE)
    strategy.start(InProcessGrid(client_app(fn), NUM_CLIENTS), case.initial_arrays(), 3)
    state = {name: array for name, array in arrays_of(strategy.state).items() if array.size}
    assert max(float(np.abs(np.nan_to_num(array)).max()) for array in state.values()) < 1e4
    name = "refused" if sends_changes(case) else "clipped"
    means = strategy.run.record.result.train_metrics_clientapp
    assert all(means[server_round][name] >= 1 for server_round in (1, 2, 3))
    assert all(means[server_round]["norm-bound"] < 1e3 for server_round in (1, 2, 3))
    if name == "refused":
        assert LIAR not in strategy.train_metrics[1]
        assert warned(f"client {LIAR}")
    else:
        assert warned() == []


GUARDED = [
    case
    for case in UPLOADING
    if not (getattr(case.strategy(), "published", False) or isinstance(case.strategy(), FPFC))
]
"""What refuses outliers by default: not the papers' forms, nor FPFC, whose penalty does."""


@pytest.mark.parametrize("case", GUARDED, ids=lambda case: case.name)
def test_a_huge_upload_is_refused_by_default(case: Case, warned: Warned) -> None:
    strategy = case.strategy(seed=1, fraction_evaluate=0)
    fn = attacked_client_fn(client_fn_of(case.client_class), HUGE)
    strategy.start(InProcessGrid(client_app(fn), NUM_CLIENTS), case.initial_arrays(), 3)
    assert strategy.train_metrics[3].keys() == {*range(NUM_CLIENTS)} - {LIAR}
    assert warned(f"client {LIAR}", "bound")


@at_any_pace
def test_a_bound_that_nobody_exceeds_changes_no_bit(case: Case) -> None:
    unbounded, _ = plain(case)
    if case.name == "FPFC-auto":  # which bounds uploads by itself where max_norm is not set
        unbounded = run(case, grid_of(case), strategy=sampling(case, max_norm=1e10))
    strategy = sampling(case, max_norm=1e20)
    strategy.start(grid_of(case), case.initial_arrays(), 3)
    assert_same_bits(arrays_of(strategy.state), arrays_of(unbounded.state))
    assert strategy.train_metrics == unbounded.train_metrics


@pytest.mark.parametrize("name", fast(["FPFC", "FLAME"], ["FPFC", "FedADMM", "FLAME"]))
def test_a_clipped_client_is_sent_what_was_taken_of_its_upload(name: str) -> None:
    """It keeps what it uploaded, which is not what the server has."""
    case = next(case for case in CASES if case.name == name)
    fn, runs = client_fn_of(case.client_class), []
    for client_fn in (fn, Forgetful(fn)):
        strategy = case.strategy(seed=1, max_norm=1e-3)
        strategy.start(InProcessGrid(client_app(client_fn), 3), case.initial_arrays(), 3)
        runs.append(strategy)
    assert_same_runs(*runs)


class Forgetful:
    """A client_fn whose clients have forgotten everything whenever they are asked."""

    def __init__(self, client_fn: Any) -> None:
        self._client_fn = client_fn

    def __call__(self, context: Context) -> Any:
        for key in list(context.state):
            del context.state[key]
        return self._client_fn(context)


# --- What no algorithm can keep or break ----------------------------------------------------------


def mean_run(num_rounds: int = 6, nodes: int = NUM_CLIENTS, **options: Any) -> Mean:
    strategy = Mean(seed=1, fraction_train=0.5, max_norm="auto", **options.pop("settings", {}))
    fn = attacked_client_fn(client_fn_of(Adding), Attack("gaussian", 0.34, seed=3))
    grid = InProcessGrid(client_app(fn, num_clients=NUM_CLIENTS), nodes)
    strategy.start(grid, CHEAP.initial_arrays(), num_rounds, **options)
    return strategy


def test_the_running_median_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    whole = mean_run()
    assert "base/norms" in whole.state_dict()
    mean_run(3, checkpoint_dir=tmp_path)
    assert_same_runs(mean_run(checkpoint_dir=tmp_path, resume=True), whole)


def test_the_bound_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    mean_run(2, checkpoint_dir=tmp_path)
    for settings in ({"max_norm": None}, {"max_norm": 3.0}):
        strategy = Mean(seed=1, fraction_train=0.5, **settings)
        grid = InProcessGrid(client_app(client_fn_of(Adding)), NUM_CLIENTS)
        rounds = 3 if settings["max_norm"] is None else 4
        strategy.start(grid, CHEAP.initial_arrays(), rounds, checkpoint_dir=tmp_path, resume=True)
        assert strategy.last_round == rounds


def test_packed_clients_are_bounded_alike() -> None:
    assert_same_runs(mean_run(nodes=2), mean_run())


def test_a_client_counts_for_at_most_ten_times_the_median(warned: Warned) -> None:
    class Boasting(FedProxClient):
        def train_size(self) -> int:
            boasts = self.context.node_config["partition-id"] == 0
            return 2**50 if boasts else 10

        def train(self, asked: Any, config: Any) -> Any:
            client = float(self.context.node_config["partition-id"])
            return {n: np.full_like(a, client) for n, a in asked.model.items()}, {"loss": client}

        def test(self, parameters: Any, config: Any) -> Any:
            client = float(self.context.node_config["partition-id"])
            return client, self.train_size(), {}

    class Weighted(Boasting):
        strategy = FedADMM
        instruction = FedADMMInstruction

        def train(self, asked: Any, config: Any) -> Any:
            return asked.anchor, {}

    def run(client: Any, strategy: Any) -> Any:
        strategy.start(InProcessGrid(client_app(client_fn_of(client)), 3), initial_arrays(), 1)
        return strategy

    # Ten times the median, 10: (0 * 100 + 1 * 10 + 2 * 10)/120.
    strategy = run(Boasting, FedProx(seed=1))
    bias = strategy.global_arrays["head.bias"].numpy()[0]
    assert bias == pytest.approx(0.25, abs=1e-6)
    assert strategy.train_metrics[1][0]["num-examples"] == 2**50  # what it said
    assert len(warned("[0]", "examples")) == 1
    by_default = run(Weighted, FedADMM(weights="size")).state.clients.column("alpha")
    np.testing.assert_allclose(by_default, [100 / 120, 10 / 120, 10 / 120])
