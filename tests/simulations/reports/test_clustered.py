"""The cluster methods say the same of their clusters as FPFC does, as algorithm and as baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_admm_strategies import CFL, IFCA, PACFL, load_models
from simulations.experiments.run_config import RunConfig
from simulations.problems import TorchProblem
from simulations.reports import report_of
from simulations.reports.clustered import ClusteredReport
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
    labels = result["clusters"]
    num = len(set(labels))
    assert num > 1
    assert result["cells"]["cluster model"]["num"] == num
    assert result["cells"]["cluster model"]["ari"] == result["clustering"]["ari"]
    of = result["baselines"]["IFCA"]["cells"]["cluster model"]
    took = [
        max(range(3), key=lambda k: reported[f"took-{k}"])
        for reported in last_evaluation(folder, "metrics-ifca.jsonl").values()
    ]
    assert of["num"] == len(set(took))
    assert -1 <= of["ari"] <= 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"CFL found {num} groups among 6 clients" in shown
    assert "It was not told how many there are" in shown
    assert "with their cluster's" in shown
    models = load_models(folder)
    assert sorted(models.clusters) == list(range(1, num + 1))
    assert len(models.cluster_of) == 6
    assert np.array_equal(sorted(models.cluster_of), range(6))


@pytest.mark.parametrize("strategy", [CFL, IFCA, PACFL])
def test_all_have_this_report(strategy: type) -> None:
    assert type(report_of(strategy, TorchProblem)) is ClusteredReport
