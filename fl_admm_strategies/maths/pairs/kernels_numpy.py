"""The kernels in plain numpy; see `kernels.Kernels` for what each of them computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from . import algebra

FloatArray = NDArray[np.floating]

# What a kernel works on at a time: a few such blocks fit a core's cache.
_BLOCK_BYTES = 2**18


def slots_with(
    i: NDArray[np.int32], j: NDArray[np.int32], chosen: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """See `Kernels.slots_with`."""
    return np.flatnonzero(chosen[i] | chosen[j])


def update_rows(
    slab: FloatArray,
    rows: NDArray[np.int64],
    i: NDArray[np.int32],
    j: NDArray[np.int32],
    omega: FloatArray,
    keep: FloatArray,
) -> NDArray[np.float64]:
    """See `Kernels.update_rows`."""
    norms = np.empty(len(rows))
    for block in _blocks(len(rows), slab):
        chosen = rows[block]
        delta = slab[chosen]
        delta[keep[block] == 0] = 0
        difference = omega[i[chosen]] - omega[j[chosen]]
        delta = algebra.next_delta(difference, keep[block, None], delta)
        slab[chosen] = delta
        norms[block] = _row_norms(delta)
    return norms


def difference_norms(
    omega: FloatArray, i: NDArray[np.int32], j: NDArray[np.int32]
) -> NDArray[np.float64]:
    """See `Kernels.difference_norms`."""
    norms = np.empty(len(i))
    for block in _blocks(len(i), omega):
        norms[block] = _row_norms(omega[i[block]] - omega[j[block]])
    return norms


def residual_norms(
    slab: FloatArray,
    i: NDArray[np.int32],
    j: NDArray[np.int32],
    omega: FloatArray,
    scale: NDArray[np.float64],
) -> NDArray[np.float64]:
    """See `Kernels.residual_norms`."""
    norms = np.empty(len(slab))
    for block in _blocks(len(slab), slab):
        difference = omega[i[block]] - omega[j[block]]
        theta = algebra.theta(scale[block, None], slab[block])
        norms[block] = _row_norms(difference - theta)
    return norms


def add_rows(
    slab: FloatArray,
    rows: NDArray[np.int32],
    clients: NDArray[np.int64],
    weight: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """See `Kernels.add_rows`."""
    for target, client, slots in zip(total, clients, rows, strict=True):
        partners = np.flatnonzero((slots >= 0) & (slots < len(slab)))
        chosen = slots[partners]
        signed = np.where(partners > client, weight[chosen], -weight[chosen])
        for block in _blocks(len(chosen), slab):
            target += signed[block] @ slab[chosen[block]]


def zeta(
    total: NDArray[np.float64],
    near: NDArray[np.bool_],
    omega: FloatArray,
    clients: NDArray[np.intp],
) -> FloatArray:
    """See `Kernels.zeta`."""
    # Clients of one cluster have the same set, whose sum is needed only once.
    _, first, same = np.unique(
        np.packbits(near, axis=1), axis=0, return_index=True, return_inverse=True
    )
    models = np.empty((len(first), omega.shape[1]))
    for row, members in zip(models, near[first], strict=True):
        omega[members].sum(axis=0, dtype=np.float64, out=row)
    total += models[same.ravel()]
    found = algebra.zeta(total, omega[clients], near.sum(axis=1), len(omega))
    return found.astype(omega.dtype, copy=False)


def renew_weights(
    weights: NDArray[np.float64],
    i: NDArray[np.int32],
    j: NDArray[np.int32],
    keep: NDArray[np.float64],
    place: NDArray[np.int64],
) -> None:
    """See `Kernels.renew_weights`."""
    for client, other in ((i, j), (j, i)):
        renewed = keep[:, None] * weights[client, other]
        here = np.flatnonzero(place[client] >= 0)
        renewed[here, place[client[here]]] += 1
        weights[client, other] = renewed


def add_pairs(
    models: FloatArray,
    weights: NDArray[np.float64],
    i: NDArray[np.int32],
    j: NDArray[np.int32],
    total: NDArray[np.float64],
) -> None:
    """See `Kernels.add_pairs`."""
    for target, first, second in zip(total, i, j, strict=True):
        target += weights[first, second] @ models[first] - weights[second, first] @ models[second]


def add_products(rows: FloatArray, weight: NDArray[np.float64], total: NDArray[np.float64]) -> None:
    """See `Kernels.add_products`."""
    for target, coefficients in zip(total, weight, strict=True):
        chosen = np.flatnonzero(coefficients)
        for block in _blocks(len(chosen), rows):
            target += coefficients[chosen[block]] @ rows[chosen[block]]


def _blocks(count: int, array: FloatArray) -> Iterator[slice]:
    """Yield slices over `count` rows of the width of `array`, each about `_BLOCK_BYTES`."""
    step = max(1, _BLOCK_BYTES // (array.shape[1] * array.itemsize))
    for start in range(0, count, step):
        yield slice(start, start + step)


def _row_norms(rows: FloatArray) -> NDArray[np.float64]:
    wide = rows.astype(np.float64, copy=False)
    norms: NDArray[np.float64] = np.sqrt(np.einsum("kc,kc->k", wide, wide))
    return norms
