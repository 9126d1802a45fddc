"""Figures of the report against hand-derived ones, and what the tables show."""

import json

import numpy as np
import pytest

from fl_admm_strategies.runtime.record import Traffic
from simulations.problems.scores import METRICS, ModelScores, ScoreSummary
from simulations.reports import Result, results_table, write_result
from tests.simulations.screen import row, shown
from tests.support.refusals import names

ACCURACY, RMSE, OBJECTIVE = METRICS["accuracy"], METRICS["rmse"], METRICS["objective"]


def make_result(**changes) -> Result:
    """Return what an FPFC run of the first synthetic scenario could have given."""
    fields = {
        "experiment": "synthetic-s1",
        "algorithm": "FPFC",
        "data": "synthetic-s1",
        "metric": ACCURACY,
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
            "LOCAL": {"acc": 84.97, "cost": 0},
            "FPFC": {"acc": 89.46, "acc_std": 4, "num": 4, "ari": 1, "cost": 7.33e7},
        },
        "cells": {
            "personal model": {"cost": 73_261_000},
            "clusters at ν=0.01": {"num": 28, "ari": 0.82},
            "clusters at ν=0.5": {"num": 4, "ari": 1.0},
        },
        "legend": ("Num: clusters found.", "Cost: parameters sent, both ways."),
        "extra": {"cost": 73_261_000, "clustering": [{"nu": 0.5, "num": 4}]},
    }
    return Result(**(fields | changes))


# --- files ----------------------------------------------------------------------------------------


def strict(text: str):
    """Parse JSON, refusing the NaN and Infinity that Python's parser lets through."""

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_result_is_strict_json(tmp_path):
    models = {"personal model": ScoreSummary(mean=np.nan, std=0.1, worst=0.2, best=np.float64(0.3))}
    write_result(tmp_path / "result.json", make_result(models=models, seed=np.int64(7)))
    got = strict((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert got["models"]["personal model"] == {"mean": None, "std": 0.1, "worst": 0.2, "best": 0.3}
    assert got["clustering"] == [{"nu": 0.5, "num": 4}]  # of the algorithm's own fields
    assert got["cells"]["clusters at ν=0.5"] == {"num": 4, "ari": 1.0}
    assert got["published"]["FPFC"]["acc"] == 89.46
    assert (got["metric"], got["cost"], got["seed"]) == ("accuracy", 73_261_000, 7)
    # The hand-shake counts in the sums but is no round: (3000 + 1000)/2 down, (2000 + 2000)/2 up.
    assert got["traffic"] == {
        "down": 4100,
        "up": 4008,
        "down_per_round": 2000,
        "up_per_round": 2000,
    }
    assert not {"extra", "legend", "note"} & set(got)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100])
def test_results_table_holds_the_numbers(width):
    text = shown(results_table(make_result()), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert row(text, "personal model") == ["90.12", "3.45", "81.23", "98.76", "7.33e7"]
    assert row(text, "clusters at ν=0.01") == ["28", "0.82"]
    assert row(text, "clusters at ν=0.5") == ["4", "1.00"]
    assert row(text, "LOCAL") == ["84.97", "–", "–", "0"]
    assert row(text, "FPFC") == ["89.46", "±4", "4.00", "1.00", "7.33e7"]
    flat = " ".join(text.split())
    assert "2,000 rounds in 0:08:12, engine inprocess, seed 7." in flat
    assert names(flat, "4.1 kB down", "4.0 kB up", "2.0 kB down", "2.0 kB up", "Data: synthetic-s1")
    # Ours first, the published under their own heading.
    places = [flat.index(word) for word in ("This run", "personal model", "Published", "LOCAL")]
    assert places == sorted(places)
    assert "Acc %" in flat


def test_baselines_stand_between_the_run_and_the_published_numbers():
    ditto = {
        "personal model": ScoreSummary(0.5, 0.1, 0.2, 0.8),
        "one global model": ScoreSummary(0.4, 0, 0, 1),
    }
    baselines = {
        "Ditto": ModelScores(ditto, {"one global model": {"f1": 37.5}}),
        "Local": ModelScores({"own model": ScoreSummary(0.25, 0.1, 0.1, 0.4)}),
    }
    joined = {"FPFC": ModelScores({"personal model": ScoreSummary(0.6, 0.1, 0.2, np.nan)})}
    result = make_result(baselines=baselines, new_clients=joined, cells={}, metric=RMSE)
    assert row(shown(results_table(result)), "FPFC: personal model") == [
        "0.60",
        "0.10",
        "0.20",
        "NaN",
    ]
    result = make_result(baselines=baselines, new_clients=joined, cells={})
    text = shown(results_table(result), width=100)
    assert row(text, "Ditto: personal model") == ["50.00", "10.00", "20.00", "80.00"]
    one = row(text, "Ditto: one global model")
    assert one == ["40.00", "0.00", "0.00", "100.00", "37.50"]
    assert row(text, "Local: own model") == ["25.00", "10.00", "10.00", "40.00"]
    sections = ("This run", "Run here", "Ditto: p", "New clients", "FPFC: p", "Published", "LOCAL")
    places = [text.index(word) for word in sections]
    assert places == sorted(places)
