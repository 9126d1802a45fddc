"""How well items are ranked for users: hit rate, precision, recall, NDCG and coverage at k.

The protocol is the whole one: for every user all items are ranked that are not among the user's
training ratings, never a sample of candidates (Krichene, Rendle, KDD 2020, show what samples do).
What counts as relevant is what the user's test ratings have: all of them, those with so many stars
or more, or, with `leave_one_out`, one each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_admm_strategies.maths.checks import check_count

from .ratings import Ratings

Scores = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Sums over users who have something relevant in their test ratings; those of clients add up.

    Attributes
    ----------
    users : int
        How many these are; no other user counts.
    hits, precision, recall, ndcg : float
        Sums of: 1 where something relevant is among the first k; the relevant share of the k; the
        share of the relevant that is among them; and the normalised discounted cumulative gain,
        sum 1/log2(1 + place) over the relevant places, over the largest there could be.
    listed : ndarray of bool, shape (n,)
        Whether an item is among the first k of any user, whether that user counts or not.
    """

    users: int
    hits: float
    precision: float
    recall: float
    ndcg: float
    listed: NDArray[np.bool_]

    def __add__(self, other: Ranking) -> Ranking:
        # Of booleans + is "or".
        return Ranking(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def means(self) -> dict[str, float]:
        """Return ``hr``, ``precision``, ``recall``, ``ndcg``, means over users, and ``coverage``.

        Coverage is the share of all items that are listed for anybody. Without a user who counts
        the means are NaN.
        """
        sums = {"hr": self.hits, "precision": self.precision, "recall": self.recall}
        sums["ndcg"] = self.ndcg
        count = self.users or np.nan
        means = {name: float(total / count) for name, total in sums.items()}
        return means | {"coverage": float(self.listed.mean())}


def top_items(scores: Scores, seen: ArrayLike, n: int) -> NDArray[np.int64]:
    """Return the n items with the largest scores, best first; the first of equal ones first.

    Parameters
    ----------
    scores : ndarray of shape (items,)
    seen : array of int
        Items to leave out.
    n : int
        How many; fewer come back where there are not so many.
    """
    check_count("n", n, least=1)
    candidates = np.delete(np.arange(len(scores)), np.asarray(seen, dtype=np.intp))
    return np.asarray(candidates[np.argsort(-scores[candidates], kind="stable")[:n]])


def rank(
    scores: Scores, train: Ratings, test: Ratings, *, k: int = 10, relevant: float = -np.inf
) -> Ranking:
    """Rank all items for every user and compare the first k with the test ratings.

    Parameters
    ----------
    scores : ndarray of shape (m, n)
        The larger, the better.
    train, test : Ratings
        Of the same m users and n items. What is in `train` is not ranked.
    k : int (default: 10)
        Length of the lists.
    relevant : float (default: -infinity)
        The least value that makes a test rating relevant, 4 stars, say.

    Raises
    ------
    ValueError
        If the shapes differ, or k is not between 1 and the number of items.
    """
    shape = (train.num_users, train.num_items)
    if scores.shape != shape or (test.num_users, test.num_items) != shape:
        raise ValueError(
            f"scores have shape {scores.shape}, the test ratings are of "
            f"{(test.num_users, test.num_items)} (users, items), expected both of {shape}, as the "
            "training ratings are."
        )
    check_count("k", k, least=1)
    if k > shape[1]:
        raise ValueError(f"k is {k}, expected at most {shape[1]}, the number of items.")
    unseen = np.array(scores, dtype=np.float64)
    unseen[train.users, train.items] = -np.inf
    top = np.argpartition(-unseen, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(unseen, top, 1), axis=1, kind="stable")
    top = np.take_along_axis(top, order, 1)
    shown = np.isfinite(np.take_along_axis(unseen, top, 1))  # not where nearly all is seen
    wanted = np.zeros(shape, np.bool_)
    liked = test.values >= relevant
    wanted[test.users[liked], test.items[liked]] = True
    found = np.take_along_axis(wanted, top, 1) & shown
    count = wanted.sum(axis=1)
    counts = count > 0
    gains = 1 / np.log2(np.arange(2, k + 2))
    largest = np.cumsum(gains)[np.minimum(count, k)[counts] - 1]
    found = found[counts]
    listed = np.zeros(shape[1], np.bool_)
    listed[top[shown]] = True
    return Ranking(
        int(counts.sum()),
        float(found.any(axis=1).sum()),
        float(found.mean(axis=1).sum()),
        float((found.sum(axis=1) / count[counts]).sum()),
        float((found @ gains / largest).sum()),
        listed,
    )


def leave_one_out(
    ratings: Ratings, rng: np.random.Generator, times: ArrayLike | None = None
) -> tuple[Ratings, Ratings]:
    """Hold out one rating of every user who has two or more.

    Parameters
    ----------
    ratings : Ratings
    rng : numpy.random.Generator
        Draws which, and one of those with the same time.
    times : array of shape (k,), optional
        When each rating was made, in the order of `ratings`: the last one is held out.

    Returns
    -------
    train, test : Ratings

    Raises
    ------
    ValueError
        If the times are not as many as the ratings, or no user has two ratings.
    """
    when = np.zeros(len(ratings)) if times is None else np.asarray(times)
    if when.shape != (len(ratings),):
        raise ValueError(f"times has shape {when.shape}, expected ({len(ratings)},), as ratings.")
    order = np.lexsort((rng.random(len(ratings)), when, ratings.users))
    last = np.append(np.diff(ratings.users[order]) > 0, True)
    held = np.zeros(len(ratings), np.bool_)
    held[order[last]] = True
    held &= np.bincount(ratings.users)[ratings.users] > 1
    if not held.any():
        raise ValueError("No user has two ratings, so that none can be held out.")
    return ratings.select(~held), ratings.select(held)
