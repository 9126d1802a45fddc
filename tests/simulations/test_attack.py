"""The table ``[attack]``: any experiment, its baselines too, with malicious clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import TINY, last_evaluation, result_of, run
from tests.support.federation import assert_same_bits, differs
from tests.support.refusals import refused

BASELINES = "baselines={ fedavg = {}, fedprox = { mu = 0.1 } }"


def run_with(out: Path, *changes: str) -> Path:
    return run(RunConfig("fedadmm-digits", changes=(*TINY, BASELINES, *changes), out=out), nodes=4)


@pytest.mark.slow
def test_malicious_clients_attack_all_methods_and_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_with(tmp_path / "plain")
    none = run_with(tmp_path / "none", "attack.kind=gaussian", "attack.ratio=0.1")  # of 4: nobody
    for file in ("state.safetensors", "metrics-fedavg.jsonl", "metrics-fedprox.jsonl"):
        if file.endswith("safetensors"):
            assert_same_bits(load_file(none / file), load_file(plain / file))
        else:
            assert last_evaluation(none, file) == last_evaluation(plain, file)
    assert "Malicious" not in capsys.readouterr().out
    changes = ("attack.kind=gaussian", "attack.ratio=0.25")
    bad = run_with(tmp_path / "bad", *changes)
    (malicious,) = result_of(bad)["malicious"]
    assert "Malicious: 1 of 4 clients (gaussian)" in " ".join(capsys.readouterr().out.split())
    honest = {str(client) for client in range(4)} - {str(malicious)}
    for file in ("metrics.jsonl", "metrics-fedavg.jsonl", "metrics-fedprox.jsonl"):
        assert last_evaluation(bad, file).keys() == honest
        assert last_evaluation(bad, file) != {c: last_evaluation(plain, file)[c] for c in honest}
    held = run_with(tmp_path / "held", *changes, "algorithm.max-norm=auto")
    assert differs(load_file(held / "state.safetensors"), load_file(bad / "state.safetensors"))


# Dealt without flwr-datasets, whose import takes seconds.
FULL_BATCH = (
    "data.options={ partition = 'noise', clients = 4 }",
    "training={ num-rounds = 1 }",
)
LABELS = ("attack.kind=random-labels", "attack.ratio=0.5", "data.options.validation=true")


def test_poisoned_labels_are_what_malicious_clients_learn_from_and_all_that_differs() -> None:
    poisoned, honest = (
        load_experiment(RunConfig("ditto-digits", changes=(*FULL_BATCH, *changes), seed=2)).problem
        for changes in (LABELS, LABELS[2:])
    )
    assert len(poisoned.malicious) == 2
    for client in range(4):
        bad, good = (problem.client_arguments(client) for problem in (poisoned, honest))
        for part in ("train_loader", "validation_loader", "test_loader"):
            (x, y), (true_x, true_y) = next(iter(bad[part])), next(iter(good[part]))
            assert torch.equal(x, true_x)
            as_they_were = client not in poisoned.malicious or part == "test_loader"
            assert torch.equal(y, true_y) is as_they_were, (client, part)
            assert y.dtype == true_y.dtype


@pytest.mark.parametrize("name", ["robustness-ratings", "fedgia-v1"])
def test_where_there_are_no_classes_no_labels_can_be_poisoned(name: str) -> None:
    with refused(ValueError, "attack.kind", "random-labels"):
        load_experiment(RunConfig(name, changes=LABELS[:2]))
    for change in ("attack.kind=zero", "attack.ratio=1.0", "attack.seed=3"):
        with refused(ValueError, change.partition("=")[0]):
            load_settings(name, changes=[*LABELS[:2], change])
