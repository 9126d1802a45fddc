"""The app with methods that nothing in `simulations` knows: classes alone are enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.client import NumPyClient
from numpy.typing import NDArray
from rich.text import Text

from clients.methods.fedprox import FedProxClient
from fl_admm_strategies import FedProx, StatefulStrategy
from fl_admm_strategies.maths.checks import check_positive
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from simulations.data import DATASETS
from simulations.experiments import loading
from simulations.experiments.experiment import load_experiment
from simulations.experiments.loading import load_settings
from simulations.experiments.run_config import RunConfig
from simulations.methods import CLIENTS, METHODS
from simulations.problems import PROBLEMS, Problem
from simulations.problems.scores import METRICS, Metric, Score
from simulations.reports import REPORTS, Finished, MethodReport, Report
from simulations.settings.tables import ReportSettings, Settings
from tests.simulations.quick_runs import result_of, rounds_of, run
from tests.simulations.screen import row
from tests.support.federation import Mean
from tests.support.refusals import refused

# --- A method on the data that there are: two classes, a TOML file --------------------------------


class Twice(FedProx):
    """FedProx with a setting of its own."""

    kinds: ClassVar = {"global": "the model of all"}

    def __init__(self, *, factor: float = 2.0, **base: Any) -> None:
        super().__init__(**base)
        check_positive("factor", factor)
        self.factor = factor

    @property
    def title(self) -> str:
        return "Twice"

    def train_instructions(self, server_round: int, client_ids: Sequence[int]) -> Any:
        instruction = super().train_instructions(server_round, client_ids)[client_ids[0]].encode()
        config = instruction.config | {"factor": self.factor}
        return {client: ClientInstruction(instruction.groups, config) for client in client_ids}


class TwiceClient(FedProxClient):
    """Also has one."""

    strategy = Twice
    seen: ClassVar[list[tuple[float, float]]] = []

    def __init__(self, *args: Any, share: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share = share

    def train(self, asked: Any, config: dict[str, Any]) -> Any:
        self.seen.append((config["factor"], self.share))
        return super().train(asked, config)


@pytest.fixture
def _twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(METHODS, "twice", Twice)
    CLIENTS.append(TwiceClient)
    TwiceClient.seen.clear()
    loading._tables.cache_clear()
    yield
    CLIENTS.remove(TwiceClient)
    loading._tables.cache_clear()


TWICE = """
title = "Twice, on digits"
[data]
name = "digits"
options = { clients = 4, samples = 400 }
[model]
name = "mlr"
[training]
num-rounds = 3
fraction-train = 0.5
evaluate-every = 2
[algorithm]
name = "twice"
factor = 3
mu = 0.2
[client]
share = 0.25
[baselines.twice]
factor = 5.0
lr = 0.3
client = { share = 0.75 }
"""


@pytest.mark.usefixtures("_twice")
def test_a_method_with_the_standard_report_needs_nothing_in_the_app(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "twice.toml"
    file.write_text(TWICE, encoding="utf-8")
    out = run(RunConfig(str(file), out=tmp_path / "out"))
    # Two of four clients in each of three rounds; then the same method as a baseline.
    assert TwiceClient.seen == [(3.0, 0.25)] * 6 + [(5.0, 0.75)] * 6
    result = result_of(out)
    assert list(result["models"]) == ["the model of all"]
    assert list(result["baselines"]["Twice"]["models"]) == ["the model of all"]
    assert result["models"] != result["baselines"]["Twice"]["models"]  # other settings
    evaluated = [one["evaluate"] for one in rounds_of(out)]
    assert [clients and len(clients) for clients in evaluated] == [None, 4, 4]
    mean = np.mean([reported["global-accuracy"] for reported in evaluated[-1].values()])
    assert result["models"]["the model of all"]["mean"] == pytest.approx(mean)
    output = " ".join(capsys.readouterr().out.split())
    assert "Twice on twice" in output
    assert "Twice trained with 4 clients for 3 rounds. Mean test accuracy: " in output
    assert load_settings(str(out / "experiment.toml")) == load_settings(str(file))


@pytest.mark.usefixtures("_twice")
def test_its_constructors_say_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "twice.toml"
    file.write_text(TWICE, encoding="utf-8")
    for change in ("algorithm.factor=0", "algorithm.mu=-1", "client.share=half"):
        with refused(ValueError, change.partition("=")[0]):
            load_settings(str(file), changes=[change])
    with refused(ValueError, "algorithm.factr", "factor"):
        load_settings(str(file), changes=["algorithm.factr=1"])


# --- A kind of data of its own, no torch, a report with more to say -------------------------------


@dataclass(frozen=True)
class Targets:
    """One number t_i for each client, whose loss is (w - t_i)^2 / 2."""

    name: str
    clients: list[float]


def targets(seed: int, root: Path, *, shift: float = 0.0) -> Targets:
    return Targets("targets", [shift, shift + 1.0, shift + 2.0])


class Halving(Mean):
    """The mean of what the clients send."""

    kinds: ClassVar = {"global": "the one number"}

    def __init__(self, *, loud: bool = True, **base: Any) -> None:
        super().__init__(**base)
        self.loud = loud


class HalvingClient(NumPyClient):
    """Takes one gradient step of size 1/2 on its own loss."""

    strategy = Halving

    def __init__(self, target: float) -> None:
        self.target = target

    def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        return [parameters[0] - 0.5 * (parameters[0] - self.target)], 1, {}

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        loss = float((parameters[0][0] - self.target) ** 2) / 2
        return loss, 1, {"global-objective": loss, "global-auc": 0.25 * self.target}


class TargetProblem(Problem):
    """Find the mean of the targets."""

    data_type: ClassVar[type] = Targets
    needs: ClassVar[frozenset[str]] = frozenset({"target"})
    gives: ClassVar[frozenset[str]] = needs

    @classmethod
    def check(cls, settings: Settings) -> None:
        if settings.training.batch_size is not None:
            raise ValueError("leave training.batch-size out.")

    def initial_arrays(self, strategy: Any) -> ArrayRecord:
        return ArrayRecord({"w": Array(np.zeros(1))})

    def client_arguments(self, client_id: int) -> dict[str, Any]:
        return {"target": self.data.clients[client_id]}

    @property
    def metric(self) -> Metric:
        return METRICS["objective"]

    def score_of(self, kind: str, clients: Mapping[int, Mapping[str, float]]) -> Score | None:
        found = super().score_of(kind, clients)
        return None if found is None else Score(mean=found.mean)


class HalvingReportSettings(ReportSettings):
    tolerance: float = 0.0


class HalvingReport(MethodReport):
    """Stops near the mean."""

    settings: ClassVar[type[ReportSettings]] = HalvingReportSettings
    fixed: ClassVar[Mapping[str, Any]] = {"loud": False}

    def title(self, strategy: StatefulStrategy) -> str:
        assert not strategy.loud  # type: ignore[attr-defined]
        return "Halving, k=1"

    def stop_rule(self, strategy: Any, problem: Problem) -> Any:
        mean = np.mean(problem.data.clients)
        tolerance = problem.settings.report.tolerance  # type: ignore[attr-defined]

        def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
            return bool(abs(strategy.global_model()["w"][0] - mean) <= tolerance)

        return stop

    def report(self, run: Finished) -> Report:
        (run.out / "note.txt").write_text("a file of its own", encoding="utf-8")
        rounds = max(run.strategy.traffic)
        return Report(
            cells={"the one number": {"cr": rounds}, "with more": {"cr": None}},
            legend=("CR: rounds of communication.",),
            body=(Text("A table of its own."), Text(f"Halving stopped after {rounds} rounds.")),
            files={"note.txt": "a note"},
            extra={"target": 1.0},
        )


@pytest.fixture
def _halving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(METHODS, "halving", Halving)
    monkeypatch.setitem(DATASETS, "targets", targets)
    monkeypatch.setitem(REPORTS, Halving, HalvingReport)
    CLIENTS.append(HalvingClient)
    PROBLEMS.append(TargetProblem)
    loading._tables.cache_clear()
    yield
    CLIENTS.remove(HalvingClient)
    PROBLEMS.remove(TargetProblem)
    loading._tables.cache_clear()


HALVING = """
title = "Halving finds the mean"
[data]
name = "targets"
[training]
num-rounds = 50
evaluate-every = 2
[algorithm]
name = "halving"
[report]
tolerance = 0.01
[published."Halving, k=1"]
objective = 0.3333
cr = 7.5
[published.Other]
objective = 0.5
"""


@pytest.fixture
def experiment(_halving: None, tmp_path: Path) -> str:
    path = tmp_path / "halving.toml"
    path.write_text(HALVING, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_any_method_stops_by_its_rule_and_reports_what_it_has(
    experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(RunConfig(experiment, out=tmp_path / "out"), nodes=3)
    result = result_of(out)
    # All clients halve their distance, so |w - 1| = 2^-t from w = 0: below 0.01 first at t = 7.
    assert result["rounds"] == 7
    # The objective is the mean of (w - t_i)^2/2 = var/2 + (w - 1)^2/2, with var = 2/3.
    mean = 1 / 3 + 2**-14 / 2
    assert result["models"]["the one number"]["mean"] == pytest.approx(mean, rel=1e-12)
    assert result["metric"] == "objective"
    assert result["target"] == 1.0
    # One float64 down and one up, for three clients.
    assert result["traffic"] == {"down": 168, "up": 168, "down_per_round": 24, "up_per_round": 24}
    lines = rounds_of(out)
    assert [line["traffic"] for line in lines] == [[24, 24]] * 7
    # Every second round, and the last, which the rule chose.
    assert [line["round"] for line in lines if line["evaluate"]] == [2, 4, 6, 7]
    assert load_settings(str(out / "experiment.toml")) == load_settings(experiment)

    text = capsys.readouterr().out
    table = text.partition("A table of its own")[0]
    # AUC came from the clients alone: the mean of 0, 0.25 and 0.5, in percent.
    assert row(table, "the one number") == ["0.3334", "25.00", "7"]
    assert row(table, "with more") == ["–"]
    assert row(table, "Halving, k=1")[:3] == ["0.3333", "–", "7.5"]
    assert row(table, "Other") == ["0.5000", "–", "–"]
    flat = " ".join(text.split())
    assert "seed 0. Arrays sent: 168 bytes down, 168 bytes up; a round 24 bytes" in flat
    order = ("Halving, k=1 on halving", "A table of its own", "stopped after 7 rounds", "Results:")
    assert sorted(order, key=flat.index) == list(order)
    assert "note.txt a note" in flat
    assert (out / "note.txt").is_file()
    assert not (out / "distances.png").exists()


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("halving", "data.name=digits-swap", ["digits-swap", "halving", "Targets"]),
        ("digits-fpfc", "data.name=targets", ["targets", "fpfc", "FederatedData"]),
        ("halving", "baselines.fedavg.lr=0.1", ["fedavg", "FederatedData"]),
        ("halving", "training.batch-size=3", ["training.batch-size"]),
        ("halving", "algorithm.loud=true", ["algorithm.loud"]),
        ("halving", "algorithm.tolerance=1", ["algorithm.tolerance", "Halving"]),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_the_run(
    name: str, change: str, named: list[str], experiment: str
) -> None:
    config = RunConfig(experiment if name == "halving" else name, changes=(change,))
    with refused(ValueError, *named):
        load_experiment(config)
