"""What recommends with all ratings in one place: least squares, biases, EASE, popularity, the mean.

What a federated method gives up by leaving the ratings where they are is measured against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clients.toolkit.data.ratings import Ratings
from clients.toolkit.solving.factors import FactorSolver
from fl_admm_strategies.maths.normal import packed_outer, solve_rows

Matrix = NDArray[np.float64]


def alternating_least_squares(
    train: Ratings, items: Matrix, *, lam: float, sweeps: int
) -> tuple[Matrix, Matrix]:
    """Minimise sum (M - U V)^2 / 2 over the ratings, plus lam/2 (|U|_F^2 + |V|_F^2).

    Parameters
    ----------
    train : Ratings
        Of all users.
    items : ndarray of shape (n, r)
        What V^T starts from.
    lam : float
        lam > 0, so that who rated nothing has a factor too: 0.
    sweeps : int
        How often both blocks are solved for, exactly.

    Returns
    -------
    users : ndarray of shape (m, r)
        U.
    items : ndarray of shape (n, r)
        V, transposed.
    """
    by_user, pattern = train.to_csr(), train.pattern()
    by_item, of_item = by_user.T.tocsr(), pattern.T.tocsr()
    users = np.zeros((by_user.shape[0], items.shape[1]))
    for _ in range(sweeps):
        users = solve_rows(pattern @ packed_outer(items), by_user @ items, lam)
        items = solve_rows(of_item @ packed_outer(users), by_item @ users, lam)
    return users, items


def joined(parts: Sequence[Ratings]) -> Ratings:
    """Return the ratings of all clients as those of one, the users one after the other."""
    firsts = np.cumsum([0, *(part.num_users for part in parts)])
    users = [part.users + first for part, first in zip(parts, firsts[:-1], strict=True)]
    items, values = [part.items for part in parts], [part.values for part in parts]
    return Ratings(
        np.concatenate(users),
        np.concatenate(items),
        np.concatenate(values),
        int(firsts[-1]),
        parts[0].num_items,
    )


def least_squares(
    train: Ratings, items: Matrix, *, lam: float, sweeps: int, feedback: str = "explicit"
) -> tuple[Matrix, Matrix, float]:
    """Alternate between the exact minimisers of `clients.toolkit.solving.factors`.

    Parameters
    ----------
    train : Ratings
        Of all users.
    items : ndarray of shape (n, k)
        What to start from: with explicit feedback k - 1 factors and a bias, so that k = 1 is the
        model of biases alone.
    lam : float
        Ridge of both blocks.
    sweeps : int
        How often the items are solved for.
    feedback
        As in `clients.toolkit.solving.factors`; the confidence is 1.

    Returns
    -------
    users, items : ndarray of shape (m, k), (n, k)
        The users' are those that go with these items.
    mean : float
        What is added to all predictions.
    """
    solver = FactorSolver(train, feedback, 1.0)
    for _ in range(sweeps):
        items = solver.item_equations(solver.users(items, lam)).solved(lam)
    return solver.users(items, lam), items, solver.mean


def rmse(test: Ratings, predicted: Matrix | float) -> float:
    """Return the root of the mean squared error of one prediction a rating, in their unit."""
    errors = predicted - test.values
    return math.sqrt(float(errors @ errors) / len(errors))


def counts(train: Ratings) -> Matrix:
    """Return how many users rated each item, shape (n,): its popularity."""
    return np.bincount(train.items, minlength=train.num_items).astype(np.float64)


def pair_counts(train: Ratings) -> Matrix:
    """Return how many users rated both of two items, shape (n, n)."""
    pattern = train.pattern()
    return np.asarray((pattern.T @ pattern).toarray())


def item_scores(train: Ratings, weights: NDArray[np.floating]) -> Matrix:
    """Return EASE's scores of all items for all users, shape (m, n), by its weights."""
    return np.asarray(train.pattern(weights.dtype) @ weights)
