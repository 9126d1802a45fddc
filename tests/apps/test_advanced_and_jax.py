"""Flower's advanced PyTorch example and JAX quickstart, converted by our guide."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_admm_strategies import StatefulStrategy
from tests.apps.conversions import advanced_pytorch, quickstart_jax
from tests.apps.converted import needs_app, run_app, swapped
from tests.apps.data import needs_fashion, needs_mnist

pytestmark = pytest.mark.slow

ROUNDS = 6
"""The advanced example halves its step size in round 5."""
CONFIG = {
    "num-server-rounds": ROUNDS,
    "fraction-train": 0.5,
    "fraction-evaluate": 0.5,
    "local-epochs": 1,
    "server-device": "cpu",
}


@needs_app("advanced-pytorch")
@needs_fashion
@pytest.mark.parametrize("method", ["FedADMM", "Ditto"])
def test_advanced_pytorch(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    folder = advanced_pytorch(tmp_path, method, samples=4000)
    server = folder / "pytorch_example" / "server_app.py"
    # At the app's 0.1 with momentum 0.9 a run may collapse, with FedAvg as well.
    server.write_text(swapped(server.read_text(encoding="utf-8"), {"lr=0.1": "lr=0.02"}))
    run_app(folder, "pytorch_example", 8, CONFIG, monkeypatch)
    (strategy,) = made
    assert strategy.settings()["lr"] == 0.01
    assert all(len(clients) == 4 for clients in strategy.train_metrics.values())
    assert (folder / "final_model.pt").is_file()
    (results,) = folder.glob("outputs/*/*/results.json")
    rounds = json.loads(results.read_text(encoding="utf-8"))
    assert [found["round"] for found in rounds] == list(range(1, ROUNDS + 1))
    losses = [found["train_metrics"]["train_loss"] for found in rounds]
    assert losses[-1] < losses[0]
    kind = next(iter(strategy.kinds))
    assert rounds[-1]["evaluate_metrics_clientapp"][f"{kind}-accuracy"] > 0.3
    assert rounds[-1]["evaluate_metrics_serverapp"]["accuracy"] > 0.3
    assert list(results.parent.glob("model_state_acc_*.pth"))


@needs_app("advanced-pytorch")
@needs_fashion
@pytest.mark.parametrize("method", ["FedADMM", "FedAPM"])
def test_advanced_pytorch_without_a_strategy_of_its_own(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    folder = advanced_pytorch(tmp_path, method, samples=4000, own_strategy=False)
    server = folder / "pytorch_example" / "server_app.py"
    lowered = {"0.1 if server_round < 5 else 0.05": "0.02 if server_round < 5 else 0.01"}
    server.write_text(swapped(server.read_text(encoding="utf-8"), lowered))
    run_app(folder, "pytorch_example", 8, CONFIG, monkeypatch)
    (strategy,) = made
    assert (folder / "final_model.pt").is_file()
    (best,) = folder.glob("outputs/*/*/best/best.json")
    kept = json.loads(best.read_text(encoding="utf-8"))
    central = strategy.run.record.result.evaluate_metrics_serverapp
    accuracies = {r: metrics["accuracy"] for r, metrics in central.items() if r > 0}
    assert kept["value"] == max(accuracies.values()) == accuracies[kept["round"]]
    losses = [
        metrics["train_loss"]
        for metrics in strategy.run.record.result.train_metrics_clientapp.values()
    ]
    assert losses[-1] < losses[0]
    kind = next(iter(strategy.kinds))
    found = strategy.run.record.result.evaluate_metrics_clientapp[ROUNDS]
    assert found[f"{kind}-accuracy"] > 0.3


@needs_app("quickstart-jax")
@needs_mnist
@pytest.mark.skipif(not find_spec("flax"), reason="flax is not installed")
def test_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]) -> None:
    folder = quickstart_jax(tmp_path, samples=3000)
    config = {
        "num-server-rounds": 3,
        "learning-rate": 0.1,
        "fraction-evaluate": 0.5,
        "batch-size": 32,
    }
    run_app(folder, "jaxexample", 4, config, monkeypatch)
    (strategy,) = made
    assert all(len(clients) == 2 for clients in strategy.train_metrics.values())
    assert (folder / "final_model.npz").is_file()
    accuracies = [
        [own["global-accuracy"] for own in clients.values()]
        for _, clients in sorted(strategy.evaluate_metrics.items())
    ]
    assert len(accuracies) == 3
    assert min(accuracies[-1]) > 0.5
