"""The line below a picture's title has the settings of the run."""

from __future__ import annotations

import pytest

from simulations.experiments.experiment import RunConfig, load_experiment
from simulations.settings.tables import setting_of


def caption(experiment: str, *changes: str) -> list[str]:
    federation = load_experiment(RunConfig(experiment, changes=changes)).federation
    return setting_of(federation.problem.settings).split(", ")


def names(parts: list[str]) -> set[str]:
    return {part.partition("=")[0] for part in parts}


def test_a_rule_and_a_bound_are_there_where_they_act() -> None:
    parts = caption("ditto-digits", "algorithm.aggregation=krum", "algorithm.max-norm=2.0")
    assert {"aggregation=krum", "malicious=0.2", "max-norm=2"} <= set(parts)


def test_privacy_is_there() -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra 'privacy'")
    table = "algorithm.privacy={ clip = 0.5, noise-multiplier = 2.0, delta = 1e-3 }"
    parts = caption("ditto-digits", table)
    assert {"privacy=(clip=0.5", "noise-multiplier=2", "delta=0.001)"} <= set(parts)


def test_a_switch_is_there_where_it_was_turned() -> None:
    fedcp = "algorithm={ name = 'fedcp', gumbel = false }"
    assert "gumbel=false" in caption("ditto-digits", fedcp)
    assert "gumbel=true" in caption("ditto-digits", "algorithm={ name = 'fedcp' }")
