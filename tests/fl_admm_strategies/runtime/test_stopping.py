"""`EarlyStopping`, a ready rule."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

import fl_admm_strategies
from fl_admm_strategies import EarlyStopping
from tests.support.cases import case_of, grid_of
from tests.support.refusals import refused


def test_it_stops_after_so_many_evaluations_without_an_improvement() -> None:
    rule = EarlyStopping("accuracy", mode="max", patience=2, min_delta=0.1)
    values = [0.5, 0.55, 0.65, math.nan, 0.7]
    assert [rule(r, {"accuracy": value}) for r, value in enumerate(values, 1)] == [
        *(False, False, False, False),
        True,  # 0.7 is not 0.1 more than 0.65
    ]


def test_rounds_without_an_evaluation_do_not_count() -> None:
    rule = EarlyStopping("loss", patience=1)
    assert not rule(1, {"train-loss": 9.0})
    assert not rule(2, {"train-loss": 9.0, "loss": 1.0})
    assert not rule(3, {"train-loss": 9.0})
    assert rule(4, {"train-loss": 9.0, "loss": 1.0})


@pytest.mark.parametrize("metrics", [{"loss": 1.0}, {"loss": 1.0, "train-acuracy": 0.5}])
def test_a_metric_that_is_not_there_is_refused(metrics: dict[str, float]) -> None:
    with refused(ValueError, "accuracy", "loss"):
        EarlyStopping("accuracy")(1, metrics)


def test_a_run_ends_by_it() -> None:
    case = case_of("FedAvg")
    strategy, rule = case.strategy(seed=1), EarlyStopping("loss", patience=1, min_delta=100.0)
    strategy.start(grid_of(case), case.initial_arrays(), 9, stop=rule)
    assert strategy.last_round == 2


def test_the_version_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert fl_admm_strategies.__version__ == tomllib.loads(text)["project"]["version"]
