"""FedAvg and its robust rules as methods of an experiment, by the rules' names."""

from __future__ import annotations

import numpy as np
import pytest

from fl_admm_strategies import FedAvg
from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.methods import grid_of
from tests.support.refusals import refused

ATTACKED = ("attack.kind=gaussian", "attack.ratio=0.17")  # one of 6
EVERYBODY = ("data.options.clients=6", "training.fraction-train=1.0")


def trained(name: str, *changes: str) -> FedAvg:
    """Return a method of an experiment after a round."""
    table = f"algorithm={{ name = '{name}', lr = 0.3 }}"
    config = RunConfig("digits-fpfc", changes=(*EVERYBODY, table, *changes))
    federation = load_experiment(config).federation
    strategy: FedAvg = federation.strategy()
    with grid_of(federation, 2) as grid:
        strategy.start(grid, federation.problem.initial_arrays(strategy), 1, progress=False)
    return strategy


def largest(strategy: FedAvg) -> float:
    return max(float(np.abs(array).max()) for array in strategy.global_model().values())


RULES = {
    "krum": "Krum",
    "multi-krum": "multi-Krum",
    "fedmedian": "FedMedian",
    "fedtrimmedavg": "FedTrimmedAvg",
}


@pytest.mark.slow
def test_a_robust_rule_endures_what_the_mean_does_not() -> None:
    unbounded = (*ATTACKED, "algorithm.max-norm=inf")  # the default would refuse this noise
    assert largest(trained("fedavg", *unbounded)) > 10
    for name, title in RULES.items():
        strategy = trained(name, *unbounded)
        assert largest(strategy) < 1
        assert len(strategy.train_metrics[1]) == 6  # it is said of everybody what happened
        assert len(strategy.evaluate_metrics[1]) == 5  # but measured of the honest ones only
        assert strategy.title == title


@pytest.mark.slow
def test_a_rule_with_too_few_clients_is_refused_before_anything_runs() -> None:
    too_few = ("data.options.clients=6", "training.fraction-train=0.5")
    krum = "{ aggregation = 'krum', malicious = 0.4 }"
    for change in (
        "algorithm={ name = 'krum', malicious = 0.4 }",
        "baselines.krum.malicious=0.4",  # now, not after the experiment
        f"baselines.ditto={krum}",
        f"baselines.fedavg={krum}",
    ):
        with refused(ValueError, "3 uploads", "krum"):
            load_experiment(RunConfig("digits-fpfc", changes=(*too_few, change)))
