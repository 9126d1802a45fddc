"""Settings that do nothing in a run are known, so that its log and captions leave them out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clients as of
import fl_admm_strategies as library
from fl_admm_strategies import SmoothedSCAD, StatefulStrategy
from fl_admm_strategies.runtime.common.settings import parameters_of
from tests.contract.test_settings import STRATEGIES, given
from tests.support.cases import Case, grid_of, run
from tests.support.pace import fast

FEW = {"lr": 0.2, "local_epochs": 1}
EXCESS = {"on_excess": "refuse"}

# A run, and other values of what is idle in it.
IDLE: dict[str, tuple[Callable[..., Any], type, dict[str, Any], dict[str, Any]]] = {
    "FedAvg": (library.FedAvg, of.SGDClient, {}, {"malicious": 0.4, **EXCESS}),
    "FedAvg-median": (
        library.FedAvg,
        of.SGDClient,
        {"aggregation": "median", "max_norm": 100.0},
        {"malicious": 0.4},
    ),
    "FedAvg-unevaluated": (
        library.FedAvg,
        of.SGDClient,
        {"fraction_evaluate": 0.0},
        {"min_evaluate_nodes": 2},
    ),
    "FPFC": (
        library.FPFC,
        of.FPFCClient,
        {"penalty": SmoothedSCAD(0.5), **FEW},
        {"consensus_rounds": 5, "validation_share": 0.5, **EXCESS},
    ),
    "FedAPM": (
        library.FedAPM,
        of.FedAPMClient,
        {"personal": "^head", **FEW},
        {"tolerance_decay": 0.5, "max_steps": 2},
    ),
    "FedAPM-tolerance": (
        library.FedAPM,
        of.FedAPMClient,
        {"personal": "^head", "lr": 0.2, "tolerance": 0.1, "max_steps": 3},
        {"local_epochs": 1},
    ),
    "FLAME": (
        library.FLAME,
        of.FLAMEClient,
        FEW,
        {"tolerance": 0.1, "tolerance_decay": 0.5, "max_steps": 2},
    ),
    "FLAME-accuracy": (
        library.FLAME,
        of.FLAMEClient,
        {"lr": 0.2, "theta_step": "accuracy", "max_steps": 3},
        {"local_epochs": 1},
    ),
    "FedALA": (
        library.FedALA,
        of.FedALAClient,
        {"layers": 0, "lr": 0.2},
        {"sample": 0.2, "weight_lr": 0.1},
    ),
    "IFCA": (
        library.IFCA,
        of.IFCAClient,
        {"num_clusters": 2, "lr": 0.2},
        {"restart_rounds": 2, "divisor": "cluster"},
    ),
    "PerFedAvg-fo": (
        library.PerFedAvg,
        of.PerFedAvgClient,
        {"mode": "fo", "local_steps": 2},
        {"delta": 0.5, "local_epochs": 2},
    ),
    "PerFedAvg-finetune": (
        library.PerFedAvg,
        of.PerFedAvgClient,
        {"mode": "finetune"},
        {"delta": 0.5, "local_steps": 3},
    ),
}


@pytest.mark.parametrize("name", fast(["FLAME-accuracy", "IFCA"], IDLE))
def test_an_idle_setting_does_nothing(name: str) -> None:
    kind, client, settings, others = IDLE[name]
    one = kind(**settings, seed=1)
    assert others.keys() <= one.idle_settings
    other = kind(**settings | others, seed=1)
    for strategy in (one, other):
        case = Case(name, kind, client)
        run(case, grid_of(case), 2, strategy)
    assert one.train_metrics == other.train_metrics
    assert one.evaluate_metrics == other.evaluate_metrics
    for (key, array), (_, same) in zip(
        one.global_model().items(), other.global_model().items(), strict=True
    ):
        assert np.array_equal(array, same), key


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_what_is_idle_is_a_setting(kind: Any) -> None:
    assert given(kind).idle_settings <= parameters_of(kind).keys()


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (library.FedAvg(max_norm=1.0), "on_excess"),
        (library.FedAvg(aggregation="krum"), "malicious"),
        (library.FPFC(), "on_excess"),  # which bounds uploads by itself
        (library.FPFC(), "consensus_rounds"),
        (library.FPFC(library.LambdaPath([0.0, 0.5])), "validation_share"),
        (library.FLAME(theta_step="accuracy"), "max_steps"),
        (library.IFCA(2, restarts=3), "restart_rounds"),
        (library.PerFedAvg(), "local_steps"),
    ],
)
def test_what_takes_part_is_not_idle(strategy: StatefulStrategy, name: str) -> None:
    assert name not in strategy.idle_settings


def test_the_log_has_what_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    library.FedAvg(lr=0.3).summary()
    logged = [record.getMessage().strip(" \t├└─>") for record in caplog.records]
    named = {line.partition(":")[0] for line in logged[1:]}
    assert "lr: 0.3" in logged
    assert named.isdisjoint({"aggregation", "malicious", "on_excess", "max_norm"})


def test_the_log_has_what_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    library.FedAvg(aggregation="trimmed-mean", max_norm=3.0).summary()
    logged = [record.getMessage().strip(" \t├└─>") for record in caplog.records]
    expected = {"aggregation: trimmed-mean", "malicious: 0.2", "max_norm: 3.0", "on_excess: clip"}
    assert expected <= set(logged)
