"""FedAPM in the app: its experiments, on digits."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from simulations.experiments.experiment import RunConfig
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import last_evaluation, result_of, run

DIGITS = (
    "data.name=digits",
    "data.options={ clients = 4, samples = 300 }",
    "training.num-rounds=2",
    "training.fraction-train=0.5",
    "training.evaluate-every=2",
    "training.batch-size=20",
    "baselines={ fedavg = {}, local = {}, fedalt = { personal = '^fc3' } }",
)
MLP = (*DIGITS, "model.name=mlp", "algorithm.personal=^fc3", "algorithm.lr=0.5")


@pytest.mark.slow
def test_fedapm_reports_both_kinds_of_model_beside_the_baselines(tmp_path: Path) -> None:
    folder = run(RunConfig("fedapm-cifar10", changes=MLP, out=tmp_path / "run"))
    result = result_of(folder)
    clients = last_evaluation(folder).values()
    assert len(clients) == 4
    titles = {"personal model": "personal", "own part with the shared one": "global"}
    assert list(result["models"]) == list(titles)
    assert list(result["baselines"]) == ["FedAvg", "Local", "FedAlt"]
    assert list(result["baselines"]["FedAlt"]["models"]) == ["personal model"]
    for title, kind in titles.items():
        for metric in ("accuracy", "f1", "auc"):
            assert all(0 <= reported[f"{kind}-{metric}"] <= 1 for reported in clients)
        accuracies = [reported[f"{kind}-accuracy"] for reported in clients]
        assert result["models"][title]["mean"] == pytest.approx(np.mean(accuracies))
    # What the server keeps is the shared part, fc1 64 x 128 + 128 and fc2 128 x 64 + 64.
    state = load_file(folder / "state.safetensors")
    assert state["state/consensus/w"].shape == (16576,)


def test_the_experiments_are_the_papers() -> None:
    for name, clients in (("fedapm-cifar10", 20), ("fedapm-har", None)):
        settings = load_settings(name, profile="paper")
        assert settings.training.fraction_train == 0.3
        assert settings.algorithm.rho == 0.01 * (clients or 30)  # type: ignore[attr-defined]
        assert settings.algorithm.local_epochs == 3  # type: ignore[attr-defined]
        assert settings.data.options.get("clients") == clients
        # HAR stands in for KU-HAR, beside which the published numbers do not stand.
        assert ("FedAPM" in settings.published) == (name == "fedapm-cifar10")
        load_settings(name, profile="quick")
