"""The snippets of the pages after-training, recommender, tracking, robustness and tasks run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from safetensors.numpy import load_file
from torch import nn

import clients
import fl_admm_strategies
from clients import DittoClient, FedADMMClient, FPFCClient, client_app
from fl_admm_strategies import FPFC, Ditto, InProcessGrid, SmoothedSCAD
from tests.support.federation import client_fn_of, dataset, initial_arrays, make_model
from tests.support.ratings import NUM_ITEMS, new_context, ratings

DOCS = Path(__file__).parents[1] / "docs"
NUM_CLIENTS = 4


def snippets(name: str) -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def ditto_client(context: Context, folder: Path) -> DittoClient:
    data = [dataset(int(context.node_config["partition-id"])).tensors]
    return DittoClient(context, make_model(), data, nn.CrossEntropyLoss(), state_dir=folder)


def test_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "site"
    with InProcessGrid(client_app(lambda c: ditto_client(c, site)), NUM_CLIENTS) as grid:
        Ditto(fraction_evaluate=0).start(grid, initial_arrays(), 1)
        context = grid.context(5)
    strategy = FPFC(SmoothedSCAD(lam=0.6))
    with InProcessGrid(client_app(client_fn_of(FPFCClient)), NUM_CLIENTS) as grid:
        strategy.start(grid, initial_arrays(), 2)
    strategy.models().save("runs/digits-fpfc-20260101-120000/models")
    train = [dataset(3).tensors]
    names: dict[str, Any] = {
        "strategy": strategy,
        "Net": make_model,
        "net": make_model(),
        "nn": nn,
        "train": train,
        "loader": train,
        "DittoClient": DittoClient,
        "context": context,
    }
    away, into_torch, again, export, cluster, personal = snippets("after-training.md")
    for snippet in (away, into_torch, again):
        exec(snippet, names)
    personal_3 = names["models"].personal[3]
    for name, tensor in names["net"].state_dict().items():
        assert np.array_equal(tensor.numpy(), personal_3[name])
    assert "/var/lib/site" in export
    exec(export.replace("/var/lib/site", str(site)), names)
    assert load_file("my-model.safetensors").keys() == initial_arrays().keys()
    for snippet in (cluster, personal):
        exec(snippet, names)
    losses = list(names["losses"].values())
    assert losses == sorted(losses)
    assert names["cluster"] in names["models"].clusters
    assert names["own"].keys() == initial_arrays().keys()


@pytest.mark.slow
def test_tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wandb, mlflow, pandas = MagicMock(), MagicMock(), pytest.importorskip("pandas")
    trackers = {"wandb": wandb, "mlflow": mlflow, "pandas": pandas, "MetricRecord": MetricRecord}
    names = {**vars(fl_admm_strategies), **vars(clients), **trackers}
    aggregated, tracked, frame, best, schedules = snippets("tracking.md")
    exec(aggregated, names)
    names["arrays"] = initial_arrays()
    with InProcessGrid(client_app(client_fn_of(FedADMMClient)), NUM_CLIENTS) as grid:
        names["grid"] = grid
        names["evaluate"] = lambda r, arrays: MetricRecord({"accuracy": 1 / (1 + abs(r - 2))})
        exec(tracked.replace("100", "2"), names)
        assert wandb.log.call_args.kwargs == mlflow.log_metrics.call_args.kwargs == {"step": 2}
        assert wandb.log.call_args.args[0].keys() >= {"train-loss", "worst-accuracy"}
        exec(best, names)
    strategy = names["strategy"]
    assert strategy.last_round == 22  # 20 rounds after the best
    assert names["best"].global_.keys() == initial_arrays().keys()
    exec(frame, names)
    accuracies = names["frame"].query("round == 2 and metric == 'global-accuracy'")["value"]
    means = strategy.run.record.result.evaluate_metrics_clientapp
    assert means[2]["worst-accuracy"] == accuracies.min()
    exec(schedules, names)


def test_robustness() -> None:
    names = {**vars(fl_admm_strategies), **vars(clients), "client_fn": client_fn_of(FPFCClient)}
    for snippet in snippets("robustness.md"):
        exec(snippet, names)
    with InProcessGrid(names["app"], NUM_CLIENTS) as grid:
        strategy = FPFC(SmoothedSCAD(lam=0.6))
        strategy.start(grid, initial_arrays(), 1)
    assert len(strategy.evaluate_metrics[1]) == NUM_CLIENTS - 1  # the liar has no say


TASKS = re.findall(
    r"^## (.*?)\n(.*?)(?=^## |\Z)",
    (DOCS / "tasks.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("task", [text for _, text in TASKS], ids=[title for title, _ in TASKS])
def test_a_task_runs(task: str) -> None:
    """Each example's strategy learns from the client beside it, for two rounds."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", task, flags=re.MULTILINE | re.DOTALL)

    def example(context: Context) -> dict[str, Any]:
        client = int(context.node_config["partition-id"])
        inputs, labels = dataset(client).tensors
        batches = [(inputs, labels)]
        # A client is loaded when it is asked for.
        names = vars(fl_admm_strategies) | {
            name: getattr(clients, name) for name in clients.__all__
        }
        names |= {"nn": nn, "Net": make_model}
        names |= {"context": context, "train": batches, "test": batches}
        names |= dict.fromkeys(("x", "x_test"), inputs.numpy())
        names |= dict.fromkeys(("y", "y_test"), labels.numpy() == 0)
        names |= {"ratings": ratings(client), "test_ratings": ratings(client, seed=1)}
        exec(snippet, names)
        return names

    strategy = example(new_context())["strategy"]
    arrays = {
        "FedMCADMM": fl_admm_strategies.initial_item_factors(2, NUM_ITEMS),
        "FedGiA": ArrayRecord({"x": Array(np.zeros(3))}),
    }.get(type(strategy).__name__, initial_arrays())
    with InProcessGrid(client_app(lambda c: example(c)["client"]), 6) as grid:
        strategy.start(grid, arrays, 2)
    losses = [metrics["loss"] for metrics in strategy.evaluate_metrics[2].values()]
    assert len(losses) == 6
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_recommender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    taste, kind = rng.integers(0, 2, 60), rng.integers(0, 2, 40)
    lines = ["user,item,stars"]
    for user in range(60):
        for item in rng.permutation(40)[:20]:
            stars = 5 - rng.integers(0, 2) if taste[user] == kind[item] else rng.integers(1, 4)
            lines.append(f"u{user},i{item},{stars}")
    lines.append(lines[1])  # rated twice
    Path("interactions.csv").write_text("\n".join(lines), encoding="utf-8-sig")  # as Excel does
    names: dict[str, Any] = {}
    for snippet in snippets("recommender.md"):
        exec(snippet, names)
    assert names["result"].evaluate_metrics_clientapp[1]["ndcg"] > 0
    model, liked = names["model"], names["liked"]
    kinds = np.array([kind[int(item[1:])] for item in names["catalogue"]])
    assert np.mean(kinds[model.similar_items(liked, 5)] == kinds[liked]) > 0.7
    best = model.recommend([liked], [5.0], n=5)
    assert liked not in best
    assert np.mean(kinds[best] == kinds[liked]) > 0.7
    assert len(capsys.readouterr().out.splitlines()) > 10
