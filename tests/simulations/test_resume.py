"""A run of the app that is interrupted and resumed has the results of one that was not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import simulations.run
from simulations.config import RunConfig
from simulations.run import results_folder
from tests.simulations.test_run import run
from tests.support import assert_same_bits

SMALL = (
    "data.name=digits",
    "data.options={ clients = 4, samples = 400 }",
    "model.name=mlp",
    "algorithm.personal=^fc3",
    "algorithm.lr=0.5",
    "training.batch-size=20",
    "training.num-rounds=5",
    "training.fraction-train=0.5",
    "training.evaluate-every=2",
    "training.checkpoint-every=2",
    "training.client-state=folder",
)


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        del record["seconds"], record["bytes"]
    return records


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # FedAPM's clients keep parameters that nobody else has.
    whole = run(RunConfig("fedapm-cifar10", changes=SMALL, out=tmp_path / "whole"))
    config = RunConfig("fedapm-cifar10", changes=SMALL, out=tmp_path / "run")
    write = simulations.run.write_metrics_line

    def interrupt(file: Any, record: Any) -> None:
        write(file, record)
        if record["round"] == 3:  # after the checkpoint of round 2
            file.write('{"round": 4, "half a li')
            raise InterruptedError

    monkeypatch.setattr(simulations.run, "write_metrics_line", interrupt)
    with pytest.raises(InterruptedError):
        run(config)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="or --resume to continue"):
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
    config = RunConfig("digits-fpfc", resume=True)
    first = results_folder(config)  # there is none: a new one
    assert first.is_dir()
    assert results_folder(config) == first
    (first / "result.json").write_text("{}")
    second = results_folder(config)
    assert second != first
    assert results_folder(config) == second
