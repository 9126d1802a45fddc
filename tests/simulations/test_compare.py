"""Every method on the same data: the experiments `compare` and `movielens-100k`, reduced."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from simulations.data import FederatedData, RatingsData
from simulations.data.files import data_root
from simulations.experiments.catalogue import read_experiment
from simulations.experiments.experiment import RunConfig
from simulations.methods.tables import METHODS, data_of
from tests.simulations.quick_runs import result_of, rounds_of, run

SHORT = ("training.num-rounds=1",)
FEW_STEPS = [f"baselines.{name}.local-rounds=1" for name in ("lp-proj", "pfedme")]
ONE_EPOCH = (*SHORT, "algorithm.local-epochs=1", "training.batch-size=50", *FEW_STEPS)
FEW = "data.options={{ partition = '{}', clients = 5, samples = 300 }}"


def attack(kind: str) -> tuple[str, str]:
    """Return the changes by which one of five clients is malicious."""
    return f"attack.kind={kind}", "attack.ratio=0.2"


RUNS = {
    "digits": ("compare", "quick", (*ONE_EPOCH, "data.options.clients=6")),
    "mnist": ("compare", "mnist", (*ONE_EPOCH, FEW.format("hybrid"), *attack("random-labels"))),
    "cifar10": (
        *("compare", "cifar10"),
        (*ONE_EPOCH, FEW.format("noise").replace("300", "100"), *attack("sign-flip")),
    ),
    "s1": ("compare", "s1", (*ONE_EPOCH, "data.options.clients=8")),
    "ml-100k": ("movielens-100k", "quick", SHORT),
}
FILES = {"mnist": "MNIST", "cifar10": "cifar10", "ml-100k": "ml-100k"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_method_runs_on_the_same_data(name: str, tmp_path: Path) -> None:
    experiment, profile, changes = RUNS[name]
    if name in FILES and not (data_root(None) / FILES[name]).exists():
        pytest.skip(f"needs {FILES[name]} under $FL_ADMM_DATA")
    folder = run(RunConfig(experiment, profile, changes, out=tmp_path / "run"))
    result = result_of(folder)
    compared = read_experiment(experiment)["baselines"]
    assert len(result["baselines"]) == len(compared)
    for row in (result, *result["baselines"].values()):
        assert row["models"]
        for kind, score in row["models"].items():
            assert math.isfinite(score["mean"]), (row, kind)
    if name in ("digits", "s1"):  # where the truth is known
        cells = [row["cells"].values() for row in result["baselines"].values()]
        counts = [sum("ari" in cell for cell in rows) for rows in cells]
        assert counts.count(1) == 5  # AsyncFPFC, CFL, FPFC, IFCA, PACFL
        assert counts.count(0) == len(counts) - 5
    malicious = result.get("malicious", [])
    assert len(malicious) == (name in ("mnist", "cifar10"))
    for baseline in compared:
        (line,) = rounds_of(folder, f"metrics-{baseline}.jsonl")
        assert line["round"] == 1
        measured = {int(client) for client in line["evaluate"]}
        assert measured == set(range(len(measured) + len(malicious))) - {*malicious}, baseline


@pytest.mark.slow  # not to stop who is about to add a method: it is one line in a file
@pytest.mark.parametrize(
    ("experiment", "data"), [("compare", FederatedData), ("movielens-100k", RatingsData)]
)
def test_every_method_that_applies_is_compared(experiment: str, data: type) -> None:
    settings = read_experiment(experiment)
    listed = {settings["algorithm"]["name"], *settings["baselines"]}
    applies = {name for name, method in METHODS.items() if data in data_of(method)}
    applies -= {"fedease"}  # no stars are predicted: movielens-ranking has it
    assert listed == applies, f"add it to simulations/experiments/{experiment}.toml"
