"""Angles between the subspaces of clients' data, for PACFL (arXiv:2209.10526)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Measure = Literal["smallest", "sum", "entrywise", "entrywise-signed"]
Basis = NDArray[np.float64]
"""Directions of a client's data as columns, of length 1: shape (features, vectors)."""

_NO_DIRECTION = 1e-10  # singular values below, relative to the largest, are rounding


def proximity(bases: Sequence[Basis], measure: Measure) -> NDArray[np.float64]:
    """Return A_ij in degrees between every two clients' bases, 0 on the diagonal.

    Parameters
    ----------
    bases : sequence of m arrays
        U_i of shape (features, p_i).
    measure : {"smallest", "sum", "entrywise", "entrywise-signed"}
        "smallest": the smallest principal angle of the spaces that they span, arccos of the largest
        singular value of U_i' U_j. "sum": over k, the angles of the lines of the k-th columns.
        "entrywise": the smallest angle of the lines of any two columns; "-signed" takes a column
        and its negative for two directions, which only the signs of the vectors tell apart.

    Returns
    -------
    ndarray of shape (m, m)
    """
    if measure == "smallest":
        bases = [_orthonormal(basis) for basis in bases]
    angles = np.zeros((len(bases), len(bases)))
    for i, basis in enumerate(bases):
        for j in range(i):
            angles[i, j] = angles[j, i] = _angle(basis.T @ bases[j], measure)
    return angles


def _angle(cosines: NDArray[np.float64], measure: Measure) -> float:
    if measure == "smallest":
        closest: Any = np.linalg.norm(cosines, 2)
    elif measure == "sum":
        closest = np.abs(np.diag(cosines))
    else:
        closest = np.max(cosines if measure == "entrywise-signed" else np.abs(cosines))
    return float(np.rad2deg(np.arccos(np.clip(closest, -1.0, 1.0))).sum())


def _orthonormal(basis: Basis) -> Basis:
    """Return an orthonormal basis of what the columns span: those of several classes overlap."""
    left, singular, _ = np.linalg.svd(basis, full_matrices=False)
    found: Basis = left[:, singular > _NO_DIRECTION * singular[0]]
    return found
