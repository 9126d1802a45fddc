"""theta_ij and v_ij of one pair in FPFC's store, and how many pairs have a vector."""

from __future__ import annotations

import numpy as np

from fl_admm_strategies.maths.pairs import PairwiseStore


def theta_of(store: PairwiseStore, i: int, j: int) -> np.ndarray:
    """Return theta_ij = s delta_ij, shape (d,). theta_ji = -theta_ij and theta_ii = 0."""
    scale, delta = _find(store, i, j)
    return (scale * delta).astype(store.omega.dtype)


def v_of(store: PairwiseStore, i: int, j: int) -> np.ndarray:
    """Return v_ij = rho (1 - s) delta_ij, shape (d,). v_ji = -v_ij and v_ii = 0."""
    scale, delta = _find(store, i, j)
    return (store.rho * (1 - scale) * delta).astype(store.omega.dtype)


def num_stored(store: PairwiseStore) -> int:
    """Return how many pairs have a vector."""
    return len(store._vectors)


def _find(store: PairwiseStore, i: int, j: int) -> tuple[np.float64, np.ndarray]:
    """Return s and delta_ij of a pair; 1 and omega_i - omega_j of a plain one."""
    vectors = store._vectors
    slot = vectors.slot_of[i, j]
    if slot < 0:
        return np.float64(1), store.omega[i] - store.omega[j]
    return vectors.scale[slot], vectors.delta[slot] if i < j else -vectors.delta[slot]
