"""The standard report: a row for every kind of model, curves and one sentence, for any method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies import FLAME, FPFC, FedGiA, LpProjADMM, Models, load_models
from simulations.experiments.experiment import RunConfig
from simulations.problems import LinearProblem, TorchProblem
from simulations.reports import MethodReport, report_of
from simulations.reports.fedgia import FedGiAReport
from simulations.reports.fpfc import FPFCReport
from tests.simulations.quick_runs import last_evaluation, result_of, run
from tests.support.refusals import names

DIGITS = (
    "data.name=digits",
    "data.options={ clients = 4, samples = 400 }",
    "model.name=mlr",
    "training.num-rounds=3",
    "training.evaluate-every=3",
    "training.batch-size=20",
)


FEDGIA = "algorithm={ name = 'fedgia', t = 2.0, local-steps = 2 }"
EVERYBODY = "training.fraction-train=1.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "changes", "title", "kinds"),
    [
        (
            "ditto-digits",
            ["training.fraction-train=0.5"],
            "Ditto",
            {"personal": "personal model", "global": "one global model"},
        ),
        # FedGiA has a report of its own on linear models only
        ("fedadmm-digits", [EVERYBODY, FEDGIA], "FedGiA", {"global": "one global model"}),
    ],
)
def test_a_row_for_every_kind_of_model_and_a_sentence(
    experiment: str,
    changes: list[str],
    title: str,
    kinds: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = [*DIGITS, "baselines={}", *changes]
    folder = run(RunConfig(experiment, changes=tuple(changes), out=tmp_path / "run"))
    result = result_of(folder)
    assert list(result["models"]) == list(kinds.values())
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{title} on {experiment}" in shown
    sentence = f"{title} trained with 4 clients for 3 rounds. Mean test accuracy: "
    values = []
    for kind, name in kinds.items():
        accuracies = [reported[f"{kind}-accuracy"] for reported in last_evaluation(folder).values()]
        assert result["models"][name]["mean"] == pytest.approx(np.mean(accuracies))
        values.append(f"{100 * np.mean(accuracies):.2f} % ({name})")
    assert f"{sentence}{', '.join(values)}." in shown
    assert (folder / "metric.png").stat().st_size > 10_000


def test_methods_with_more_to_say_are_known_by_their_class() -> None:
    class Faster(FPFC):
        pass

    for strategy, problem, report in (
        (FPFC, TorchProblem, FPFCReport),
        (Faster, TorchProblem, FPFCReport),
        (FLAME, TorchProblem, MethodReport),
        (FedGiA, LinearProblem, FedGiAReport),
        (FedGiA, TorchProblem, MethodReport),
        (LpProjADMM, TorchProblem, MethodReport),
    ):
        assert type(report_of(strategy, problem)) is report


@pytest.mark.slow
def test_models_that_stay_with_their_clients_are_sent_if_one_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def models(name: str, *changes: str) -> tuple[Models, str]:
        changes = (*DIGITS, "baselines={}", *changes)
        folder = run(RunConfig("ditto-digits", changes=changes, out=tmp_path / name))
        return load_models(folder), " ".join(capsys.readouterr().out.split())

    there, text = models("stay")
    assert not there.personal
    assert names(text, "training.collect-models=true")
    sent, text = models("sent", "training.collect-models=true")
    assert list(sent.personal) == [0, 1, 2, 3]
    assert "training.collect-models=true" not in text
