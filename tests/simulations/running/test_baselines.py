"""Methods run for comparison: the experiment's own code, data, seed, start and rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fl_admm_strategies import StepDecay
from simulations.experiments.experiment import RunConfig
from simulations.experiments.loading import load_settings
from simulations.methods import completed
from tests.simulations.quick_runs import TINY, last_evaluation, result_of, rounds_of, run
from tests.support.federation import assert_same_bits


def config_of(out: Path, *changes: str) -> RunConfig:
    return RunConfig("fedadmm-digits", changes=(*TINY, *changes), out=out)


DITTO = "baselines.ditto={ lam = 0.5, lr = 0.1, personal-epochs = 3 }"


@pytest.mark.slow
def test_a_baseline_is_what_it_is_as_an_experiments_own_method(tmp_path: Path) -> None:
    folder = run(config_of(tmp_path / "run", DITTO, "report.metrics=['f1']"))
    ditto = result_of(folder)["baselines"]["Ditto"]
    assert [one["round"] for one in rounds_of(folder, "metrics-ditto.jsonl")] == [1, 2]
    clients = last_evaluation(folder, "metrics-ditto.jsonl").values()
    assert len(clients) == 4
    for kind, title in (("personal", "personal model"), ("global", "one global model")):
        accuracies = [metrics[f"{kind}-accuracy"] for metrics in clients]
        assert ditto["models"][title]["mean"] == pytest.approx(np.mean(accuracies))
        f1 = 100 * np.mean([metrics[f"{kind}-f1"] for metrics in clients])
        assert ditto["cells"][title]["f1"] == pytest.approx(f1)
    table = "{ name = 'ditto', lam = 0.5, lr = 0.1, personal-epochs = 3, local-epochs = 1 }"
    alone = result_of(run(config_of(tmp_path / "alone", f"algorithm={table}")))
    assert alone["models"] == ditto["models"]


@pytest.mark.slow
def test_what_is_left_out_is_the_algorithms() -> None:
    changes = ["baselines={ fedavg = {}, local = { lr = 0.7 }, fedgia = {} }"]
    settings = load_settings("digits-fpfc", changes=changes)
    lent = {
        name: completed(table, settings.algorithm).arguments()
        for name, table in settings.baselines.methods().items()
    }
    assert lent["fedavg"].items() >= {"lr": 0.3, "local_epochs": 10}.items()
    assert lent["local"].items() >= {"lr": 0.7, "local_epochs": 10}.items()
    assert "lr" not in lent["fedgia"]
    # So is a step size that falls.
    settings = load_settings("mnist-swap", changes=["baselines={ local = {} }"])
    local = settings.baselines.methods()["local"]
    assert completed(local, settings.algorithm).arguments()["lr"] == StepDecay(0.01, 0.9, 5)
    # Of epochs that grow, likewise.
    changes = ["algorithm.local-epochs={type='growing', every=1, first=4}", "baselines.local={}"]
    settings = load_settings("digits-fpfc", changes=changes)
    local = settings.baselines.methods()["local"]
    assert completed(local, settings.algorithm).arguments()["local_epochs"] == 4


@pytest.mark.slow
def test_baselines_change_nothing_of_the_experiment(tmp_path: Path) -> None:
    compared = "baselines={ fedavg = {}, local = {} }"
    first = run(config_of(tmp_path / "first", compared))
    # They train the clients that the experiment sampled: the same seed and share.
    sampled, of_local = (
        [{*one["train"]} for one in rounds_of(first, file)]
        for file in ("metrics.jsonl", "metrics-local.jsonl")
    )
    assert sampled == of_local
    without = run(config_of(tmp_path / "without"))
    assert_same_bits(*(load_file(f / "state.safetensors") for f in (first, without)))
    assert result_of(without)["baselines"] == {}
