"""Clients held out of an experiment, which join after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simulations.data import FederatedData, load, without_clients
from simulations.experiments.experiment import RunConfig
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import result_of, run
from tests.support.refusals import refused

QUARTER = "newcomers.share=0.25"


def test_a_share_of_every_true_cluster_is_held_out() -> None:
    data = load("digits-swap", 0)
    assert isinstance(data, FederatedData)
    stay, new = without_clients(data, 0.25, 3)
    assert np.bincount(stay.true_clusters).tolist() == [3, 3, 3]
    assert np.bincount(new.true_clusters).tolist() == [1, 1, 1]
    both = [id(client) for client in (*stay.clients, *new.clients)]
    assert sorted(both) == sorted(id(client) for client in data.clients)
    again, other = (without_clients(data, 0.25, seed)[1].clients for seed in (3, 4))
    assert [id(c) for c in again] == [id(c) for c in new.clients] != [id(c) for c in other]
    with refused(ValueError, "newcomers.share", "0.01", 12):
        without_clients(data, 0.01, 0)
    with refused(ValueError, "newcomers", "fedadmm"):  # which nobody can join afterwards
        load_settings("fedadmm-digits", changes=[QUARTER])


@pytest.mark.slow
def test_the_report_has_their_groups_and_their_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (
        QUARTER,
        "newcomers.num-rounds=4",
        'algorithm.penalty={type = "scad", lam = 0.6}',
        "training.num-rounds=4",
        "training.evaluate-every=4",
    )
    found = result_of(run(RunConfig("digits-fpfc", changes=changes, out=tmp_path / "out")))
    joined = found["newcomers"]
    assert sorted(joined["groups"]) == ["0", "1", "2"]
    accuracies = [reported["personal-accuracy"] for reported in joined["clients"].values()]
    rows = found["new_clients"]["FPFC"]["models"]
    assert found["baselines"] == {}  # it is neither their data nor their number of rounds
    assert rows["personal model"]["mean"] == pytest.approx(np.mean(accuracies))
    assert list(found["new_clients"]) == ["FPFC", "Local"]
    assert "of 3 new clients joined a group" in " ".join(capsys.readouterr().out.split())
