"""Figures of the report against hand-derived ones, and what the tables show."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from simulations.report import (
    ClusterCondition,
    ClusteringRow,
    Result,
    Score,
    cluster_conditions,
    clustering_scores,
    communication_cost,
    diagnostics_table,
    plain,
    results_table,
    score,
    write_metrics_line,
    write_result,
)


def shown(renderable, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(renderable)
    return console.file.getvalue()


def row(text: str, label: str) -> list[str]:
    """Return the words of the line that starts with this label, without the label."""
    lines = [line.strip().removeprefix("▸ ") for line in text.splitlines()]
    # The first line is the title, which begins with the algorithm's name.
    (line,) = [line for line in lines[1:] if line == label or line.startswith(f"{label} ")]
    return line[len(label) :].split()


def make_result(**changes) -> Result:
    fields = {
        "experiment": "synthetic-s1",
        "algorithm": "FPFC",
        "metric": "accuracy",
        "models": {
            "personal model": Score(mean=0.9012, std=0.0345, worst=0.8123, best=0.9876),
            "one global model": Score(mean=0.3, std=0.1, worst=0.1, best=0.5),
        },
        "clustering": [ClusteringRow(0.01, 28, 0.82), ClusteringRow(0.5, 4, 1.0)],
        "cost": 73_261_000,
        "seconds": 492.3,
        "rounds": 2000,
        "engine": "inprocess",
        "seed": 7,
        "published": {
            "LOCAL": {"acc": 84.97, "cost": 0},
            "FPFC": {"acc": 89.46, "acc_std": 4, "num": 4, "ari": 1, "cost": 7.33e7},
        },
    }
    return Result(**(fields | changes))


# --- scores ---------------------------------------------------------------------------------------


def test_score_of_accuracies():
    # 0.01, 0.02, ..., 0.20: twenty clients, so the worst tenth are .01, .02, the best .19, .20;
    # the variance of 1..n is (n^2 - 1)/12.
    values = np.random.default_rng(0).permutation(np.arange(1, 21) / 100)
    got = score(values, "accuracy")
    assert got.mean == pytest.approx(0.105)
    assert got.std == pytest.approx(math.sqrt(399 / 12) / 100)
    assert got.worst == pytest.approx(0.015)
    assert got.best == pytest.approx(0.195)


def test_score_of_errors_has_the_worst_at_the_high_end():
    # Eleven clients: a tenth is rounded up to two.
    got = score(np.arange(11.0), "rmse")
    assert (got.worst, got.best) == (9.5, 0.5)


@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_a_worst_one(metric, bad):
    got = score([0.5, bad, 0.5], metric)
    assert math.isnan(got.mean)
    assert math.isnan(got.worst)
    assert got.best == 0.5


def test_score_needs_clients():
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        score([], "accuracy")


# --- clusters -------------------------------------------------------------------------------------


def norms(pairs: dict[tuple[int, int], float], m: int, far: float) -> np.ndarray:
    matrix = np.full((m, m), far)
    np.fill_diagonal(matrix, 0)
    for (i, j), value in pairs.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


def test_clustering_scores_by_hand():
    # Four clients, truth {0,1},{2,3}. ν=0.01: all alone; ν=0.1: {0,1},{2},{3}; ν=0.5: {0,1,2},{3},
    # joined through 1-2 alone (the θ-graph need not be transitive).
    theta = norms({(0, 1): 0.05, (1, 2): 0.3}, 4, far=5.0)
    rows = clustering_scores(theta, [0, 0, 1, 1])
    assert [(r.nu, r.num) for r in rows] == [(0.01, 4), (0.1, 3), (0.5, 2)]
    # ARI = (S - E)/((A + B)/2 - E), S = pairs together in both, A and B pairs together in either,
    # E = A B/6; here A = 2 of the 6 pairs.
    # ν=0.01: S=0, B=0, E=0             -> 0
    # ν=0.1:  S=1, B=1, E=1/3           -> (2/3)/(3/2 - 1/3) = 4/7
    # ν=0.5:  S=1, B=3, E=1             -> 0
    assert [r.ari for r in rows] == pytest.approx([0, 4 / 7, 0])


def test_clustering_scores_of_the_true_clusters():
    theta = norms({(0, 2): 0.0, (1, 3): 0.0}, 4, far=1.0)
    (got,) = clustering_scores(theta, [9, 3, 9, 3], nus=[0.1])
    assert got == ClusteringRow(nu=0.1, num=2, ari=1.0)


def test_clustering_scores_without_truth():
    rows = clustering_scores(np.zeros((3, 3)), None, nus=(0.1,))
    assert rows == [ClusteringRow(nu=0.1, num=1, ari=None)]


def test_clustering_scores_needs_one_truth_per_client():
    with pytest.raises(ValueError, match=r"true_clusters has shape \(2,\).*3 clients"):
        clustering_scores(np.zeros((3, 3)), [0, 1])


# --- cost -----------------------------------------------------------------------------------------


def test_cost_of_the_published_experiments():
    # FPFC table 1: S1 100*610 + 2*30*610*2000, H&BF 8*15 + 2*4*15*100.
    assert communication_cost(100, 610, [30] * 2000) == 73_261_000
    assert communication_cost(8, 15, [4] * 100) == 12_120


def test_cost_counts_each_round_and_the_shared_block():
    # 5 clients; (2 + 3) travels as one vector of 5: 5*5 + 2*(1 + 0 + 4)*5.
    assert communication_cost(5, 2, [1, 0, 4], shared_dim=3) == 75
    assert communication_cost(5, 2, []) == 10
    cost = communication_cost(5, 2, list(np.array([1, 2])))
    assert type(cost) is int


@pytest.mark.parametrize("active", [-1, 6])
def test_cost_refuses_impossible_rounds(active):
    with pytest.raises(ValueError, match=f"round 2 has {active} active clients; expected 0 to 5"):
        communication_cost(5, 2, [5, active])


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_cost_refuses_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        communication_cost(sizes[0], sizes[1], [], shared_dim=sizes[2])


# --- diagnostics ----------------------------------------------------------------------------------


def test_cluster_conditions_by_hand():
    # m=6, λ=0.75: a cluster of 3 holds 0.75*2/6 = 0.25, one of 2 holds 0.125, one alone nothing.
    checks = cluster_conditions([0, 1, 1, 1, 2, 2], [0.3, 0.1, 0.25, 0.15, 0.05, 0.13], 0.75)
    three, two, one = checks
    assert (three.size, three.largest_gradient, three.holds) == (3, 0.25, True)
    assert three.allowed == pytest.approx(0.25)
    assert (two.size, two.largest_gradient, two.holds) == (2, 0.13, False)
    assert two.allowed == pytest.approx(0.125)
    # λ(2-1)/6 = 0.13 at λ = 0.78.
    assert two.lam_needed == pytest.approx(0.78)
    assert (one.size, one.allowed, one.holds) == (1, 0.0, True)
    assert math.isnan(one.lam_needed)


def test_a_cluster_whose_gradient_is_not_finite_does_not_hold():
    (check,) = cluster_conditions([0, 0], [0.1, np.nan], 1.0)
    assert isinstance(check, ClusterCondition)
    assert not check.holds


def test_cluster_conditions_needs_one_gradient_per_client():
    with pytest.raises(ValueError, match=r"gradient_norms has shape \(3,\); labels has 2"):
        cluster_conditions([0, 0], [1.0, 2.0, 3.0], 1.0)


def diagnose(labels, gradients, *, clustering, lam=0.6, width=80) -> str:
    labels = np.asarray(labels)
    theta = np.where(labels[:, None] == labels[None, :], 0.001, 4.0)
    np.fill_diagonal(theta, 0)
    return shown(
        diagnostics_table(
            labels,
            theta,
            gradients,
            lam=lam,
            stationarity=3.2e-4,
            consensus=1.5e-5,
            clustering=clustering,
        ),
        width,
    )


def test_diagnostics_say_which_cluster_fails_and_what_it_takes():
    text = diagnose(
        [0, 1, 1, 1, 2, 2],
        [0.3, 0.1, 0.25, 0.15, 0.05, 0.13],
        lam=0.75,
        clustering=[ClusteringRow(0.01, 3, None), ClusteringRow(0.5, 3, None)],
    )
    assert row(text, "1") == ["3", "0.25", "0.25", "0.75", "holds"]
    assert " ".join(row(text, "2")) == "2 0.13 0.125 0.78 λ too small for this cluster"
    assert row(text, "alone") == ["1", "nothing", "to", "hold"]
    # Pairs in one cluster: 3 + 1, in two: 15 - 4.
    assert row(text, "in one cluster") == ["4"] + ["0.001"] * 5
    assert row(text, "in two clusters") == ["11"] + ["4"] * 5
    flat = " ".join(text.split())
    assert "does not depend on the threshold: 3 at ν=0.01, 3 at ν=0.5" in flat
    assert "λ=0.75 is too small for 1 of the found clusters" in flat
    assert "it takes λ of 0.78 or more" in flat
    assert "0.00032" in flat
    assert "1.5e-05" in flat


def test_diagnostics_say_that_all_is_well_or_that_nothing_fused():
    rows = [ClusteringRow(0.01, 3, None), ClusteringRow(0.5, 1, None)]
    well = " ".join(diagnose([0, 0, 0], [0.1, 0.1, 0.1], clustering=rows).split())
    assert "large enough to hold every found cluster" in well
    assert "depends on the threshold (3 at ν=0.01, 1 at ν=0.5)" in well
    alone = " ".join(diagnose([0, 1, 2], [0.1, 0.1, 0.1], clustering=[]).split())
    assert "Every client is alone: at λ=0.6" in alone
    assert "threshold" not in alone


def test_diagnostics_of_many_clusters_stay_short():
    labels = np.concatenate([np.repeat(np.arange(20), 2), np.arange(20, 120)])
    text = diagnose(labels, np.full(140, 0.5), clustering=[])
    # Twelve of the twenty pairs are listed, then 8 more of 2 clients each, then the 100 alone.
    assert row(text, "12")[0] == "2"
    assert " ".join(row(text, "8 more")) == "16 λ too small for 8 of them"
    assert row(text, "alone")[0] == "100"
    assert len(text.splitlines()) < 50


def test_diagnostics_need_a_norm_for_every_pair():
    with pytest.raises(ValueError, match=r"theta_norms has shape \(3, 3\); labels has 2"):
        diagnostics_table(
            [0, 1], np.zeros((3, 3)), [1, 1], lam=1, stationarity=0, consensus=0, clustering=[]
        )


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
    assert got["clustering"][1] == {"nu": 0.5, "num": 4, "ari": 1.0}
    assert got["published"]["FPFC"]["acc"] == 89.46
    assert (got["cost"], got["seed"], got["shared_dim"]) == (73_261_000, 7, 0)


def test_plain_keeps_kinds_apart():
    assert plain(np.bool_(True)) is True
    assert plain((1, Path("a/b"), None)) == [1, "a/b", None]
    with pytest.raises(TypeError, match="cannot write a object"):
        plain({"x": object()})


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100])
def test_results_table_holds_the_numbers(width):
    text = shown(results_table(make_result()), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
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
        metric="rmse",
        models={"cluster model": Score(mean=4.094, std=0.5, worst=np.nan, best=3.0)},
        clustering=[ClusteringRow(0.1, 2, None)],
        cost=12_120,
        seconds=4.21,
        published={"CFL": {"rmse": 4.68, "rmse_std": 0.41, "num": 1.33, "ari": 0.15}},
        shared_dim=2572,
    )
    text = shown(results_table(result))
    assert row(text, "cluster model") == ["4.09", "0.50", "NaN", "3.00", "12,120"]
    assert row(text, "clusters at ν=0.1") == ["2", "–"]
    assert row(text, "CFL") == ["4.68", "±0.41", "1.33", "0.15", "–"]
    flat = " ".join(text.split())
    assert "in 4.2 s" in flat
    assert "truth unknown" in flat
    assert "shared block of 2,572 included" in flat
    assert "RMSE" in flat
    assert "Acc" not in flat


def test_results_table_without_clusters_or_published_numbers():
    text = shown(results_table(make_result(clustering=[], published={}, seconds=7265)))
    assert "Published" not in text
    assert "ν" not in text
    assert "2 h 1 min" in text


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
        ({"metric": "loss"}, "metric is 'loss'; use 'accuracy' or 'rmse'"),
        ({"published": {"FPFC": {"accuracy": 0.9}}}, r"'FPFC' has \['accuracy'\].*'acc'"),
        ({"metric": "rmse"}, r"'LOCAL' has \['acc'\].*'rmse'"),
    ],
)
def test_result_refuses_what_it_cannot_show(changes, message):
    with pytest.raises(ValueError, match=message):
        make_result(**changes)
