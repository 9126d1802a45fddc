"""Figures of the report against hand-derived ones, and what the tables show."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fl_admm_strategies.runtime.record import Traffic
from simulations.problems.scores import METRICS, ModelScores, Score
from simulations.reports import Result, plain, results_table, write_metrics_line, write_result
from tests.simulations.screen import row, shown

ACCURACY, RMSE, OBJECTIVE = METRICS["accuracy"], METRICS["rmse"], METRICS["objective"]


def make_result(**changes) -> Result:
    """Return what an FPFC run of the first synthetic scenario could have given."""
    fields = {
        "experiment": "synthetic-s1",
        "algorithm": "FPFC",
        "data": "synthetic-s1",
        "metric": ACCURACY,
        "models": {
            "personal model": Score(mean=0.9012, std=0.0345, worst=0.8123, best=0.9876),
            "one global model": Score(mean=0.3, std=0.1, worst=0.1, best=0.5),
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
        "note": "73,261,000 parameters sent",
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


def test_metrics_lines_are_strict_json_and_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for k in (1, 2):
            write_metrics_line(
                file,
                {
                    "round": np.int64(k),
                    "train": {"loss": float("nan")},
                    "evaluate": {"accuracy": np.float32(0.5), "worst": -np.inf},
                    "clients": {3: {"accuracy": np.array([0.25, np.inf])}},
                },
            )
            lines = path.read_text().splitlines()  # read while the file is still open
            assert len(lines) == k
            assert strict(lines[-1]) == {
                "round": k,
                "train": {"loss": None},
                "evaluate": {"accuracy": 0.5, "worst": None},
                "clients": {"3": {"accuracy": [0.25, None]}},
            }


def test_result_is_strict_json(tmp_path):
    models = {"personal model": Score(mean=np.nan, std=0.1, worst=0.2, best=np.float64(0.3))}
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


def test_plain_keeps_kinds_apart():
    assert plain(np.bool_(True)) is True
    assert plain((1, Path("a/b"), None)) == [1, "a/b", None]
    with pytest.raises(TypeError, match="cannot write a object"):
        plain({"x": object()})


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
    assert "2,000 rounds in 8 min 12 s, engine inprocess, seed 7; 73,261,000 parameters" in flat
    # Ours first, the published under their own heading.
    places = [flat.index(word) for word in ("This run", "personal model", "Published", "LOCAL")]
    assert places == sorted(places)
    assert "Acc %" in flat


def test_results_table_of_errors():
    result = make_result(
        metric=RMSE,
        models={"cluster model": Score(mean=4.094, std=0.5, worst=np.nan, best=3.0)},
        cells={"cluster model": {"cost": 12_120}, "clusters at ν=0.1": {"num": 2, "ari": None}},
        seconds=4.21,
        published={"CFL": {"rmse": 4.68, "rmse_std": 0.41, "num": 1.33, "ari": 0.15}},
    )
    text = shown(results_table(result))
    assert row(text, "cluster model") == ["4.09", "0.50", "NaN", "3.00", "12,120"]
    assert row(text, "clusters at ν=0.1") == ["2", "–"]
    assert row(text, "CFL") == ["4.68", "±0.41", "1.33", "0.15", "–"]
    flat = " ".join(text.split())
    assert "in 4.2 s" in flat
    assert "RMSE" in flat
    assert "Acc" not in flat


def test_results_table_of_one_number_for_the_whole_federation():
    # FedGiA, Table III: an objective, rounds of communication and seconds; nothing per client.
    result = make_result(
        algorithm="FedGiA_D",
        metric=OBJECTIVE,
        models={"x": Score(mean=0.24125)},
        cells={"x": {"cr": 25, "time": 0.512}},
        published={
            "FedGiA_D": {"objective": 0.236, "cr": 19.9, "time": 0.44},
            "FedAvg": {"objective": 0.26, "cr": 1000},
        },
        legend=(),
    )
    text = shown(results_table(result))
    assert row(text, "x") == ["0.2412", "25", "0.51"]
    assert row(text, "FedGiA_D") == ["0.2360", "19.9", "0.44"]
    assert row(text, "FedAvg") == ["0.2600", "1000.0", "–"]
    for absent in ("Std", "Worst", "Num", "ARI", "Cost", "over the clients"):
        assert absent not in text


def test_baselines_stand_between_the_run_and_the_published_numbers():
    ditto = {"personal model": Score(0.5, 0.1, 0.2, 0.8), "one global model": Score(0.4, 0, 0, 1)}
    baselines = {
        "Ditto": ModelScores(ditto, {"one global model": {"f1": 37.5}}),
        "Local": ModelScores({"own model": Score(0.25, 0.1, 0.1, 0.4)}),
    }
    text = shown(results_table(make_result(baselines=baselines, cells={})), width=100)
    assert row(text, "Ditto: personal model") == ["50.00", "10.00", "20.00", "80.00"]
    one = row(text, "Ditto: one global model")
    assert one == ["40.00", "0.00", "0.00", "100.00", "37.50"]
    assert row(text, "Local: own model") == ["25.00", "10.00", "10.00", "40.00"]
    places = [text.index(w) for w in ("This run", "Run here", "Ditto: p", "Published", "LOCAL")]
    assert places == sorted(places)
    assert "same data, start, seed, rounds and share of" in " ".join(text.split())


def test_new_clients_are_no_baselines():
    joined = {
        "FPFC": ModelScores({"personal model": Score(0.5, 0.1, 0.2, 0.8)}),
        "Local": ModelScores({"own model": Score(0.25, 0.1, 0.1, 0.4)}),
    }
    text = shown(results_table(make_result(new_clients=joined, cells={})), width=100)
    assert row(text, "FPFC: personal model") == ["50.00", "10.00", "20.00", "80.00"]
    assert row(text, "Local: own model") == ["25.00", "10.00", "10.00", "40.00"]
    places = [text.index(word) for word in ("This run", "New clients", "FPFC: p", "Published")]
    assert places == sorted(places)
    assert "Run here for comparison" not in text


def test_a_table_of_three_shares_fits_the_terminal():
    # FedAPM, Table 3: accuracy, F1 and AUC, each with a deviation.
    result = make_result(
        models={"personal model": Score(0.7, 0.1, 0.5, 0.9)},
        cells={"personal model": {"f1": 68.123, "auc": 87.1}},
        published={
            "FedAPM": {"acc": 73.8, "acc_std": 0.5, "f1": 72.5, "f1_std": 0.5, "auc": 87.3},
        },
    )
    text = shown(results_table(result))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert row(text, "personal model") == ["70.00", "10.00", "50.00", "90.00", "68.12", "87.10"]
    assert row(text, "FedAPM") == ["73.80", "±0.5", "72.50", "±0.5", "87.30"]


def test_bytes_are_shown_in_all_and_by_round():
    flat = " ".join(shown(results_table(make_result())).split())
    assert "Arrays sent: 4.1 kB down, 4.01 kB up; a round 2 kB down, 2 kB up." in flat


def test_results_table_without_rows_of_its_own_or_published_numbers():
    text = shown(
        results_table(make_result(cells={}, published={}, note="", legend=(), seconds=7265))
    )
    for absent in ("Published", "ν", "Num", "Cost", "Run here"):
        assert absent not in text
    assert "2 h 1 min, engine inprocess, seed 7." in " ".join(text.split())


def test_brackets_in_a_name_are_shown():
    text = shown(results_table(make_result(experiment="s1 [dim]", published={"IFCA [17]": {}})))
    assert "s1 [dim]" in text
    assert row(text, "IFCA [17]") == ["–"] * 4


def test_published_numbers_are_never_styled_as_ours():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(results_table(make_result()))
    lines = console.file.getvalue().splitlines()
    styles = {
        name: next(line for line in lines if name in line).split("m")[0]
        for name in ("personal model", "84.97", "89.46")
    }
    assert styles["personal model"] not in (styles["84.97"], styles["89.46"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": {"x": {"f2": 1.0}}}, "row 'x' has f2, expected some of num, ari"),
        (
            {"published": {"FPFC": {"accuracy": 0.9}}},
            "published.FPFC has accuracy, expected some of acc, ",
        ),
        ({"metric": RMSE}, "published.LOCAL has acc, expected .* for the metric 'rmse'"),
    ],
)
def test_result_refuses_what_it_cannot_show(changes, message):
    with pytest.raises(ValueError, match=message):
        make_result(**changes)


def test_a_stand_in_for_a_data_set_is_called_one():
    result = make_result(data="cifar10 (lossy stand-in)")
    assert "Data: cifar10 (lossy stand-in)." in " ".join(shown(results_table(result)).split())
