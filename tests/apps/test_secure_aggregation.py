"""Flower's SecAgg+ example, converted by our guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_admm_strategies import StatefulStrategy
from tests.apps.conversions import secure_aggregation
from tests.apps.converted import needs_app, run_app
from tests.apps.data import needs_cifar

pytestmark = pytest.mark.slow

CONFIG = {
    "num-server-rounds": 2,
    "fraction-evaluate": 1.0,
    "local-epochs": 1,
    "learning-rate": 0.1,
    "batch-size": 32,
    "num-shares": 3,
    "reconstruction-threshold": 2,
    "max-weight": 9000,
    "timeout": 15.0,
    "is-demo": False,
}


@needs_app("flower-secure-aggregation")
@needs_cifar
def test_secure_aggregation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    folder = secure_aggregation(tmp_path, "FedADMM", samples=500)
    run_app(folder, "secaggexample", 5, CONFIG, monkeypatch)
    (strategy,) = made
    everybody = {server_round: [0, 1, 2, 3, 4] for server_round in (1, 2)}
    assert {r: sorted(c) for r, c in strategy.train_metrics.items()} == everybody
    found = strategy.run.record.result.evaluate_metrics_clientapp[2]["accuracy"]
    tests = strategy.evaluate_metrics[2].values()
    assert found == pytest.approx(sum(own["global-accuracy"] for own in tests) / 5)
