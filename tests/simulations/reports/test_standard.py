"""The standard report: a row for every kind of model, curves and one sentence, for any method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies import Models, load_models
from simulations.experiments.experiment import RunConfig
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


@pytest.mark.slow
def test_a_row_for_every_kind_of_model_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"personal": "personal model", "global": "one global model"}
    changes = (*DIGITS, "baselines={}", "training.fraction-train=0.5")
    folder = run(RunConfig("ditto-digits", changes=changes, out=tmp_path / "run"))
    result = result_of(folder)
    assert list(result["models"]) == list(kinds.values())
    values = []
    for kind, name in kinds.items():
        accuracies = [reported[f"{kind}-accuracy"] for reported in last_evaluation(folder).values()]
        assert result["models"][name]["mean"] == pytest.approx(np.mean(accuracies))
        values.append(f"{100 * np.mean(accuracies):.2f} % ({name})")
    sentence = "Ditto trained with 4 clients for 3 rounds. Mean test accuracy: "
    assert f"{sentence}{', '.join(values)}." in " ".join(capsys.readouterr().out.split())
    assert (folder / "metric.png").stat().st_size > 10_000


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
