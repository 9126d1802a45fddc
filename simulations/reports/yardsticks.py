"""What ratings are predicted by with all of them in one place: least squares, popularity, the mean.

What a federated method gives up by leaving the ratings where they are is measured against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clients.toolkit.data.ratings import Ratings

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Matrix = NDArray[np.float64]


def alternating_least_squares(
    train: Sequence[Ratings], items: Matrix, *, lam: float, sweeps: int
) -> tuple[Matrix, Matrix]:
    """Minimise sum (M - U V)^2 / 2 over the ratings, plus lam/2 (|U|_F^2 + |V|_F^2).

    Parameters
    ----------
    train : sequence of Ratings
        Of all clients, of the same n items.
    items : ndarray of shape (n, r)
        What V^T starts from.
    lam : float
        lam > 0, so that who rated nothing has a factor too: 0.
    sweeps : int
        How often both blocks are solved for, exactly.

    Returns
    -------
    users : ndarray of shape (m, r)
        U, the clients' users one after the other.
    items : ndarray of shape (n, r)
        V, transposed.
    """
    from scipy.sparse import vstack

    by_user = vstack([ratings.to_csr() for ratings in train], format="csr")
    by_item = by_user.T.tocsr()
    users = np.zeros((by_user.shape[0], items.shape[1]))
    for _ in range(sweeps):
        users = _solve(by_user, items, lam)
        items = _solve(by_item, users, lam)
    return users, items


def _solve(ratings: csr_matrix, factors: Matrix, lam: float) -> Matrix:
    """Return the ridge regression of every row's ratings on the factors of what it rated."""
    ridge = lam * np.eye(factors.shape[1])
    solved = np.zeros((ratings.shape[0], factors.shape[1]))
    for row, (start, stop) in enumerate(zip(ratings.indptr[:-1], ratings.indptr[1:], strict=True)):
        rated = factors[ratings.indices[start:stop]]
        solved[row] = np.linalg.solve(rated.T @ rated + ridge, ratings.data[start:stop] @ rated)
    return solved


def rmse_of_factors(test: Sequence[Ratings], users: Matrix, items: Matrix) -> float:
    """Return the root of the mean squared error over all clients' test ratings, in their unit."""
    first, total, count = 0, 0.0, 0
    for ratings in test:
        rows = users[first : first + ratings.num_users]
        errors = np.einsum("kr,kr->k", rows[ratings.users], items[ratings.items]) - ratings.values
        total += float(errors @ errors)
        count += len(ratings)
        first += ratings.num_users
    return math.sqrt(total / count)


def item_means(train: Sequence[Ratings], prior: float) -> tuple[Matrix, float]:
    """Return every item's mean rating, shape (n,), and that of all, m.

    Parameters
    ----------
    train : sequence of Ratings
        Of all clients, of the same n items.
    prior : float
        How many ratings of m every item is given beside its own: (sum + prior m)/(count + prior).
        With 0 it is the plain mean, and m where there is none.
    """
    sums, counts = np.zeros((2, train[0].num_items))
    for ratings in train:
        sums += np.bincount(ratings.items, ratings.values, minlength=ratings.num_items)
        counts += np.bincount(ratings.items, minlength=ratings.num_items)
    mean = float(sums.sum() / counts.sum())
    weights = np.maximum(counts + prior, np.finfo(float).tiny)
    return np.where(counts + prior > 0, (sums + prior * mean) / weights, mean), mean


def rmse_of_items(test: Sequence[Ratings], predicted: Matrix) -> float:
    """Return the test error of predictions of shape (n,), the same for all users."""
    total = math.fsum(float(((predicted[r.items] - r.values) ** 2).sum()) for r in test)
    return math.sqrt(total / sum(map(len, test)))
