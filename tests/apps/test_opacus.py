"""Flower's Opacus example, converted by our guide."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_admm_strategies import StatefulStrategy
from tests.apps.conversions import opacus
from tests.apps.converted import needs_app, run_app
from tests.apps.data import needs_cifar

pytestmark = pytest.mark.slow


@needs_app("opacus")
@needs_cifar
@pytest.mark.skipif(not find_spec("opacus"), reason="opacus is not installed")
@pytest.mark.filterwarnings("ignore")  # Opacus warns of much
def test_opacus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    folder = opacus(tmp_path, samples=600)
    config = {"num-server-rounds": 2, "target-delta": 1e-5, "max-grad-norm": 1.0}
    run_app(folder, "opacus_fl", 3, config, monkeypatch)
    (strategy,) = made
    assert all(sorted(clients) == [0, 1, 2] for clients in strategy.train_metrics.values())
    result = strategy.run.record.result
    for server_round, clients in strategy.train_metrics.items():
        epsilons = [own["epsilon"] for own in clients.values()]
        assert epsilons[1] < epsilons[0]  # which has less noise
        assert result.train_metrics_clientapp[server_round]["max_epsilon"] == max(epsilons)
        found = result.evaluate_metrics_clientapp[server_round]["accuracy"]
        tests = strategy.evaluate_metrics[server_round].values()
        assert found == pytest.approx(sum(own["global-accuracy"] for own in tests) / 3)
