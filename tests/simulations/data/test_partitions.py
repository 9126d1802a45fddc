"""The six partition schemes on bare labels: what defines each, and what it says of bad options."""

from typing import Any

import numpy as np
import pytest

from simulations.data.partitions import (
    by_flower,
    dirichlet_quantity,
    hybrid,
    in_groups,
    label_count,
)
from tests.support.refusals import refused

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 300))


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class Fixed:
    """Stands for a generator that draws the given shares and leaves every order as it is."""

    def __init__(self, shares: list[float]) -> None:
        self.shares = np.array(shares)

    def dirichlet(self, alpha: np.ndarray) -> np.ndarray:
        assert len(alpha) == len(self.shares)
        return self.shares

    def permutation(self, n: int) -> np.ndarray:
        return np.arange(n)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_a_client_holds_k_shards_each_of_one_label(k: int) -> None:
    """With 10 classes and 10 clients a class is cut into k shards of 300 / k samples."""
    for part in label_count(LABELS, 10, k, generator(k)):
        counts = np.bincount(LABELS[part], minlength=10)
        assert counts.sum() == 300
        assert (counts % (300 // k) == 0).all()
        assert 1 <= np.count_nonzero(counts) <= k


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [
        ([0.1, 0.2, 0.3, 0.4], [100, 200, 300, 400]),
        # 50 becomes 100; the others share 900 by 0.15 : 0.3 : 0.5, 142.1, 284.2 and 473.7.
        ([0.05, 0.15, 0.3, 0.5], [100, 142, 284, 474]),
        # That takes the second from 102 to 96.6, so it is raised as well; 800 by 0.348 : 0.5.
        ([0.05, 0.102, 0.348, 0.5], [100, 100, 328, 472]),
        ([0.0, 0.0, 1.0, 0.0], [100, 100, 700, 100]),
    ],
)
def test_quantity_shares_and_their_minimum(shares: list[float], sizes: list[int]) -> None:
    dealt = dirichlet_quantity(1000, 4, 0.5, Fixed(shares))  # type: ignore[arg-type]
    assert [len(part) for part in dealt] == sizes


@pytest.mark.parametrize(
    ("deal", "named"),
    [
        (lambda rng: label_count(LABELS, 10, 11, rng), ["labels_per_client", 11]),
        (lambda rng: label_count(np.array([0, 0, 0, 1]), 2, 2, rng), ["2 shards", "class 1"]),
        (
            lambda rng: by_flower("dirichlet-label", LABELS, 50, rng, beta=0.1),
            ["clients=50", "beta=0.1"],
        ),
        (lambda rng: hybrid(LABELS, 1, 2, 0.5, rng), ["clients", 1]),
        (lambda rng: in_groups(12, 5, 0, rng), ["groups", 0]),
    ],
)
def test_what_a_scheme_refuses(deal, named: list[Any]) -> None:
    with refused(ValueError, *named):
        deal(generator(0))
