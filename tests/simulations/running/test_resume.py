"""A run of the app that is interrupted and resumed has the results of one that was not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fl_admm_strategies.runtime.saving.history import History
from simulations.experiments.experiment import RunConfig
from simulations.experiments.loading import load_settings
from simulations.running.folder import results_folder
from simulations.running.run import prepare
from tests.simulations.quick_runs import TINY, rounds_of, run
from tests.support.federation import assert_same_bits
from tests.support.refusals import names, refused

SMALL = (
    "data.name=digits",
    "data.options={ clients = 4, samples = 300 }",
    "model.name=mlp",
    "algorithm.personal=^fc3",
    "algorithm.lr=0.5",
    "training.batch-size=20",
    "training.num-rounds=5",
    "training.fraction-train=0.5",
    "training.evaluate-every=2",
    "training.checkpoint-every=2",
    "training.client-state=folder",
    "baselines={}",
)


def lines(folder: Path) -> list[dict[str, Any]]:
    records = rounds_of(folder)
    for record in records:
        del record["traffic"]
    return records


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # FedAPM's clients keep parameters that nobody else has.
    whole = run(RunConfig("fedapm-cifar10", changes=SMALL, out=tmp_path / "whole"))
    config = RunConfig("fedapm-cifar10", changes=SMALL, out=tmp_path / "run")
    append = History.append

    def interrupt(self: History, entry: Any) -> None:
        append(self, entry)
        if entry["round"] == 3:  # after the checkpoint of round 2
            with self.path.open("a", encoding="utf-8") as file:
                file.write('{"round": 4, "half a li')
            raise InterruptedError

    monkeypatch.setattr(History, "append", interrupt)
    with pytest.raises(InterruptedError):
        run(config)
    monkeypatch.undo()
    with refused(ValueError, config.out, "--resume"):
        run(config)
    folder = run(replace(config, resume=True))
    assert lines(folder) == lines(whole)
    assert [record["round"] for record in lines(folder)] == [1, 2, 3, 4, 5]
    assert_same_bits(
        load_file(folder / "state.safetensors"), load_file(whole / "state.safetensors")
    )
    results = [json.loads((path / "result.json").read_text()) for path in (folder, whole)]
    assert results[0]["models"] == results[1]["models"]
    assert (folder / "clients").is_dir()


def test_without_a_folder_the_last_run_that_has_not_ended_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    find = partial(results_folder, None, "digits-fpfc", load_settings("digits-fpfc"), resume=True)
    first = find()  # there is none: a new one
    assert first.is_dir()
    assert find() == first
    (first / "result.json").write_text("{}")
    second = find()
    assert second != first
    assert find() == second


# --- Which settings may change --------------------------------------------------------------------

OWN = (*TINY, "training.batch-size=40")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run of two rounds."""
    out = tmp_path_factory.mktemp("ended") / "run"
    return run(RunConfig("fedadmm-digits", changes=OWN, out=out))


@pytest.fixture
def resume(ended: Path, tmp_path: Path) -> RunConfig:
    """What resumes a copy of that run."""
    shutil.copytree(ended, tmp_path / "run")
    return RunConfig("fedadmm-digits", changes=OWN, out=tmp_path / "run", resume=True)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("seed=7", ["seed"]),
        ("data={ name = 'digits-swap' }", ["data.name", "data.options.partition"]),
        ("algorithm={ name = 'fedprox', lr = 0.3 }", ["algorithm.name"]),
    ],
)
def test_another_experiment_is_refused_before_anything_is_sent(
    change: str, named: list[str], resume: RunConfig
) -> None:
    before = content(resume.out)
    with refused(ValueError, resume.out, *named):
        prepare(replace(resume, changes=(*OWN, change)), "x")
    assert content(resume.out) == before


@pytest.mark.slow
def test_more_rounds_and_other_hyperparameters_go_on(
    resume: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (*OWN, "training.num-rounds=3", "training.batch-size=50", "algorithm.lr=0.2")
    folder = run(replace(resume, changes=changes))
    assert [record["round"] for record in lines(folder)] == [1, 2, 3]
    changed = ("training.num-rounds", "training.batch-size", "algorithm.lr")
    assert names(capsys.readouterr().out, *changed)
    written = folder / "experiment.toml"
    assert load_settings(str(written)).training.num_rounds == 3
    run(RunConfig(str(written), out=folder, resume=True))
    assert "other settings" not in capsys.readouterr().out
