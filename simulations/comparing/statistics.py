"""What the numbers of several seeds say: intervals, tests and ranks, by SciPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEVEL = 0.05
"""Of the tests, and of what the intervals leave out."""


class Mean(NamedTuple):
    """A mean over seeds.

    Attributes
    ----------
    value : float
    low, high : float
        Its 95 % interval; NaN for one seed.
    std : float
        Standard deviation over the seeds, of the sample; NaN for one seed.
    """

    value: float
    low: float
    high: float
    std: float


def mean_of(values: ArrayLike) -> Mean:
    """Return the mean over seeds with its bootstrap interval (bias-corrected, accelerated).

    Parameters
    ----------
    values : array_like of shape (n,)
        One a seed.

    Raises
    ------
    ValueError
        If there is none.
    """
    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        raise ValueError("values is empty, expected one a seed.")
    mean = float(x.mean())
    if len(x) < 2:
        return Mean(mean, math.nan, math.nan, math.nan)
    if np.ptp(x) <= 1e-9 * np.abs(x).max():  # alike but for rounding: no resample is another
        return Mean(mean, mean, mean, 0.0)
    found = stats.bootstrap(
        (x,), np.mean, confidence_level=1 - LEVEL, rng=np.random.default_rng(0)
    ).confidence_interval
    return Mean(mean, float(found.low), float(found.high), float(x.std(ddof=1)))


class Pair(NamedTuple):
    """Two methods on the same seeds.

    Attributes
    ----------
    first, second : int
        Rows of the scores.
    difference : Mean
        Of first minus second, by seed.
    wins : int
        Seeds on which the first is better.
    p : float
        Of Wilcoxon's signed-rank test, two-sided.
    holm : float
        The same, adjusted for all pairs.
    """

    first: int
    second: int
    difference: Mean
    wins: int
    p: float
    holm: float


def pairs_of(scores: ArrayLike, higher_is_better: bool) -> list[Pair]:
    """Compare every two methods.

    Parameters
    ----------
    scores : array_like of shape (k, n)
        By method and seed.
    higher_is_better : bool
    """
    x = np.asarray(scores, dtype=np.float64)
    pairs = list(itertools.combinations(range(len(x)), 2))
    gaps = [x[a] - x[b] for a, b in pairs]
    p = [float(stats.wilcoxon(gap).pvalue) if gap.any() else 1.0 for gap in gaps]
    sign = 1 if higher_is_better else -1
    return [
        Pair(*pair, mean_of(gap), int((sign * gap > 0).sum()), raw, adjusted)
        for pair, gap, raw, adjusted in zip(pairs, gaps, p, holm(p), strict=True)
    ]


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down procedure."""
    order = np.argsort(p, kind="stable")
    factors = len(p) - np.arange(len(p))
    stepped = np.minimum(np.maximum.accumulate(factors * np.asarray(p)[order]), 1.0)
    adjusted = np.empty(len(p))
    adjusted[order] = stepped
    return adjusted.tolist()


class Ranks(NamedTuple):
    """Where the methods stand on average.

    Attributes
    ----------
    means : list of float
        Mean ranks over the seeds by method, 1 the best; ties share theirs.
    friedman : float
        p of Friedman's test that all methods are alike; NaN for fewer than three methods.
    critical : float
        The difference of two mean ranks that Nemenyi's test takes for one at 5 %.
    """

    means: list[float]
    friedman: float
    critical: float


def ranks_of(scores: ArrayLike, higher_is_better: bool) -> Ranks:
    """Rank methods; parameters are those of `pairs_of`, with two methods or more.

    Demsar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006, section
    3.2.2; its blocks are data sets, here they are seeds of one.
    """
    x = np.asarray(scores, dtype=np.float64)
    k, n = x.shape
    ranks = stats.rankdata(-x if higher_is_better else x, axis=0)
    # All tied on every seed: the test knows nothing of that.
    same = bool((ranks == ranks[0]).all())
    friedman = 1.0 if same else float(stats.friedmanchisquare(*x).pvalue) if k > 2 else math.nan
    q = float(stats.studentized_range.ppf(1 - LEVEL, k, math.inf)) / math.sqrt(2)
    critical = q * math.sqrt(k * (k + 1) / (6 * n))
    return Ranks(ranks.mean(axis=1).tolist(), friedman, critical)


def what_it_can_show(seeds: int, methods: int) -> str:
    """Say what this number of seeds can show, and what it cannot."""
    if seeds < 2:
        return "One seed shows no spread: the numbers rank nothing. Take 5 seeds or more."
    pairs = max(1, methods * (methods - 1) // 2)
    smallest = 2.0 ** (1 - seeds)  # every difference of the same sign
    text = f"With {seeds} seeds the smallest p that Wilcoxon's test can have is"
    text += f" {smallest:.3g}, times {pairs} at Holm's first step."
    if pairs * smallest > LEVEL:
        needed = math.ceil(1 + math.log2(pairs / LEVEL))
        text += f" No pair can differ at the 5 % level; {needed} seeds are needed for that."
    return (
        f"{text} The seeds draw the partition, the initial model, the clients of each round and "
        "the batches on one data set: the tests say nothing about other data."
    )
