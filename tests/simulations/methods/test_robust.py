"""FedAvg and its robust rules as methods of an experiment, by the rules' names."""

from __future__ import annotations

import pytest

from simulations.experiments.experiment import RunConfig, load_experiment
from tests.support.refusals import refused

ATTACKED = ("attack.kind=gaussian", "attack.ratio=0.17")  # one of 6
EVERYBODY = ("data.options.clients=6", "training.fraction-train=1.0")


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
