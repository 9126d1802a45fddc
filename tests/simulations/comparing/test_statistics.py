"""Intervals, tests and ranks over seeds, against SciPy and numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from simulations.comparing.statistics import (
    holm,
    mean_of,
    pairs_of,
    ranks_of,
)

SCORES = np.array([[90.0, 91, 92, 93, 94], [80, 85, 95, 81, 82], [70, 71, 72, 73, 74]])


def test_the_interval_is_scipys_bootstrap() -> None:
    found = mean_of(SCORES[1])
    theirs = stats.bootstrap((SCORES[1],), np.mean, rng=np.random.default_rng(0))
    assert found.value == SCORES[1].mean()
    assert (found.low, found.high) == tuple(theirs.confidence_interval)
    assert found.low < found.value < found.high
    assert found.std == pytest.approx(np.std(SCORES[1], ddof=1))


def test_holm_multiplies_the_smallest_by_all_the_next_by_one_less_and_never_falls() -> None:
    # Sorted .01, .03, .04: times 3, 2, 1 that is .03, .06, .04, and the last may not fall.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_pairs_have_wilcoxons_p_and_the_seeds_on_which_the_first_is_better() -> None:
    pairs = pairs_of(SCORES, higher_is_better=True)
    assert [(pair.first, pair.second, pair.wins) for pair in pairs] == [
        (0, 1, 4),
        (0, 2, 5),
        (1, 2, 5),
    ]
    # Five differences of one sign: two of the 32 signs are as extreme.
    assert [pair.p for pair in pairs] == [
        stats.wilcoxon(SCORES[0], SCORES[1]).pvalue,
        *(0.0625, 0.0625),
    ]
    assert [pair.holm for pair in pairs] == pytest.approx(holm([pair.p for pair in pairs]))
    assert pairs[1].difference.value == 20
    assert pairs_of(SCORES, higher_is_better=False)[0].wins == 1
    (same,) = pairs_of(SCORES[[0, 0]], higher_is_better=True)
    assert (same.p, same.holm, same.wins) == (1.0, 1.0, 0)


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728)])
def test_the_critical_difference_has_demsars_table_5(methods: int, q: float) -> None:
    scores = np.arange(methods)[:, None] + np.zeros((1, 6))
    expected = q * math.sqrt(methods * (methods + 1) / 36)
    assert ranks_of(scores, higher_is_better=True).critical == pytest.approx(expected, rel=1e-3)


def test_ranks_are_means_over_seeds_with_ties_shared() -> None:
    ranks = ranks_of(SCORES, higher_is_better=True)
    assert ranks.means == pytest.approx([1.2, 1.8, 3.0])
    assert ranks.friedman == stats.friedmanchisquare(*SCORES).pvalue
    assert ranks_of(SCORES, higher_is_better=False).means == pytest.approx([2.8, 2.2, 1.0])
    tied = ranks_of(np.ones((3, 4)), higher_is_better=True)
    assert (tied.means, tied.friedman) == ([2.0, 2.0, 2.0], 1.0)
    assert math.isnan(ranks_of(SCORES[:2], higher_is_better=True).friedman)
