"""Fairness, clusters and the cost of a target, against numbers derived by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fl_admm_strategies.runtime.record import Traffic
from simulations.experiments.experiment import RunConfig
from simulations.methods.measures import clustering, cost_to
from simulations.problems.scores import METRICS, fairness
from tests.simulations.quick_runs import TINY, last_evaluation, result_of, run

ACCURACIES = [
    *(0.91, 0.85, 0.78, 0.96, 0.66, 0.88, 0.93, 0.71, 0.82, 0.90),
    *(0.99, 0.60, 0.87, 0.84, 0.95, 0.77, 0.89, 0.92, 0.80, 0.73),
]


def test_fairness_of_twenty_accuracies() -> None:
    # Sum 16.76, sum of squares 14.2514: variance 14.2514/20 - .838^2, cosine 16.76/sqrt(20 *
    # 14.2514), of which Jain's index is the square.
    found = fairness(ACCURACIES)
    assert found == {
        "variance": pytest.approx(0.010326, abs=1e-8),
        "cosine": pytest.approx(0.9927279547, abs=1e-8),
        "entropy": pytest.approx(2.9881250981, abs=1e-8),
        "jain": pytest.approx(0.9855087921, abs=1e-8),
    }


def of_clusters(labels: Any, malicious: set[int], truth: Any) -> Any:
    problem = SimpleNamespace(
        malicious=malicious, data=SimpleNamespace(true_clusters=None if truth is None else truth)
    )
    # Client 3 never took part: the strategy has no cluster for it.
    return problem, SimpleNamespace(client_ids=[0, 1, 2, 4], clusters=lambda: np.array(labels))


def test_clusters_are_counted_over_the_honest_clients() -> None:
    truth = np.array([0, 0, 1, 1, 1])
    assert clustering(*of_clusters([0, 0, 1, 2], set(), truth))["num"] == 3
    assert clustering(*of_clusters([0, 0, 1, 2], {4}, truth)) == {"num": 2, "ari": 1}
    assert clustering(*of_clusters([0, 0, 1, 2], {4}, None)) == {"num": 2}
    problem, _ = of_clusters([0], set(), None)
    assert clustering(problem, SimpleNamespace()) == {}
    assert clustering(problem, SimpleNamespace(clusters=lambda: None)) == {}


TRAFFIC = {0: Traffic(8, 0), 1: Traffic(40, 40), 2: Traffic(40, 40), 3: Traffic(40, 40)}


@pytest.mark.parametrize(
    ("metric", "target", "means", "expected"),
    [
        ("accuracy", 80.0, {2: 0.85, 3: 0.7}, (2, 42, 168e-6)),  # it need not stay there
        ("accuracy", 80.0, {2: 0.7, 3: 0.8}, (3, 62, 248e-6)),
        ("accuracy", 80.0, {2: 0.7, 3: math.nan}, (None, None, None)),
        ("rmse", 0.8, {2: 0.9, 3: 0.75}, (3, 62, 248e-6)),  # low is good
    ],
)
def test_the_cost_of_a_target(metric: str, target: float, means: Any, expected: Any) -> None:
    found = cost_to(target, METRICS[metric], means, TRAFFIC, itemsize=4)
    assert tuple(found.values()) == pytest.approx(expected)


ASKED = (
    "report={ fairness = ['variance', 'entropy'], target = 1.0, metrics = ['macro-f1'] }",
    "baselines={ fedavg = {}, local = {} }",
)


@pytest.mark.slow
def test_every_method_and_baseline_is_measured_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(RunConfig("fedadmm-digits", changes=(*TINY, *ASKED), out=tmp_path / "run"))
    result = result_of(folder)
    rows = {
        "metrics.jsonl": (result, "global", "one global model"),
        "metrics-fedavg.jsonl": (result["baselines"]["FedAvg"], "global", "one global model"),
        "metrics-local.jsonl": (result["baselines"]["Local"], "personal", "own model"),
    }
    for file, (row, kind, title) in rows.items():
        values = [one[f"{kind}-accuracy"] for one in last_evaluation(folder, file).values()]
        cells = row["cells"][title]
        assert cells["variance"] == pytest.approx(np.var(values))
        assert cells["entropy"] == pytest.approx(fairness(values)["entropy"])
        assert cells["target-rounds"] == 2  # the round that is evaluated
        assert 0 <= cells["macro-f1"] <= 100
        # A softmax of 65 x 10 numbers, both ways, for two of the four clients in each round.
        sent = 0 if row["models"].keys() == {"own model"} else 2 * 2 * 2 * 650
        assert cells["target-cost"] >= sent
        assert cells["target-mb"] == pytest.approx(4e-6 * cells["target-cost"])
    assert "as good as 1, where evaluated" in " ".join(capsys.readouterr().out.split())
    assert result["baselines"]["FedAvg"]["cells"]["one global model"]["target-cost"] == 5200
