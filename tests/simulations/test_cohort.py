"""The setting training.cohort: clients of the app that train together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clients.toolkit.solving import cohort as cohort_module
from fl_admm_strategies import InProcessGrid
from simulations.experiments.experiment import load_experiment
from simulations.experiments.run_config import RunConfig
from simulations.running.apps import make_client_app
from tests.support.federation import assert_same_bits


def run(cohort: str, num_nodes: int, *changes: str) -> Any:
    config = RunConfig(
        "synthetic-s1",
        changes=("data.options.clients=4", f"training.cohort={cohort}", *changes),
    )
    federation = load_experiment(config).federation
    strategy = federation.strategy()
    grid = InProcessGrid(make_client_app(config), num_nodes)
    strategy.start(grid, federation.initial_arrays(strategy), 2, evaluate_every=9)
    return strategy.state_dict()


@pytest.mark.parametrize(
    "changes",
    [
        (),
        pytest.param(("training.batch-size=64", "training.momentum=0.5"), marks=pytest.mark.slow),
    ],
)
def test_clients_of_an_experiment_train_together(
    changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    descend = cohort_module.descend

    def counted(members: Any, **options: Any) -> Any:
        sizes.append(len(members))
        return descend(members, **options)

    monkeypatch.setattr(cohort_module, "descend", counted)
    alone = run("false", 2, "training.fraction-train=1.0", *changes)
    assert not sizes
    together = run("true", 1, "training.fraction-train=1.0", *changes)
    assert sum(sizes) == 8
    assert_same_bits(run("true", 3, "training.fraction-train=1.0", *changes), together)
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=1e-3, atol=1e-4, err_msg=name)
