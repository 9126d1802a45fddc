"""What happens to a pair of clients in FPFC: theta_ij, v_ij, and what they add to zeta_i.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3, Algorithm 2. A pair is updated when one of its clients has a new model:

    delta_ij = omega_i - omega_j + v_ij/rho
    theta_ij = argmin_theta g(||theta||) + rho/2 ||delta_ij - theta||^2 = s delta_ij          (6)
    v_ij    <- v_ij + rho (omega_i - omega_j - theta_ij)                                    (A.3)

and a client is sent

    zeta_i = (1/m) sum_j (omega_j + theta_ij - v_ij/rho)

The factor s in [0, 1] depends on ||delta_ij|| alone, and (A.3) is v_ij = rho (delta_ij - theta_ij).
So after its update a pair is one vector, delta_ij, and one number, s; the rest are multiples:

    theta_ij               s delta_ij
    v_ij                   rho (1 - s) delta_ij    `dual_weight`
    v_ij/rho               (1 - s) delta_ij        `carried`
    theta_ij - v_ij/rho    (2 s - 1) delta_ij      `zeta_weight`

A pair with theta_ij = omega_i - omega_j and v_ij = 0 is *plain*: it needs not even the vector.

The functions take one pair or arrays of pairs. Where the vectors lie is the business of `vectors`;
the loops over them are in the kernels. Derivations: docs/methods/fpfc-notes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]
Float64Array = NDArray[np.float64]
Indices = NDArray[np.int32]
Slots = NDArray[np.int64]  # of pairs that have a vector
Places = NDArray[np.intp]  # of clients in omega, or of anything in a list
Clients = Sequence[int] | NDArray[np.integer]
Mask = NDArray[np.bool_]

Weight = Callable[[Float64Array], Float64Array]
"""Returns a factor of delta_ij by s: `zeta_weight`, say."""


def next_delta(difference: FloatArray, keep: FloatArray, delta: FloatArray) -> FloatArray:
    """Return omega_i - omega_j + v_ij/rho, the vector that (6) is applied to.

    Parameters
    ----------
    difference : ndarray
        omega_i - omega_j.
    keep : ndarray
        `carried` of the pair's last s.
    delta : ndarray
        Its last delta_ij; overwritten.
    """
    delta *= keep
    delta += difference
    return delta


def dual_weight(scale: Float64Array, rho: float) -> Float64Array:
    """Return the factor of v_ij = rho (delta_ij - theta_ij)."""
    return rho * (1 - scale)  # (A.3)


def carried(scale: Float64Array) -> Float64Array:
    """Return the factor of v_ij/rho, which the pair's next delta_ij contains."""
    return 1 - scale


def zeta_weight(scale: Float64Array) -> Float64Array:
    """Return the factor of theta_ij - v_ij/rho, which zeta_i contains."""
    return 2 * scale - 1


def stays_plain(norm: Float64Array, scale: Float64Array) -> Mask:
    """Return whether a plain pair is plain after an update, from ||delta_ij|| and s.

    v_ij was 0, so delta_ij is omega_i - omega_j. With s = 1 theta_ij equals it and v_ij stays 0.
    Of equal models both are 0, whatever s is.
    """
    plain: Mask = (scale == 1) | (norm == 0)
    return plain


def turns_plain(before: Float64Array, scale: Float64Array) -> Mask:
    """Return whether a pair with a vector is plain after an update, from its last s and the new.

    The new s must be 1 for v_ij = 0, and the last one too: the update that takes a pair across
    (s < 1, then 1) leaves theta_ij = omega_i - omega_j + v_ij/rho with the v_ij before it, and so
    it stays until the pair's next update.
    """
    plain: Mask = (before == 1) & (scale == 1)
    return plain


def zeta(
    total: Float64Array, omega: FloatArray, count: NDArray[np.integer], num_clients: int
) -> Float64Array:
    """Return zeta_i = (1/m) sum_j (omega_j + theta_ij - v_ij/rho) of k clients i.

    To this sum a plain pair adds omega_j + (omega_i - omega_j) = omega_i. With N_i the clients j
    that have a vector with i, and i itself, it is

        zeta_i = omega_i + (1/m) sum_{j in N_i} (omega_j - omega_i + (2 s_ij - 1) delta_ij)

    so that a client with plain pairs alone gets its own model back, to the last bit.

    Parameters
    ----------
    total : ndarray of shape (k, d)
        sum_{j in N_i} (omega_j + (2 s_ij - 1) delta_ij), where delta_ii = 0; overwritten.
    omega : ndarray of shape (k, d)
        omega_i.
    count : ndarray of shape (k,)
        The number of clients in N_i.
    num_clients : int
        m.
    """
    wide = omega.astype(np.float64)
    total -= count.astype(np.float64)[:, None] * wide
    total /= num_clients
    total += wide
    return total


def row_norms(rows: FloatArray) -> Float64Array:
    """Return the norms of vectors, shape (k, d), summed in float64."""
    wide = rows.astype(np.float64, copy=False)
    norms: Float64Array = np.sqrt(np.einsum("kc,kc->k", wide, wide))
    return norms
