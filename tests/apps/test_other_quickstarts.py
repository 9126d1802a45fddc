"""Flower's scikit-learn, Lightning and Hugging Face quickstarts, converted by our guide."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fl_admm_strategies import StatefulStrategy
from tests.apps.converted import block, copy_of, needs_app, patched, run_app, swapped

pytestmark = pytest.mark.slow

FEDAVG = {"from flwr.serverapp.strategy import FedAvg": "from fl_admm_strategies import *"}


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def trained(strategy: StatefulStrategy, name: str = "loss") -> list[float]:
    """Return the mean of a training metric in every round; all clients must have replied."""
    rounds = sorted(strategy.train_metrics.items())
    assert all(sorted(clients) == strategy.client_ids for _, clients in rounds)
    return [
        float(np.mean([own.get(name, 0.0) for own in clients.values()])) for _, clients in rounds
    ]


def losses(strategy: StatefulStrategy, name: str) -> list[float]:
    """Return the mean of a test metric after every round."""
    rounds = sorted(strategy.evaluate_metrics.items())
    return [float(np.mean([own[name] for own in clients.values()])) for _, clients in rounds]


# The app's own: scikit-learn has other words for this argument now.
@pytest.mark.filterwarnings("ignore:.*penalty.*:FutureWarning")
@needs_app("quickstart-sklearn")
def test_scikit_learn(tmp_path, monkeypatch, made):
    folder = copy_of("quickstart-sklearn", tmp_path)
    task, server, client = (
        folder / "sklearnexample" / f"{name}.py" for name in ("task", "server_app", "client_app")
    )
    with task.open("a") as file:
        file.write("\nfrom tests.apps.data import irises as load_data\n")
    text = block("example: numpy") + block("app: quickstart-sklearn/sklearnexample/client_app.py")
    write(client, text)
    ours = {"FedAvg(": "FedADMM(lr=0.2, local_epochs=10, "}
    write(server, swapped(server.read_text(), FEDAVG | ours))
    config = {"penalty": "l2", "num-server-rounds": 25}
    run_app(folder, "sklearnexample", 3, config, monkeypatch)
    (strategy,) = made
    found = losses(strategy, "global-loss")
    assert found[-1] < found[0]
    assert losses(strategy, "global-accuracy")[-1] > 0.8


METHODS = {
    "FPFC": "L1(0.001), rho=0.01, lr=0.001, ",
    "FedADMM": "lr=0.001, ",
    "FedAPM": "lr=0.001, ",
}
"""What a constructor takes beside the app's settings; of FedAPM the app's own personal layers."""


def converted(app: str, package: str, method: str, to: Path, personal: str) -> Path:
    """Convert an app, whose guide is written for FedADMM, to a method."""
    folder = copy_of(app, to)
    client, server = (folder / package / f"{name}_app.py" for name in ("client", "server"))
    text = block(f"app: {app}/{package}/client_app.py")
    write(client, swapped(text, {"FedADMMClient": f"{method}Client"}))
    first = (f'"{personal}", ' if method == "FedAPM" else "") + METHODS[method]
    write(server, swapped(server.read_text(), FEDAVG | {"FedAvg(": f"{method}({first}"}))
    return folder


@needs_app("quickstart-pytorch-lightning")
@pytest.mark.skipif(not find_spec("pytorch_lightning"), reason="pytorch-lightning is not installed")
@pytest.mark.filterwarnings("ignore")  # Lightning's hints
@pytest.mark.parametrize("method", METHODS)
def test_lightning(method, tmp_path, monkeypatch, made):
    app, package = "quickstart-pytorch-lightning", "pytorchlightning_example"
    folder = converted(app, package, method, tmp_path, "^decoder")
    with (folder / package / "task.py").open("a") as file:
        file.write("\nfrom tests.apps.data import mnist_loaders as load_data\n")
    server = folder / package / "server_app.py"  # half of two clients would be another each round
    write(server, swapped(server.read_text(), {"fraction_train=0.5": "fraction_train=1.0"}))
    run_app(folder, package, 2, {"num-server-rounds": 3, "max-epochs": 1}, monkeypatch)
    (strategy,) = made
    found = trained(strategy)
    assert len(losses(strategy, f"{next(iter(strategy.kinds))}-loss")) == 3
    assert found[-1] < found[0]


def accuracy_metric(name: str) -> Any:
    """Stand in for `evaluate.load`, which fetches its metrics from a hub."""

    class Accuracy:
        def __init__(self) -> None:
            self.right: list[torch.Tensor] = []

        def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
            self.right.append(predictions == references)

        def compute(self) -> dict[str, float]:
            return {name: float(torch.cat(self.right).float().mean())}

    return Accuracy()


@needs_app("quickstart-huggingface")
@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize("method", METHODS)
def test_hugging_face(method, tmp_path, monkeypatch, made):
    evaluate = ModuleType("evaluate")
    evaluate.load = accuracy_metric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evaluate", evaluate)
    app, package = "quickstart-huggingface", "huggingface_example"
    folder = converted(app, package, method, tmp_path, "^classifier")
    task = folder / package / "task.py"
    changed = patched(task.read_text(), block(f"app: {app}/{package}/task.py"))
    stand_ins = "token_loaders as load_data, tiny_bert as get_model"
    write(task, f"{changed}\nfrom tests.apps.data import {stand_ins}\n")
    config = {"num-server-rounds": 3, "model-name": "tiny", "fraction-train": 1.0}
    run_app(folder, package, 2, config | {"fraction-evaluate": 1.0}, monkeypatch)
    (strategy,) = made
    found = losses(strategy, f"{next(iter(strategy.kinds))}-loss")
    assert len(trained(strategy)) == len(found) == 3
    assert np.isfinite(found).all()
