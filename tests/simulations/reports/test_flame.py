"""FLAME in the app: its experiments, on digits under FLAME's partitions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulations.experiments.experiment import RunConfig
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import last_evaluation, result_of, run


def small(out: Path, *changes: str) -> RunConfig:
    changes = (
        "data.name=digits",
        "data.options={ clients = 4, samples = 400, validation = true }",
        "model.name=mlr",
        "training.num-rounds=2",
        "training.batch-size=20",
        "training.evaluate-every=2",
        "algorithm.lr=0.05",
        "baselines={}",
        *changes,
    )
    return RunConfig("flame-mnist", changes=changes, out=out)


@pytest.mark.slow
def test_the_report_has_every_kind_of_model_and_its_fairness(tmp_path: Path) -> None:
    folder = run(small(tmp_path / "run", "baselines={ fedavg = {}, local = {} }"))
    result = result_of(folder)
    clients = last_evaluation(folder).values()
    titles = {
        "personal model": "personal",
        "one global model": "global",
        "hybrid, chosen on validation data": "hm-val",
        "hybrid, chosen on the test data": "hm-oracle",
    }
    assert list(result["models"]) == list(titles)
    assert list(result["baselines"]) == ["FedAvg", "Local"]
    for title, kind in titles.items():
        accuracies = [reported[f"{kind}-accuracy"] for reported in clients]
        assert result["models"][title]["mean"] == pytest.approx(np.mean(accuracies))
        losses = [reported[f"{kind}-loss"] for reported in clients]
        assert result["cells"][title]["loss-variance"] == pytest.approx(np.var(losses))
    best = [max(reported["personal-accuracy"], reported["global-accuracy"]) for reported in clients]
    oracle = result["models"]["hybrid, chosen on the test data"]["mean"]
    assert oracle == pytest.approx(np.mean(best))


@pytest.mark.parametrize("name", ["flame-mnist", "flame-fashion-mnist"])
def test_the_paper_profile_has_the_papers_settings(name: str) -> None:
    settings = load_settings(name, profile="paper")
    algorithm: Any = settings.algorithm
    assert (algorithm.lam, algorithm.rho, algorithm.lr, algorithm.local_epochs) == (1, 0.1, 0.01, 1)
    assert algorithm.published
    assert (settings.training.momentum, settings.training.weight_decay) == (0, 0)
    assert settings.data.options == {"partition": "hybrid", "clients": 10}
    assert (settings.training.batch_size, settings.training.num_rounds) == (100, 100)
    assert settings.training.fraction_train == 1
    authors: Any = load_settings(name, profile="authors")
    assert authors.algorithm.published
    assert (authors.training.momentum, authors.training.weight_decay) == (0.5, 0.01)
