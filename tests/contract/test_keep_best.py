"""`KeepBest`: the models of the best round are in its folder, in a resumed run as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from fl_admm_strategies import (
    EarlyStopping,
    KeepBest,
    StatefulStrategy,
    load_models,
)
from fl_admm_strategies.maths.blocks import Arrays
from tests.support.cases import AT_ANY_PACE, CHEAP, Case, grid_of
from tests.support.federation import Mean, assert_same_bits
from tests.support.pace import fast
from tests.support.refusals import refused

SCORES = [5.0, 3.0, 1.0, 4.0, 1.0, 9.0]
"""What `evaluate_fn` says after rounds 0 to 5: round 2 is the best by "min", 5 by "max"."""


def scored(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"score": SCORES[server_round]})


def note(folder: Path) -> tuple[int, float]:
    found = json.loads((folder / "best.json").read_text())
    return found["round"], found["value"]


class Keeper:
    """Notes the models of every round, in ``on_round``."""

    def __init__(self, strategy: StatefulStrategy) -> None:
        self.strategy = strategy
        self.of_round: dict[int, dict[str, Arrays]] = {}

    def __call__(self, server_round: int, metrics: Mapping[str, float]) -> None:
        self.of_round[server_round] = self.strategy.models().named()


def assert_kept(folder: Path, expected: Mapping[str, Arrays]) -> None:
    kept = load_models(folder).named()
    assert kept.keys() == expected.keys()
    for name, model in expected.items():
        assert_same_bits(kept[name], model)


@pytest.mark.parametrize("case", fast(["FPFC", "FedMC-ADMM"], AT_ANY_PACE))
def test_the_models_of_the_best_round_are_kept(case: Case, tmp_path: Path) -> None:
    strategy = case.strategy(seed=1)
    keeper = Keeper(strategy)
    central = {"evaluate_fn": scored} if "global" in strategy.kinds else {}
    metric = "server-score" if central else "loss"
    keep = KeepBest(strategy, tmp_path, metric)
    grid, arrays = grid_of(case), case.initial_arrays()
    if case.name in ("Local", "LpProj", "LpProjADMM"):  # all models are the clients'
        with refused(ValueError, "KeepBest", "collect=True"):
            strategy.start(grid, arrays, 1, on_round=keep, **central)
        return
    strategy.start(grid, arrays, 4, on_round=[keeper, keep], **central)
    server_round, value = note(tmp_path)
    if central:
        assert (server_round, value) == (2, 1.0)
    assert_kept(tmp_path, keeper.of_round[server_round])


@pytest.mark.parametrize("ended_after", [2, 3])
def test_a_resumed_run_goes_on_from_the_best(ended_after: int, tmp_path: Path) -> None:
    def run(num_rounds: int, resume: bool) -> None:
        strategy = Mean()
        strategy.start(
            grid_of(CHEAP),
            CHEAP.initial_arrays(),
            num_rounds,
            evaluate_fn=scored,
            on_round=KeepBest(strategy, tmp_path / "best", "server-score"),
            checkpoint_dir=tmp_path,
            resume=resume,
        )

    run(ended_after, resume=False)
    best = load_models(tmp_path / "best").named()
    run(5, resume=True)
    assert note(tmp_path / "best") == (2, 1.0)  # round 4 has 1.0 as well, which is no better
    assert_kept(tmp_path / "best", best)


def test_a_rule_ends_a_run_by_what_evaluate_fn_returned() -> None:
    rule = EarlyStopping("server-score", patience=2)
    strategy = Mean()
    told: dict[int, Mapping[str, float]] = {}
    strategy.start(
        grid_of(CHEAP),
        CHEAP.initial_arrays(),
        5,
        evaluate_fn=scored,
        stop=rule,
        on_round=told.__setitem__,
    )
    assert (rule.best_round, strategy.last_round) == (2, 4)
    assert [told[r]["server-score"] for r in (1, 2, 3, 4)] == SCORES[1:5]


def test_no_client_can_choose_the_best_round(tmp_path: Path) -> None:
    # Of six clients one reports a loss of -1e9 in round 1: held within the others', it is none.
    def lie(replies: list[Any]) -> list[Any]:
        replies[0].content["metrics"]["loss"] = -1e9
        return replies

    strategy = Mean(fraction_evaluate=0.0)
    grid = grid_of(CHEAP, spoil={1: lie})
    losses: dict[int, float] = {}
    keep = KeepBest(strategy, tmp_path, "train-loss")
    strategy.start(grid, CHEAP.initial_arrays(), 3, on_round=keep)
    for server_round in (1, 2, 3):
        metrics = strategy.run.record.measured(server_round)
        losses[server_round] = strategy.run.for_decisions(server_round, metrics)["train-loss"]
    assert min(losses.values()) > 0
    assert note(tmp_path)[0] == min(losses, key=losses.__getitem__)


def test_a_metric_that_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    strategy = Mean()
    with refused(ValueError, "mode", "most"):
        KeepBest(strategy, tmp_path, "loss", "most")  # type: ignore[arg-type]
    with refused(ValueError, "KeepBest", "acuracy"):
        keep = KeepBest(strategy, tmp_path, "acuracy", "max")
        strategy.start(grid_of(CHEAP), CHEAP.initial_arrays(), 1, on_round=keep)
