"""Normal equations of many small least squares problems at once, symmetric matrices packed.

Of a symmetric matrix of size k its upper triangle is kept, row by row: k (k + 1)/2 numbers. Sums of
outer products x x^T add up in this form, over a user's items, an item's users, and clients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 2**22
"""Numbers in the full matrices that are solved at once: 32 MB of float64."""


def packed_size(k: int) -> int:
    """Return the numbers of a packed matrix of size k."""
    return k * (k + 1) // 2


def packed_outer(rows: NDArray[Any]) -> NDArray[Any]:
    """Return x x^T of every row, packed; (m, k) to (m, k (k + 1)/2)."""
    first, second = np.triu_indices(rows.shape[1])
    outer: NDArray[Any] = rows[:, first] * rows[:, second]
    return outer


def packed(matrix: NDArray[Any]) -> NDArray[Any]:
    """Return a symmetric matrix packed."""
    upper: NDArray[Any] = matrix[np.triu_indices(len(matrix))]
    return upper


def unpacked(numbers: NDArray[Any], k: int) -> NDArray[Any]:
    """Return symmetric matrices of size k; (..., k (k + 1)/2) to (..., k, k)."""
    full = np.empty((*numbers.shape[:-1], k, k), numbers.dtype)
    first, second = np.triu_indices(k)
    full[..., first, second] = full[..., second, first] = numbers
    return full


def solve_rows(
    matrices: NDArray[Any], vectors: NDArray[Any], ridge: float, anchor: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Minimise 1/2 x^T A x - b^T x + ridge/2 |x - anchor|^2 for every row.

    Parameters
    ----------
    matrices : ndarray of shape (m, k (k + 1)/2)
        A of every row, positive semidefinite, packed.
    vectors : ndarray of shape (m, k)
        b of every row.
    ridge : float
        Above 0, so that every problem has one minimiser.
    anchor : ndarray of shape (m, k), optional
        0 by default.

    Returns
    -------
    ndarray of shape (m, k)
    """
    k = vectors.shape[1]
    right = vectors if anchor is None else vectors + ridge * anchor
    solved, step = np.empty_like(right), max(1, _BLOCK // k**2)
    for start in range(0, len(right), step):
        part = slice(start, start + step)
        full = unpacked(matrices[part], k)
        full[:, np.arange(k), np.arange(k)] += ridge
        solved[part] = np.linalg.solve(full, right[part, :, None])[:, :, 0]
    return solved
