"""The yardsticks: least squares against the definition of their minimisers; counts."""

import numpy as np
import pytest

from clients.toolkit.data.ratings import Ratings
from tests.benchmarks.yardsticks import (
    alternating_least_squares,
    counts,
    item_scores,
    joined,
    least_squares,
    pair_counts,
    rmse,
)
from tests.support.ratings import NUM_ITEMS, dense, ratings

pytestmark = pytest.mark.slow

PARTS = [ratings(i, seed=5) for i in range(4)]


def test_both_blocks_are_stationary_in_the_end() -> None:
    """E V^T + lam U = 0 and U^T E + lam V = 0, where nobody rates item 6."""
    first = np.random.default_rng(0).random((NUM_ITEMS, 2))
    users, items = alternating_least_squares(joined(PARTS), first, lam=0.5, sweeps=400)
    values, mask = (np.vstack(part) for part in zip(*map(dense, PARTS), strict=True))
    assert users.shape == (sum(part.num_users for part in PARTS), 2)
    error = mask * (users @ items.T - values)
    np.testing.assert_allclose(error @ items + 0.5 * users, 0, atol=1e-6)
    np.testing.assert_allclose(error.T @ users + 0.5 * items, 0, atol=1e-12)  # solved for last
    np.testing.assert_array_equal(items[6], 0)


def worked_ratings() -> list[Ratings]:
    """Return M_1 = ((5, -, 3), (4, 2, -)) and M_2 = ((-, 1, 4), (1, 5, -))."""
    parts = []
    for matrix in np.array([[[5.0, 0, 3], [4, 2, 0]], [[0, 1, 4], [1, 5, 0]]]):
        users, items = np.nonzero(matrix)
        parts.append(Ratings(users, items, matrix[users, items], 2, 3))
    return parts


def test_two_sweeps_of_the_worked_example() -> None:
    """The data of docs/methods/fedmavg.md, E1; lam = 0.1 for both blocks, from the same V^0."""
    parts, items = joined(worked_ratings()), np.array([[1], [0.5], [0.8]])

    def objective(users: np.ndarray, items: np.ndarray) -> float:
        squares = 8 * rmse(parts, (users @ items.T)[parts.users, parts.items]) ** 2
        return float(squares / 2 + 0.05 * ((users**2).sum() + (items**2).sum()))

    users, items = alternating_least_squares(parts, items, lam=0.1, sweeps=1)
    expected = [4.2528735632, 3.7037037037, 3.7373737374, 2.5925925926]
    np.testing.assert_allclose(users.ravel(), expected, rtol=0, atol=1e-8)
    expected = [1.0011879131, 0.698635061, 0.8617075185]
    np.testing.assert_allclose(items.ravel(), expected, rtol=0, atol=1e-8)
    assert objective(users, items) == pytest.approx(11.4064322847, abs=1e-8)
    again = alternating_least_squares(parts, items, lam=0.1, sweeps=1)
    assert objective(*again) == pytest.approx(10.7379635139, abs=1e-8)


def test_errors_are_pooled_over_the_clients() -> None:
    one = Ratings(np.array([0]), np.array([0]), np.array([5.0]), 1, 2)
    two = Ratings(np.array([0, 1, 1]), np.array([1, 0, 1]), np.array([1.0, 2.0, 3.0]), 2, 2)
    users, items = np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [0.5]])
    # Predictions: 1 | 1, 3, 1.5; errors -4 | 0, 1, -1.5.
    expected = np.sqrt((16 + 0 + 1 + 2.25) / 4)
    both = joined([one, two])
    predicted = (users @ items.T)[both.users, both.items]
    assert rmse(both, predicted) == pytest.approx(expected)
    # The mean of 5, 1, 2, 3 is 2.75: errors 2.25, 1.75, 0.75, 0.25.
    expected = np.sqrt((2.25**2 + 1.75**2 + 0.75**2 + 0.25**2) / 4)
    assert rmse(both, both.values.mean()) == pytest.approx(expected)


def test_least_squares_with_biases_is_stationary() -> None:
    """E (V, 1)^T + lam (U, b) = 0 for the users, solved for last, and likewise for the items."""
    train = joined(PARTS)
    first = np.random.default_rng(0).random((NUM_ITEMS, 3))
    users, items, mean = least_squares(train, first, lam=0.5, sweeps=600)
    values, mask = (np.vstack(part) for part in zip(*map(dense, PARTS), strict=True))
    predicted = mean + users[:, :-1] @ items[:, :-1].T + users[:, -1:] + items[:, -1]
    errors = mask * (predicted - values)
    of_items, of_users = (np.hstack([f[:, :-1], np.ones((len(f), 1))]) for f in (items, users))
    np.testing.assert_allclose(errors @ of_items + 0.5 * users, 0, atol=1e-12)
    np.testing.assert_allclose(errors.T @ of_users + 0.5 * items, 0, atol=1e-6)


def test_counts_of_items_and_pairs() -> None:
    mask = np.vstack([dense(part)[1] for part in PARTS])
    train = joined(PARTS)
    np.testing.assert_array_equal(counts(train), mask.sum(axis=0))
    np.testing.assert_array_equal(pair_counts(train), mask.T @ mask)
    weights = np.random.default_rng(0).random((NUM_ITEMS, NUM_ITEMS))
    np.testing.assert_allclose(item_scores(train, weights), mask @ weights)
