"""Schedules: the paper's formulas, and draws that depend on client and round alone."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import numpy as np
import pytest

from fl_admm_strategies import GrowingEpochs, RandomDelay, RandomEpochs
from tests.support.refusals import refused


@pytest.mark.parametrize("every", [20, 2])
def test_growing_epochs_are_the_papers(every: int) -> None:
    found = [GrowingEpochs(every)(k, 3) for k in range(1, 64)]
    assert found == [ceil(k / every) for k in range(1, 64)]
    # T(k) = k + 1 from k = 0: its 800 local steps are spent in 40 rounds.
    assert [GrowingEpochs()(k + 1, 3) for k in range(5)] == [k + 1 for k in range(5)]
    assert sum(GrowingEpochs()(k, 0) for k in range(1, 40)) == 780
    assert sum(GrowingEpochs(20)(k, 0) for k in range(1, 624)) >= 10_000
    assert GrowingEpochs(2, first=4)(3, 0) == 5


def test_random_epochs_are_uniform_and_depend_on_client_and_round_alone() -> None:
    epochs = RandomEpochs(5, seed=3)
    drawn = {(r, c): epochs(r, c) for r in range(1, 101) for c in range(10)}
    counts = Counter(drawn.values())
    assert sorted(counts) == [1, 2, 3, 4, 5]
    assert all(150 < count < 250 for count in counts.values())
    assert RandomEpochs(5, seed=3)(7, 4) == drawn[7, 4]
    kept = RandomEpochs(5, by_client=True)
    assert len({kept(r, 4) for r in range(1, 20)}) == 1
    assert len({kept(1, c) for c in range(20)}) > 1


def test_out_of_range_is_refused() -> None:
    with refused(ValueError, "most", 0):
        RandomEpochs(0)
    with refused(ValueError, "every", 0):
        GrowingEpochs(0)


def test_a_random_delay_is_uniform_and_depends_on_seed_client_and_round_alone() -> None:
    delay = RandomDelay(high=20.0, low=4.0)
    drawn = np.array([[delay(k, client) for client in range(20)] for k in range(1, 101)])
    assert len(np.unique(drawn)) == drawn.size
    # Of 2000 numbers the mean is 12 with a standard deviation of 16 / sqrt(12 * 2000) = 0.103.
    assert abs(drawn.mean() - 12) < 0.5
    assert 4 <= drawn.min() < 4.5 < 19.5 < drawn.max() <= 20
    assert (
        delay(7, 3) == RandomDelay(high=20.0, low=4.0)(7, 3) != RandomDelay(20.0, 4.0, seed=1)(7, 3)
    )


def test_a_delay_may_be_each_clients_own() -> None:
    delay = RandomDelay(high=20.0, by_client=True)
    assert delay(1, 5) == delay(99, 5) != delay(1, 6)


@pytest.mark.parametrize(
    ("name", "value"), [("high", 0.0), ("low", -1.0), ("low", 2.0), ("seed", -1)]
)
def test_bounds_that_are_none_are_refused(name: str, value: Any) -> None:
    with refused(ValueError, name, value):
        RandomDelay(**{"high": 1.0, name: value})
