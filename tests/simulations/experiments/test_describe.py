"""`describe`: every setting of every experiment, what it means, and its default."""

from __future__ import annotations

import pytest

from simulations.experiments.describe import described, settings_in
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import EXPERIMENTS
from tests.simulations.screen import shown


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_setting_has_a_meaning_and_can_be_set(name: str) -> None:
    settings = load_settings(name)
    found = list(settings_in(settings))
    assert [one.key for one in found if not one.meaning] == []
    assert len({one.key for one in found}) == len(found)
    # What is shown is a key that `--set` knows: setting it to what it is changes nothing.
    numbers = [one for one in found if isinstance(one.value, int | float)]
    again = load_settings(name, changes=[f"{o.key}={str(o.value).lower()}" for o in numbers])
    assert again.algorithm == settings.algorithm
    assert again.training == settings.training


def test_what_is_shown_of_a_setting() -> None:
    settings = load_settings("flame-mnist", profile="quick")
    text = shown(described("flame-mnist", settings))
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "flame: Federated learning by ADMM with Moreau envelopes (FLAME)." in lines
    # the value of the profile, and the default of the constructor
    assert "algorithm.lr = 0.03  (default: 0.1)" in lines
    assert "algorithm.lam = 1.0" in lines
    assert "    lambda, how strongly a personal model is held near the global one." in lines
    assert "training.batch-size = 20  (default: not given)" in lines
    assert 'data.options.partition = "hybrid"  (default: "label-count")' in lines
    assert "ditto: lam = 1.0" in lines
    assert "paper: the settings as they are" in lines
    assert "authors: training.momentum = 0.5," in " ".join(lines)


def test_a_table_among_the_settings_is_shown_with_its_own() -> None:
    found = {one.key: one for one in settings_in(load_settings("synthetic-s1"))}
    assert found["algorithm.penalty"].value == "scad"
    assert found["algorithm.penalty.lam"].value == 0.6
    assert found["algorithm.penalty.a"].default == 3.7
    assert "the shape" in found["algorithm.penalty.a"].meaning
