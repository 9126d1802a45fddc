"""The cluster methods say the same of their clusters as FPFC does, as algorithm and as baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies import load_models
from simulations.experiments.experiment import RunConfig
from tests.simulations.quick_runs import last_evaluation, result_of, run

CHANGES = (
    "data.options.clients=6",
    "training.num-rounds=2",
    "training.evaluate-every=2",
    "training.fraction-train=1.0",
    # Cuts {the six} in round 1, and both parts, of three at least, in round 2.
    "algorithm={ name = 'cfl', eps1 = 9.0, eps2 = 0.0, warmup-rounds = 0, local-epochs = 2 }",
    "baselines.ifca={ num-clusters = 3 }",
)


@pytest.mark.slow
def test_clusters_are_reported_of_an_algorithm_and_of_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(RunConfig("digits-fpfc", changes=CHANGES, out=tmp_path / "run"))
    result = result_of(folder)
    num = result["cells"]["cluster model"]["num"]
    assert num > 1
    assert -1 <= result["cells"]["cluster model"]["ari"] <= 1
    of = result["baselines"]["IFCA"]["cells"]["cluster model"]
    took = [
        max(range(3), key=lambda k: reported[f"took-{k}"])
        for reported in last_evaluation(folder, "metrics-ifca.jsonl").values()
    ]
    assert of["num"] == len(set(took))
    assert -1 <= of["ari"] <= 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Num: clusters found. ARI: 1 = the true clusters" in shown
    models = load_models(folder)
    assert sorted(models.clusters) == list(range(1, num + 1))
    assert len(models.cluster_of) == 6
    assert np.array_equal(sorted(models.cluster_of), range(6))
