"""`describe`: every setting of every experiment, what it means, and its default."""

from __future__ import annotations

import pytest

from simulations.experiments.describe import settings_in
from simulations.experiments.loading import load_settings
from tests.simulations.quick_runs import EXPERIMENTS


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


def test_a_table_among_the_settings_is_shown_with_its_own() -> None:
    found = {one.key: one for one in settings_in(load_settings("synthetic-s1"))}
    assert found["algorithm.penalty"].value == "scad"
    assert found["algorithm.penalty.lam"].value == 0.6
    assert found["algorithm.penalty.a"].default == 3.7
    assert "the shape" in found["algorithm.penalty.a"].meaning
