"""Centralised alternating least squares, against the definition of its minimiser."""

import numpy as np
import pytest

from clients.toolkit.ratings import Ratings
from simulations.reports.als import alternating_least_squares, rmse_of_factors, rmse_of_mean
from tests.support.ratings import dense, ratings

PARTS = [ratings(i, seed=5) for i in range(4)]


def test_both_blocks_are_stationary_in_the_end() -> None:
    """E V^T + lam U = 0 and U^T E + lam V = 0, where nobody rates item 6."""
    users, items = alternating_least_squares(PARTS, rank=2, lam=0.5, sweeps=400, seed=0)
    values, mask = (np.vstack(part) for part in zip(*map(dense, PARTS), strict=True))
    assert users.shape == (sum(part.num_users for part in PARTS), 2)
    error = mask * (users @ items.T - values)
    np.testing.assert_allclose(error @ items + 0.5 * users, 0, atol=1e-6)
    np.testing.assert_allclose(error.T @ users + 0.5 * items, 0, atol=1e-12)  # solved for last
    np.testing.assert_array_equal(items[6], 0)


def test_it_finds_a_matrix_of_low_rank() -> None:
    rng = np.random.default_rng(0)
    U, V = rng.random((30, 2)), rng.random((2, 20))
    rows, columns = np.nonzero(rng.random((30, 20)) < 0.7)
    whole = Ratings(rows, columns, (U @ V)[rows, columns], 30, 20)
    train, test = whole.split(0.2, rng)
    found = alternating_least_squares([train], rank=2, lam=1e-8, sweeps=200, seed=1)
    assert rmse_of_factors([test], *found) < 1e-3
    assert rmse_of_mean([train], [test]) > 0.1


def test_errors_are_pooled_over_the_clients() -> None:
    one = Ratings(np.array([0]), np.array([0]), np.array([5.0]), 1, 2)
    two = Ratings(np.array([0, 1, 1]), np.array([1, 0, 1]), np.array([1.0, 2.0, 3.0]), 2, 2)
    users, items = np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [0.5]])
    # Predictions: 1 | 1, 3, 1.5; errors -4 | 0, 1, -1.5.
    expected = np.sqrt((16 + 0 + 1 + 2.25) / 4)
    assert rmse_of_factors([one, two], users, items) == pytest.approx(expected)
    # The mean of 5, 1, 2, 3 is 2.75: errors 2.25, 1.75, 0.75, 0.25.
    expected = np.sqrt((2.25**2 + 1.75**2 + 0.75**2 + 0.25**2) / 4)
    assert rmse_of_mean([one, two], [one, two]) == pytest.approx(expected)
