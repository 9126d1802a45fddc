"""Flower's advanced PyTorch example, JAX quickstart and Opacus example, by docs/own-client.md."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_admm_strategies import StatefulStrategy
from tests.apps.converted import block, copy_of, needs_app, patched, run_app, swapped

pytestmark = pytest.mark.slow

ADVANCED = "advanced-pytorch/pytorch_example"
CONFIG = {
    "num-server-rounds": 6,  # the advanced example halves its step size in round 5
    "fraction-train": 0.5,
    "fraction-evaluate": 0.5,
    "local-epochs": 1,
    "server-device": "cpu",
}
WANDB = """
import sys

run = sys.modules[__name__]
def init(**options): ...
def log(metrics, step): ...
"""


def rewrite(file: Path, change: str) -> None:
    """Change a file as a diff of the guide says."""
    file.write_text(patched(file.read_text(encoding="utf-8"), change), encoding="utf-8")


def stand_in(file: Path, name: str) -> None:
    """Have an app's module take a function from here."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(f"\nfrom tests.apps.data import {name}\n")


def advanced_pytorch(to: Path, method: str, steps: dict[str, str], own_strategy: bool) -> Path:
    """Convert the advanced example by the guide: with the app's own strategy, or without."""
    folder = copy_of("advanced-pytorch", to)
    (folder / "wandb.py").write_text(WANDB, encoding="utf-8")
    task, server, strategy, client = (
        folder / "pytorch_example" / f"{name}.py"
        for name in ("task", "server_app", "strategy", "client_app")
    )
    rewrite(task, block(f"app: {ADVANCED}/task.py"))
    # Flower 1.41 has no such name there; the app's is 1.27.
    typing = {"from flwr.common.typing import UserConfig": "UserConfig = dict"}
    task.write_text(swapped(task.read_text(encoding="utf-8"), typing), encoding="utf-8")
    stand_in(task, "fashion_loaders as load_data")
    own = swapped(block(f"app: {ADVANCED}/client_app.py"), {"FedADMMClient": f"{method}Client"})
    client.write_text(own, encoding="utf-8")
    rewrite(server, block(f"{'app' if own_strategy else 'plain'}: {ADVANCED}/server_app.py"))
    if own_strategy:
        rewrite(strategy, block(f"app: {ADVANCED}/strategy.py"))
        text = swapped(strategy.read_text(encoding="utf-8"), {"FedADMM": method})
        strategy.write_text(text, encoding="utf-8")
    else:
        strategy.unlink()
    server.write_text(swapped(server.read_text(encoding="utf-8"), steps), encoding="utf-8")
    stand_in(server, "Hub as load_dataset")
    return folder


@needs_app("advanced-pytorch")
@pytest.mark.parametrize("method", ["FedADMM", "Ditto"])
def test_advanced_pytorch(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    # At the app's 0.1 with momentum 0.9 a run may collapse, with FedAvg as well.
    folder = advanced_pytorch(tmp_path, method, {"lr=0.1": "lr=0.02"}, own_strategy=True)
    run_app(folder, "pytorch_example", 8, CONFIG, monkeypatch)
    (strategy,) = made
    assert strategy.settings()["lr"] == 0.01
    assert all(len(clients) == 4 for clients in strategy.train_metrics.values())
    assert (folder / "final_model.pt").is_file()
    (results,) = folder.glob("outputs/*/*/results.json")
    rounds = json.loads(results.read_text(encoding="utf-8"))
    assert [found["round"] for found in rounds] == list(range(1, 7))
    assert rounds[-1]["evaluate_metrics_serverapp"]["accuracy"] > 0.3
    assert list(results.parent.glob("model_state_acc_*.pth"))


@needs_app("advanced-pytorch")
def test_advanced_pytorch_without_a_strategy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    lowered = {"0.1 if server_round < 5 else 0.05": "0.02 if server_round < 5 else 0.01"}
    folder = advanced_pytorch(tmp_path, "FedADMM", lowered, own_strategy=False)
    run_app(folder, "pytorch_example", 8, CONFIG, monkeypatch)
    (strategy,) = made
    assert (folder / "final_model.pt").is_file()
    (best,) = folder.glob("outputs/*/*/best/best.json")
    kept = json.loads(best.read_text(encoding="utf-8"))
    result = strategy.run.record.result
    central = result.evaluate_metrics_serverapp
    accuracies = {r: metrics["accuracy"] for r, metrics in central.items() if r > 0}
    assert kept["value"] == max(accuracies.values()) == accuracies[kept["round"]]
    losses = [metrics["train_loss"] for metrics in result.train_metrics_clientapp.values()]
    assert losses[-1] < losses[0]


@needs_app("quickstart-jax")
@pytest.mark.skipif(not find_spec("flax"), reason="flax is not installed")
def test_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]) -> None:
    app = "quickstart-jax/jaxexample"
    package = copy_of("quickstart-jax", tmp_path) / "jaxexample"
    for name in ("task", "server_app"):
        rewrite(package / f"{name}.py", block(f"app: {app}/{name}.py"))
    (package / "client_app.py").write_text(block(f"app: {app}/client_app.py"), encoding="utf-8")
    stand_in(package / "task.py", "jax_batches as load_data")
    config = {"num-server-rounds": 3, "learning-rate": 0.1, "fraction-evaluate": 0.5}
    run_app(package.parent, "jaxexample", 4, config | {"batch-size": 32}, monkeypatch)
    (strategy,) = made
    assert all(len(clients) == 2 for clients in strategy.train_metrics.values())
    assert (package.parent / "final_model.npz").is_file()
    last = strategy.evaluate_metrics[3].values()
    assert min(own["global-accuracy"] for own in last) > 0.5


@needs_app("opacus")
@pytest.mark.skipif(not find_spec("opacus"), reason="opacus is not installed")
@pytest.mark.filterwarnings("ignore")  # Opacus warns of much
def test_opacus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StatefulStrategy]
) -> None:
    package = copy_of("opacus", tmp_path) / "opacus_fl"
    rewrite(package / "server_app.py", block("app: opacus/opacus_fl/server_app.py"))
    client = block("app: opacus/opacus_fl/client_app.py")
    (package / "client_app.py").write_text(client, encoding="utf-8")
    stand_in(package / "task.py", "cifar_loaders as load_data")
    config = {"num-server-rounds": 2, "target-delta": 1e-5, "max-grad-norm": 1.0}
    run_app(package.parent, "opacus_fl", 3, config, monkeypatch)
    (strategy,) = made
    result = strategy.run.record.result
    for server_round, clients in strategy.train_metrics.items():
        epsilons = [clients[client]["epsilon"] for client in (0, 1, 2)]
        assert epsilons[1] < epsilons[0]  # which has less noise
        assert result.train_metrics_clientapp[server_round]["max_epsilon"] == max(epsilons)
        found = result.evaluate_metrics_clientapp[server_round]["accuracy"]
        tests = strategy.evaluate_metrics[server_round].values()
        assert found == pytest.approx(sum(own["global-accuracy"] for own in tests) / 3)
