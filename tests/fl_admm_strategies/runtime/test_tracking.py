"""What was measured, in TensorBoard, Weights & Biases, MLflow and a pandas frame."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MetricRecord

from fl_admm_strategies import (
    StatefulStrategy,
    metrics_frame,
    to_mlflow,
    to_tensorboard,
    to_wandb,
)
from fl_admm_strategies.runtime.callbacks import OnRound
from tests.support.cases import CHEAP, NUM_CLIENTS, grid_of
from tests.support.federation import Mean
from tests.support.refusals import refused

ROUNDS = 3
ODD = "../a%b"  # a name that one client gives a metric of its own


def odd_name(replies: list[Any]) -> list[Any]:
    replies[0].content["metrics"][ODD] = 1.0
    return replies


def tracked(make: Callable[[StatefulStrategy], OnRound]) -> StatefulStrategy:
    """Run three rounds with a tracker and a central evaluation."""
    strategy = Mean()
    grid = grid_of(CHEAP, spoil={2: odd_name})
    strategy.start(
        grid,
        CHEAP.initial_arrays(),
        ROUNDS,
        evaluate_fn=lambda r, arrays: MetricRecord({"score": r / 10, "each": [1.0, 2.0]}),
        on_round=make(strategy),
    )
    return strategy


def expected_of(strategy: StatefulStrategy, *, odd: str) -> dict[str, list[tuple[int, float]]]:
    """Return what a tracker must have of a run: by name, the round and the value."""
    found: dict[str, list[tuple[int, float]]] = {}

    def add(name: str, server_round: int, value: float) -> None:
        found.setdefault(name, []).append((server_round, pytest.approx(value)))

    result = strategy.run.record.result
    for r in range(1, ROUNDS + 1):
        add("train-loss", r, result.train_metrics_clientapp[r]["loss"])
        add("loss", r, result.evaluate_metrics_clientapp[r]["loss"])
        add("server-score", r, r / 10)
        for client in range(NUM_CLIENTS):
            for name, value in strategy.train_metrics[r][client].items():
                add(f"client-{client}/train-{name.replace(ODD, odd)}", r, value)
            for name, value in strategy.evaluate_metrics[r][client].items():
                add(f"client-{client}/{name}", r, value)
    return found


@pytest.mark.parametrize("per_client", [True, False])
def test_tensorboard(per_client: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    strategy = tracked(
        lambda strategy: to_tensorboard(strategy, str(tmp_path), per_client=per_client)
    )
    events = EventAccumulator(str(tmp_path)).Reload()
    # A scalar is a tensor in these files.
    found = {
        tag: [(event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    expected = expected_of(strategy, odd=ODD)
    assert found == {
        name: values
        for name, values in expected.items()
        if per_client or not name.startswith("client-")
    }


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[tuple[int, dict[str, float]]] = []
    with refused(RuntimeError, "wandb.init"):
        to_wandb(Mean())
    run = wandb.init(mode="offline", dir=tmp_path, project="test")
    plain = run.log

    def log(data: dict[str, float], step: int) -> None:
        logged.append((step, data))
        plain(data, step=step)

    monkeypatch.setattr(run, "log", log)
    strategy = tracked(to_wandb)
    wandb.finish()
    wandb.teardown()  # until then the file is its service's
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"client-5/train-loss" in file.read_bytes()
    found: dict[str, list[tuple[int, float]]] = {}
    for step, data in logged:
        for name, value in data.items():
            found.setdefault(name, []).append((step, value))
    expected = expected_of(strategy, odd=ODD)
    assert found == expected


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs all of MLflow
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        strategy = tracked(to_mlflow)
    client = mlflow.MlflowClient()
    expected = expected_of(strategy, odd="___a_b")
    found = {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in client.get_run(run.info.run_id).data.metrics
    }
    assert found == expected


def test_the_frame_has_a_row_for_each_number() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    strategy = tracked(lambda strategy: lambda server_round, metrics: None)
    frame = metrics_frame(strategy)
    means = frame[frame["client"].isna()]
    table = means.pivot(index="round", columns=["phase", "metric"], values="value")
    assert list(table["server", "score"]) == [0.0, 0.1, 0.2, 0.3]
    result = strategy.run.record.result
    for server_round in (1, 2, 3):
        assert (
            table["train", "loss"][server_round]
            == result.train_metrics_clientapp[server_round]["loss"]
        )
    for phase, rounds in (
        ("train", strategy.train_metrics),
        ("evaluate", strategy.evaluate_metrics),
    ):
        rows = frame[(frame["phase"] == phase) & frame["client"].notna()]
        found = {
            (r, c, name): v for r, c, name, v in rows.drop(columns="phase").to_numpy().tolist()
        }
        assert found == {
            (r, client, name): value
            for r, clients in rounds.items()
            for client, own in clients.items()
            for name, value in own.items()
        }


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("tensorboard", lambda strategy: to_tensorboard(strategy, "runs")),
        ("wandb", to_wandb),
        ("mlflow", to_mlflow),
        ("pandas", metrics_frame),
    ],
)
def test_a_missing_package_is_named(
    package: str, use: Callable[[StatefulStrategy], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (package, "tensorboard.summary"):
        monkeypatch.setitem(sys.modules, name, None)
    with refused(ImportError, package, "pip install"):
        use(Mean())
