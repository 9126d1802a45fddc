"""`Ratings`: order, explicit zeros, the split, the sparse matrix, and what it refuses."""

import numpy as np
import pytest

from clients.toolkit.data.ratings import Ratings
from tests.support.refusals import refused

# [[., 0, 4], [2, ., .], [., ., .]]: user 2 rated nothing, one rating is 0.
SMALL = Ratings(np.array([1, 0, 0]), np.array([0, 2, 1]), np.array([2.0, 4.0, 0.0]), 3, 3)


def random_ratings(num_users: int, num_items: int, k: int, seed: int = 0) -> Ratings:
    rng = np.random.default_rng(seed)
    cells = rng.choice(num_users * num_items, k, replace=False)
    users, items = np.divmod(cells, num_items)
    return Ratings(users, items, rng.normal(size=k), num_users, num_items)


def triples(ratings: Ratings) -> list[tuple[int, int, float]]:
    columns = (ratings.users.tolist(), ratings.items.tolist(), ratings.values.tolist())
    return list(zip(*columns, strict=True))


def test_a_rating_of_zero_is_in_the_sparse_matrix() -> None:
    sparse = SMALL.to_csr()
    assert sparse.shape == (3, 3)
    assert sparse.nnz == 3  # stored entries, not those that differ from 0
    assert sparse.data.tolist() == SMALL.values.tolist()
    assert sparse.toarray().tolist() == [[0, 0, 4], [2, 0, 0], [0, 0, 0]]


def test_a_split_keeps_every_rating_once() -> None:
    ratings = random_ratings(20, 30, 200)
    train, test = ratings.split(0.2, np.random.default_rng(1))
    assert (len(train), len(test)) == (160, 40)
    assert sorted(triples(train) + triples(test)) == triples(ratings)
    assert (test.num_users, test.num_items) == (20, 30)


@pytest.mark.parametrize(("fraction", "k", "expected"), [(0.01, 10, 1), (0.99, 10, 9), (0.5, 2, 1)])
def test_neither_part_of_a_split_is_empty(fraction: float, k: int, expected: int) -> None:
    train, test = random_ratings(5, 5, k).split(fraction, np.random.default_rng(0))
    assert (len(train), len(test)) == (k - expected, expected)


def test_what_cannot_be_split() -> None:
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        with refused(ValueError, "test_fraction"):
            SMALL.split(fraction, np.random.default_rng(0))
    one = Ratings(np.array([0]), np.array([0]), np.array([1.0]), 1, 1)
    with pytest.raises(ValueError, match="One rating"):
        one.split(0.5, np.random.default_rng(0))


GOOD = {"users": [0, 1, 1], "items": [0, 0, 2], "values": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"users": [0, 2, 1]}, ValueError, "users[1] is 2"),
        ({"users": [0, 1, -1]}, ValueError, "users[2] is -1"),
        ({"items": [3, 0, 4]}, ValueError, "items[0] is 3"),
        ({"users": [0, 2**32, 1]}, ValueError, "users[1] is 4294967296"),  # 0 as an int32
        ({"values": [1, np.nan, 3]}, ValueError, "values[1] is nan"),
        ({"values": [1, 2, -np.inf]}, ValueError, "values[2] is -inf"),
        ({"users": [1, 0, 1], "items": [2, 0, 2]}, ValueError, "item 2"),
        ({"users": [0, 1]}, ValueError, "(2,)"),
        ({"users": [[0], [1], [1]]}, ValueError, "(3, 1)"),
        ({"users": [], "items": [], "values": []}, ValueError, "rating"),
        ({"items": [0.0, 0.5, 2.0]}, TypeError, "items"),
        ({"num_users": 0}, ValueError, "num_users"),
        ({"num_items": 3.0}, TypeError, "num_items"),
    ],
)
def test_what_is_refused(change: dict, error: type[Exception], named: str) -> None:
    Ratings(**GOOD, num_users=2, num_items=3)
    with refused(error, named):
        Ratings(**({"num_users": 2, "num_items": 3} | GOOD | change))
