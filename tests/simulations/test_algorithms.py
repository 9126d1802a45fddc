"""The app with an algorithm that has nothing of FPFC's: no model, no torch, one number."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from numpy.typing import NDArray
from rich.text import Text

from fl_admm_strategies import run_in_process
from simulations.algorithms import ALGORITHMS, Algorithm, Experiment, TorchAlgorithm
from simulations.client_app import make_client_app
from simulations.config import RunConfig
from simulations.data import DATASETS
from simulations.report import METRICS, Metric, Report, Score
from simulations.run import prepare
from simulations.server_app import make_server_app
from simulations.settings import load_settings
from tests.simulations.screen import row
from tests.support.federation import Mean


@dataclass(frozen=True)
class Targets:
    """One number t_i for each client, whose loss is (w - t_i)^2 / 2."""

    name: str
    clients: list[float]


# Not with `from __future__ import annotations`: the registry of data sets reads these annotations.
def targets(seed: int, root: Path, *, shift: float = 0.0) -> Targets:
    return Targets("targets", [shift, shift + 1.0, shift + 2.0])


class HalvingClient(NumPyClient):
    """Takes one gradient step of size 1/2 on its own loss."""

    def __init__(self, target: float) -> None:
        self.target = target

    def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        return [parameters[0] - 0.5 * (parameters[0] - self.target)], 1, {}

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        loss = float((parameters[0][0] - self.target) ** 2) / 2
        return loss, 1, {"global-objective": loss, "global-auc": 0.25 * self.target}


class HalvingSettings(Algorithm):
    data_type: ClassVar[type] = Targets
    models: ClassVar[Mapping[str, str]] = {"global": "the one number"}

    name: Literal["halving"]
    tolerance: float = 0.0

    @property
    def title(self) -> str:
        return "Halving"

    def strategy(self, settings: Any, data: Targets, **base: Any) -> Mean:
        return Mean(**base)

    def initial_arrays(self, settings: Any, data: Targets) -> ArrayRecord:
        return ArrayRecord({"w": Array(np.zeros(1))})

    def client(self, context: Context, settings: Any, data: Targets) -> HalvingClient:
        return HalvingClient(data.clients[int(context.node_config["partition-id"])])

    def metric(self, data: Targets) -> Metric:
        return METRICS["objective"]

    def stop_rule(self, experiment: Experiment) -> Any:
        mean = np.mean(experiment.data.clients)

        def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
            distance = abs(experiment.strategy.global_model()["w"][0] - mean)
            return bool(distance <= self.tolerance)

        return stop

    def scores(self, data: Targets, clients: Mapping[int, Mapping[str, float]]) -> dict[str, Score]:
        found = super().scores(data, clients)
        return {title: Score(mean=values.mean) for title, values in found.items()}

    def report(self, experiment: Experiment, out: Path) -> Report:
        (out / "note.txt").write_text("a file of its own", encoding="utf-8")
        rounds = max(experiment.strategy.traffic)
        return Report(
            cells={"the one number": {"cr": rounds}, "with more": {"cr": None}},
            note="nothing personal",
            legend=("CR: rounds of communication.",),
            body=(Text("A table of its own."), Text(f"Halving stopped after {rounds} rounds.")),
            files={"note.txt": "a note"},
            extra={"target": 1.0},
        )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "halving", HalvingSettings)
    monkeypatch.setitem(DATASETS, "targets", targets)


HALVING = """
title = "Halving finds the mean"
[data]
name = "targets"
[training]
num-rounds = 50
evaluate-every = 2
[algorithm]
name = "halving"
tolerance = 0.01
[published.Halving]
objective = 0.3333
cr = 7.5
[published.Other]
objective = 0.5
"""


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    path = tmp_path / "halving.toml"
    path.write_text(HALVING, encoding="utf-8")
    return str(path)


def run(config: RunConfig, nodes: int = 3) -> dict[str, Any]:
    mapping = config.to_mapping()
    run_in_process(make_server_app(mapping, engine="inprocess"), make_client_app(mapping), nodes)
    assert config.out is not None
    result: dict[str, Any] = json.loads((config.out / "result.json").read_text(encoding="utf-8"))
    return result


def test_any_algorithm_stops_by_its_rule_and_reports_what_it_has(
    experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    result = run(RunConfig(experiment, out=out))
    # All clients halve their distance, so |w - 1| = 2^-t from w = 0: below 0.01 first at t = 7.
    assert result["rounds"] == 7
    # The objective is the mean of (w - t_i)^2/2 = var/2 + (w - 1)^2/2, with var = 2/3.
    mean = 1 / 3 + 2**-14 / 2
    assert result["models"]["the one number"]["mean"] == pytest.approx(mean, rel=1e-12)
    assert result["metric"] == "objective"
    assert result["target"] == 1.0
    # One float64 down and one up, for three clients.
    assert result["traffic"] == {"down": 168, "up": 168, "down_per_round": 24, "up_per_round": 24}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["bytes"] for line in lines] == [{"down": 24, "up": 24}] * 7
    # Every second round, and the last, which the rule chose.
    assert [line["round"] for line in lines if line["clients"]["evaluate"]] == [2, 4, 6, 7]
    assert load_settings(str(out / "experiment.toml")) == load_settings(experiment)

    text = capsys.readouterr().out
    table = text.partition("A table of its own")[0]
    # AUC came from the clients alone: the mean of 0, 0.25 and 0.5, in percent.
    assert row(table, "the one number") == ["0.3334", "25.00", "7"]
    assert row(table, "with more") == ["–"]
    assert row(table, "Halving")[:3] == ["0.3333", "–", "7.5"]
    assert row(table, "Other") == ["0.5000", "–", "–"]
    flat = " ".join(text.split())
    assert "seed 0; nothing personal. Arrays sent: 168 B down, 168 B up; a round 24 B" in flat
    order = ("Halving on halving", "A table of its own", "stopped after 7 rounds", "Results:")
    assert sorted(order, key=flat.index) == list(order)
    assert "note.txt a note" in flat
    assert (out / "note.txt").is_file()
    assert not (out / "distances.png").exists()


def test_the_rest_of_the_settings_reach_the_algorithm(experiment: str, tmp_path: Path) -> None:
    changes = ("algorithm.tolerance=0", "training.num-rounds=3", "data.options={shift = 4.0}")
    result = run(RunConfig(experiment, changes=changes, out=tmp_path / "out"), nodes=2)
    # The targets are 4, 5, 6 now: w = 5 (1 - 2^-3), so (w - 5)^2 = 25/64.
    assert result["rounds"] == 3
    assert result["models"]["the one number"]["mean"] == pytest.approx(1 / 3 + 25 / 128, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "halving",
            ["data.name=digits-swap"],
            "data set 'digits-swap' is FederatedData, algorithm 'halving' learns from Targets: use",
        ),
        (
            "digits-fpfc",
            ["data.name=targets"],
            "data set 'targets' is Targets, algorithm 'fpfc' learns from FederatedData: use",
        ),
        (
            "halving",
            ['baselines={names = ["fedavg"]}'],
            r"\[baselines\] train a PyTorch model, algorithm 'halving' has none",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_the_run(
    name: str, changes: list[str], message: str, experiment: str
) -> None:
    config = RunConfig(experiment if name == "halving" else name, changes=tuple(changes))
    with pytest.raises(ValueError, match=message):
        prepare(config)


def test_a_torch_algorithm_needs_a_model(tmp_path: Path) -> None:
    text = load_settings("digits-fpfc").to_toml()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('[model]\nname = "softmax"\ninit = "pytorch"\n', ""), "utf-8")
    with pytest.raises(ValueError, match=r"\[model\] is missing: algorithm 'fpfc' trains a PyT"):
        prepare(RunConfig(str(path)))


def test_the_settings_of_another_algorithm_are_unknown(experiment: str) -> None:
    with pytest.raises(ValueError, match=r"algorithm.lam: there is no such setting"):
        load_settings(experiment, changes=["algorithm.lam=1"])
    with pytest.raises(ValueError, match=r"algorithm.name: is missing. Known: .*fpfc.*halving"):
        load_settings(experiment, changes=["algorithm={tolerance = 1}"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_registered_under_its_own_name(name: str) -> None:
    settings = ALGORITHMS[name]
    assert settings.model_fields["name"].annotation == Literal[name]  # type: ignore[valid-type]
    if issubclass(settings, TorchAlgorithm):
        assert {"lr", "local_epochs"} <= set(settings.model_fields)
