"""Matrix completion by alternating least squares, all ratings in one place.

What a federated method gives up by leaving the ratings where they are is measured against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from clients.toolkit.ratings import Ratings

from ..data.federated import generator

Matrix = NDArray[np.float64]


def alternating_least_squares(
    train: Sequence[Ratings], *, rank: int, lam: float, sweeps: int, seed: int
) -> tuple[Matrix, Matrix]:
    """Minimise sum (M - U V)^2 / 2 over the ratings, plus lam/2 (|U|_F^2 + |V|_F^2).

    Parameters
    ----------
    train : sequence of Ratings
        Of all clients, of the same n items.
    rank : int
        r.
    lam : float
        lam > 0, so that who rated nothing has a factor too: 0.
    sweeps : int
        How often both blocks are solved for, exactly.
    seed : int
        V starts uniform on [0, 1].

    Returns
    -------
    users : ndarray of shape (m, r)
        U, the clients' users one after the other.
    items : ndarray of shape (n, r)
        V, transposed.
    """
    by_user = vstack([own.to_csr() for own in train], format="csr")
    by_item = by_user.T.tocsr()
    items = generator(seed, "als").random((by_user.shape[1], rank))
    users = np.zeros((by_user.shape[0], rank))
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
    for own in test:
        rows = users[first : first + own.num_users]
        errors = np.einsum("kr,kr->k", rows[own.users], items[own.items]) - own.values
        total += float(errors @ errors)
        count += len(own)
        first += own.num_users
    return math.sqrt(total / count)


def rmse_of_mean(train: Sequence[Ratings], test: Sequence[Ratings]) -> float:
    """Return the test error of predicting the mean training rating always."""
    mean = np.concatenate([own.values for own in train]).mean()
    return float(np.sqrt(((np.concatenate([own.values for own in test]) - mean) ** 2).mean()))
