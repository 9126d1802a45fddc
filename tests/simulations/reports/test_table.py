"""What the table of a run shows, and what its file holds."""

import json
from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies.runtime.record import Traffic
from simulations.problems.scores import METRICS, ModelScores, ScoreSummary
from simulations.reports import Result, as_markdown, results_table, write_result
from tests.simulations.quick_runs import strict_json
from tests.support.refusals import names


def make_result(**changes) -> Result:
    """Return what an FPFC run of the first synthetic scenario could have given."""
    fields = {
        "experiment": "synthetic-s1",
        "algorithm": "FPFC",
        "data": "synthetic-s1",
        "metric": METRICS["accuracy"],
        "models": {
            "personal model": ScoreSummary(mean=0.9012, std=0.0345, worst=0.8123, best=0.9876),
            "one global model": ScoreSummary(mean=0.3, std=0.1, worst=0.1, best=0.5),
        },
        "traffic": {0: Traffic(100, 8), 1: Traffic(3000, 2000), 2: Traffic(1000, 2000)},
        "seconds": 492.3,
        "rounds": 2000,
        "engine": "inprocess",
        "seed": 7,
        "published": {
            "LOCAL": {"accuracy": 84.97, "cost": 0},
            "FPFC": {"accuracy": 89.46, "accuracy-std": 4, "num": 4, "ari": 1, "cost": 7.33e7},
        },
        "cells": {
            "personal model": {"cost": 73_261_000},
            "clusters at ν=0.5": {"num": 4, "ari": 1.0},
        },
        "legend": ("Cost: parameters sent, both ways.",),
        "extra": {"cost": 73_261_000, "clustering": [{"nu": 0.5, "num": 4}]},
    }
    return Result(**(fields | changes))


def shown(result: Result) -> tuple[list[list[str]], str]:
    """Return the rows of a result's table, and all of its text."""
    text = as_markdown(results_table(result))
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows, text


def test_result_is_strict_json(tmp_path: Path) -> None:
    models = {"personal model": ScoreSummary(mean=np.nan, std=0.1, worst=0.2, best=np.float64(0.3))}
    write_result(tmp_path / "result.json", make_result(models=models, seed=np.int64(7)))
    got = strict_json((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert got["models"]["personal model"] == {"mean": None, "std": 0.1, "worst": 0.2, "best": 0.3}
    assert got["clustering"] == [{"nu": 0.5, "num": 4}]  # of the algorithm's own fields
    assert got["cells"]["clusters at ν=0.5"] == {"num": 4, "ari": 1.0}
    assert (got["metric"], got["cost"], got["seed"]) == ("accuracy", 73_261_000, 7)
    # The hand-shake counts in the sums but is no round: (3000 + 1000)/2 down, (2000 + 2000)/2 up.
    sums = {"down": 4100, "up": 4008, "down_per_round": 2000, "up_per_round": 2000}
    assert got["traffic"] == sums
    assert json.dumps(got["published"]["FPFC"]) == json.dumps(make_result().published["FPFC"])


def test_the_table_has_the_run_its_comparisons_and_the_published_numbers() -> None:
    ditto = {"one global model": ScoreSummary(0.4, 0, 0, 1)}
    baselines = {
        "Ditto": ModelScores(ditto, {"one global model": {"f1": 37.5}}),
        "Local": ModelScores({"own model": ScoreSummary(0.25, 0.1, 0.1, 0.4)}),
    }
    joined = {"FPFC": ModelScores({"personal model": ScoreSummary(0.6, 0.1, 0.2, np.nan)})}
    rows, text = shown(make_result(baselines=baselines, new_clients=joined))
    columns = ["Acc %", "Std", "Worst 10 %", "Best 10 %", "Num", "ARI", "F1 %", "Cost"]
    assert rows[0][-8:] == columns
    found = {row[0]: [cell.strip() for cell in row[1:]] for row in rows}
    assert found["personal model"] == ["90.12", "3.45", "81.23", "98.76", "", "", "", "73,261,000"]
    assert found["clusters at ν=0.5"][4:6] == ["4", "1.00"]
    one = found["Ditto: one global model"]
    assert one == ["40.00", "0.00", "0.00", "100.00", "", "", "37.50", ""]
    assert found["FPFC: personal model"][:4] == ["60.00", "10.00", "20.00", "NaN"]
    assert found["LOCAL"] == ["84.97", "", "", "", "–", "–", "–", "0"]
    assert found["FPFC"] == ["89.46 ±4", "", "", "", "4.00", "1.00", "–", "73,300,000"]
    heads = ["**This run**", "**For comparison**", "**New clients**", "**Published**"]
    assert [row[0] for row in rows if row[0].startswith("**")] == heads
    assert "2,000 rounds in 0:08:12, engine inprocess, seed 7." in text
    assert names(text, "4.1 kB down", "4.0 kB up", "2.0 kB down", "2.0 kB up", "Data: synthetic-s1")


@pytest.mark.parametrize("key", METRICS)
def test_every_metric_heads_a_table(key: str) -> None:
    rows, text = shown(make_result(metric=METRICS[key], published={}, cells={}))
    assert METRICS[key].header in rows[0]
    assert METRICS[key].legend in text
