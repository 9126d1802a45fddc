"""`keep_best`: the model of the best round lies in ``best/``, in a resumed run as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from fl_admm_strategies import (
    EarlyStopping,
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
    found = json.loads((folder / "best" / "best.json").read_text())
    return found["round"], found["value"]


class Keeper:
    """Notes the models of every round, in ``on_round``."""

    def __init__(self, strategy: StatefulStrategy) -> None:
        self.strategy = strategy
        self.of_round: dict[int, dict[str, Arrays]] = {}

    def __call__(self, server_round: int, metrics: Mapping[str, float]) -> None:
        self.of_round[server_round] = self.strategy.models().named()


def assert_kept(folder: Path, expected: Mapping[str, Arrays]) -> None:
    kept = load_models(folder / "best").named()
    assert kept.keys() == expected.keys()
    for name, model in expected.items():
        assert_same_bits(kept[name], model)


@pytest.mark.parametrize("case", fast(["FPFC", "FedMC-ADMM"], AT_ANY_PACE))
def test_the_models_of_the_best_round_are_kept(case: Case, tmp_path: Path) -> None:
    strategy = case.strategy(seed=1)
    keeper = Keeper(strategy)
    central = {"evaluate_fn": scored} if "global" in strategy.kinds else {}
    metric = "server-score" if central else "loss"
    options: Any = {"keep_best": (metric, "min"), "checkpoint_dir": tmp_path, **central}
    grid, arrays = grid_of(case), case.initial_arrays()
    if case.name in ("Local", "LpProj", "LpProjADMM"):  # all models are the clients'
        with refused(ValueError, "keep_best", "collect=True"):
            strategy.start(grid, arrays, 1, **options)
        return
    strategy.start(grid, arrays, 4, on_round=keeper, **options)
    server_round, value = note(tmp_path)
    if central:
        assert (server_round, value) == (2, 1.0)
    assert_kept(tmp_path, keeper.of_round[server_round])


@pytest.mark.parametrize(
    ("how", "ended_after"), [("killed before best/", 2), ("damaged", 2), ("ended", 2), ("ended", 3)]
)
def test_a_resumed_run_goes_on_from_the_best(how: str, ended_after: int, tmp_path: Path) -> None:
    options: Any = {
        "evaluate_fn": scored,
        "keep_best": ("server-score", "min"),
        "checkpoint_dir": tmp_path,
    }
    Mean().start(grid_of(CHEAP), CHEAP.initial_arrays(), ended_after, **options)
    best = load_models(tmp_path / "best").named()
    if how != "ended":  # round 2 is saved, and its best/ is not whole
        (tmp_path / "best" / "best.json").unlink()
        if how == "damaged":
            (tmp_path / "best" / "global.safetensors").write_bytes(b"")
    Mean().start(grid_of(CHEAP), CHEAP.initial_arrays(), 5, resume=True, **options)
    assert note(tmp_path) == (2, 1.0)  # round 4 has 1.0 as well, which is no better
    assert_kept(tmp_path, best)


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
    by: Any = ("train-loss", "min")
    strategy.start(grid, CHEAP.initial_arrays(), 3, keep_best=by, checkpoint_dir=tmp_path)
    for server_round in (1, 2, 3):
        metrics = strategy.run.record.measured(server_round)
        losses[server_round] = strategy.run.for_decisions(server_round, metrics)["train-loss"]
    assert min(losses.values()) > 0
    assert note(tmp_path)[0] == min(losses, key=losses.__getitem__)


def test_what_cannot_be_kept_is_refused_before_the_run(tmp_path: Path) -> None:
    grid, arrays, strategy = grid_of(CHEAP), CHEAP.initial_arrays(), Mean()
    with refused(ValueError, "keep_best", "checkpoint_dir"):
        strategy.start(grid, arrays, 1, keep_best=("loss", "min"))
    wrong: Any
    for wrong in ("loss", ("loss",)):
        with refused(ValueError, "keep_best", wrong):
            strategy.start(grid, arrays, 1, keep_best=wrong, checkpoint_dir=tmp_path)
    with refused(ValueError, "mode", "most"):
        strategy.start(grid, arrays, 1, keep_best=("loss", "most"), checkpoint_dir=tmp_path)  # type: ignore[arg-type]
    with refused(ValueError, "keep_best", "acuracy"):
        strategy.start(grid, arrays, 1, keep_best=("acuracy", "max"), checkpoint_dir=tmp_path)
