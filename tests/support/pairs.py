"""theta_ij and v_ij of one pair in FPFC's store."""

from __future__ import annotations

import numpy as np

from fl_admm_strategies.maths.pairs import PairwiseStore, algebra


def theta_of(store: PairwiseStore, i: int, j: int) -> np.ndarray:
    """Return theta_ij, shape (d,). theta_ji = -theta_ij and theta_ii = 0."""
    return algebra.theta(*_find(store, i, j)).astype(store.omega.dtype)


def v_of(store: PairwiseStore, i: int, j: int) -> np.ndarray:
    """Return v_ij, shape (d,). v_ji = -v_ij and v_ii = 0."""
    return algebra.dual(*_find(store, i, j), store.rho).astype(store.omega.dtype)


def _find(store: PairwiseStore, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Return s and delta_ij of a pair; 1 and omega_i - omega_j of a plain one."""
    low, high = np.array([[min(i, j)], [max(i, j)]], dtype=np.int32)
    for form in store._forms if i != j else ():
        if not np.isnan(scale := form.scale(low, high)):
            ((_, vectors),) = form.vectors(low, high)
            return scale, vectors[0] if i < j else -vectors[0]
    return np.ones(1), store.omega[i] - store.omega[j]
