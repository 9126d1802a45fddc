"""What several test modules share: running an experiment and reading what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fl_admm_strategies import run_in_process
from simulations.experiments.catalogue import experiment_names
from simulations.experiments.experiment import RunConfig
from simulations.running.apps import make_client_app, make_server_app
from simulations.running.run import prepare

# What tests of loading see in the inner loop; the others are like one of these, and slow tests.
_ONE_OF_A_KIND = {"async-digits", "digits-fpfc", "fedapm-har", "fedgia-v1", "flame-mnist"}
_ONE_OF_A_KIND |= {"housing-bodyfat", "mnist-swap", "movielens-100k", "robustness", "synthetic-s1"}
EXPERIMENTS = [
    pytest.param(name, marks=[] if name in _ONE_OF_A_KIND else pytest.mark.slow)
    for name in experiment_names()
]

TINY = (
    "data.options={ partition = 'label-count', clients = 4, samples = 300 }",
    "training.num-rounds=2",
    "training.evaluate-every=2",
    "algorithm.local-epochs=1",
    "baselines={}",
)
"""What makes a run of fedadmm-digits a matter of a tenth of a second."""


def run(config: RunConfig, *, nodes: int = 2, workers: int = 0) -> Path:
    """Run an experiment in this process; return its results folder."""
    prepared = prepare(config, "inprocess")
    server_app, client_app = make_server_app(prepared), make_client_app(config)
    run_in_process(server_app, client_app, nodes, workers=workers)
    return prepared.out


def strict_json(text: str) -> Any:
    """Parse JSON as other languages do: NaN and Infinity are no numbers."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def result_of(folder: Path) -> Any:
    """Return what ``result.json`` holds."""
    return strict_json((folder / "result.json").read_text(encoding="utf-8"))


def rounds_of(folder: Path, file: str = "metrics.jsonl") -> list[Any]:
    """Return the rounds of training in a file of metrics."""
    lines = (folder / file).read_text(encoding="utf-8").splitlines()
    return [one for one in map(strict_json, lines) if one["round"]]


def last_evaluation(folder: Path, file: str = "metrics.jsonl") -> dict[str, dict[str, float]]:
    """Return every client's metrics of the last round."""
    evaluated: dict[str, dict[str, float]] = rounds_of(folder, file)[-1]["evaluate"]
    return evaluated
