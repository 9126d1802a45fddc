"""Ranking metrics against a count by hand and their definitions, user by user."""

import numpy as np
import pytest

from clients import Ratings, rank
from clients.toolkit.data.ranking import top_items
from tests.support.refusals import refused


def listed(*triples: tuple[int, int, float], users: int = 3, items: int = 5) -> Ratings:
    rows, columns, values = zip(*triples, strict=True)
    return Ratings(np.array(rows), np.array(columns), np.array(values), users, items)


TRAIN = listed((0, 0, 5), (1, 1, 4), (2, 2, 3))
TEST = listed((0, 1, 5), (0, 4, 4), (1, 0, 2))
SCORES = np.array([[9.0, 5, 4, 3, 2], [1, 9, 5, 4, 3], [5, 4, 9, 3, 2]])


def test_by_hand() -> None:
    """User 0 gets 1, 2: one of two relevant, in place 1. User 1 gets 2, 3, and wants 0."""
    found = rank(SCORES, TRAIN, TEST, k=2)
    assert found == {
        "ranked-users": 2,
        "hits": 1,
        "precisions": 1 / 2,
        "recalls": 1 / 2,
        "ndcgs": pytest.approx(1 / (1 + 1 / np.log2(3))),
    }
    assert rank(SCORES, TRAIN, TEST, k=2, relevant=4)["ranked-users"] == 1


def test_what_was_seen_is_never_listed() -> None:
    rng, size = np.random.default_rng(0), 7
    scores, seen = rng.random((size, 9)), rng.random((size, 9)) < 0.4
    held = ~seen & (rng.random((size, 9)) < 0.4)
    made = [Ratings(*np.nonzero(mask), np.ones(mask.sum()), size, 9) for mask in (seen, held)]
    found = rank(scores, *made, k=3)
    gains = []
    for user in range(size):
        top = top_items(scores[user], np.flatnonzero(seen[user]), 3)
        assert not seen[user, top].any()
        if held[user].any():
            gained = sum(held[user, item] / np.log2(2 + place) for place, item in enumerate(top))
            ideal = sum(1 / np.log2(2 + place) for place in range(min(3, held[user].sum())))
            gains.append(gained / ideal)
    assert found["ndcgs"] == pytest.approx(sum(gains))
    assert found["ranked-users"] == len(gains)


def test_what_is_refused() -> None:
    with refused(ValueError, "(3, 4)"):
        rank(SCORES[:, :4], TRAIN, TEST)
    with refused(ValueError, "k", 6, 5):
        rank(SCORES, TRAIN, TEST, k=6)
