"""How well items are ranked for users: hit rate, precision, recall and NDCG at k.

The protocol is the whole one: for every user all items are ranked that are not among the user's
training ratings, never a sample of candidates (Krichene, Rendle, KDD 2020, show what samples do).
What counts as relevant is what the user's test ratings have: all of them, or those with so many
stars or more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_admm_strategies.maths.checks import check_count

from .ratings import Ratings

Scores = NDArray[np.floating]


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
) -> dict[str, float]:
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

    Returns
    -------
    dict
        ``ranked-users``: how many users have something relevant in their test ratings; no other
        user counts. Sums over these, of 1 where something relevant is among the first k, ``hits``;
        of the relevant share of the k, ``precisions``; of the share of the relevant that is among
        them, ``recalls``; and of the normalised discounted cumulative gain, ``ndcgs``: the sum of
        1/log2(1 + place) over the relevant places, over the largest there could be.

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
    return {
        "ranked-users": int(counts.sum()),
        "hits": float(found.any(axis=1).sum()),
        "precisions": float(found.mean(axis=1).sum()),
        "recalls": float((found.sum(axis=1) / count[counts]).sum()),
        "ndcgs": float((found @ gains / largest).sum()),
    }
