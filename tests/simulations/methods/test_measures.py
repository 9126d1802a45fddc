"""Fairness and clusters, against numbers derived by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simulations.experiments.experiment import RunConfig
from simulations.methods.measures import clustering
from tests.simulations.quick_runs import TINY, last_evaluation, result_of, run


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


CHANGES = (
    "report={ loss-variance = true, metrics = ['f1'] }",
    "baselines={ fedavg = {}, local = {} }",
)


@pytest.mark.slow
def test_every_method_and_baseline_is_measured_alike(tmp_path: Path) -> None:
    folder = run(RunConfig("fedadmm-digits", changes=(*TINY, *CHANGES), out=tmp_path / "run"))
    result = result_of(folder)
    rows = {
        "metrics.jsonl": (result, "global", "one global model"),
        "metrics-fedavg.jsonl": (result["baselines"]["FedAvg"], "global", "one global model"),
        "metrics-local.jsonl": (result["baselines"]["Local"], "personal", "own model"),
    }
    for file, (row, kind, title) in rows.items():
        clients = last_evaluation(folder, file).values()
        cells = row["cells"][title]
        assert cells["loss-variance"] == pytest.approx(np.var([c[f"{kind}-loss"] for c in clients]))
        assert cells["f1"] == pytest.approx(100 * np.mean([c[f"{kind}-f1"] for c in clients]))
