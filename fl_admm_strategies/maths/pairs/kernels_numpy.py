"""The passes over the pairs' vectors in plain numpy, and what each of them computes.

The rows of a `slab` are the vectors delta of pairs, whose clients are `i` and `j`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import algebra
from .algebra import Float64Array, FloatArray, Indices, Slots, row_norms

# What a kernel works on at a time: a few such blocks fit a core's cache.
_BLOCK_BYTES = 2**18


def update_rows(
    slab: FloatArray, rows: Slots, i: Indices, j: Indices, omega: FloatArray, keep: FloatArray
) -> Float64Array:
    """Set ``slab[rows]`` to `algebra.next_delta` and return its norms.

    That is ``omega[i[rows]] - omega[j[rows]] + keep * slab[rows]``. A row with ``keep == 0`` is not
    read: it may be uninitialised.
    """
    norms = np.empty(len(rows))
    for block in _blocks(len(rows), slab):
        chosen = rows[block]
        delta = slab[chosen]
        delta[keep[block] == 0] = 0
        difference = omega[i[chosen]] - omega[j[chosen]]
        delta = algebra.next_delta(difference, keep[block, None], delta)
        slab[chosen] = delta
        norms[block] = row_norms(delta)
    return norms


def difference_norms(omega: FloatArray, i: Indices, j: Indices) -> Float64Array:
    """Return ``||omega[i] - omega[j]||``."""
    norms = np.empty(len(i))
    for block in _blocks(len(i), omega):
        norms[block] = row_norms(omega[i[block]] - omega[j[block]])
    return norms


def add_rows(
    slab: FloatArray, rows: Indices, clients: Slots, weight: Float64Array, total: Float64Array
) -> None:
    """Add to ``total[k]`` the ``weight * slab`` of client k's pairs, negated where it is `j`.

    ``rows[k, j]`` is the row of its pair with client j; where it is none of `slab`'s, another slab
    has the pair, or no slab.
    """
    for target, client, slots in zip(total, clients, rows, strict=True):
        partners = np.flatnonzero((slots >= 0) & (slots < len(slab)))
        chosen = slots[partners]
        signed = np.where(partners > client, weight[chosen], -weight[chosen])
        for block in _blocks(len(chosen), slab):
            target += signed[block] @ slab[chosen[block]]


def renew_weights(
    weights: Float64Array, i: Indices, j: Indices, keep: Float64Array, place: Slots
) -> None:
    """Multiply ``weights[i, j]`` and ``weights[j, i]`` by `keep`; add 1 to those at `place`.

    ``place[i]`` is where in ``weights[i, j]``, or -1.
    """
    for client, other in ((i, j), (j, i)):
        renewed = keep[:, None] * weights[client, other]
        here = np.flatnonzero(place[client] >= 0)
        renewed[here, place[client[here]]] += 1
        weights[client, other] = renewed


def add_pairs(
    models: FloatArray, weights: Float64Array, i: Indices, j: Indices, total: Float64Array
) -> None:
    """Add ``weights[i, j] @ models[i] - weights[j, i] @ models[j]`` to `total`."""
    for target, first, second in zip(total, i, j, strict=True):
        target += weights[first, second] @ models[first] - weights[second, first] @ models[second]


def add_products(rows: FloatArray, weight: Float64Array, total: Float64Array) -> None:
    """Add ``weight @ rows`` to `total`; the number of rows is a multiple of 4."""
    for target, coefficients in zip(total, weight, strict=True):
        chosen = np.flatnonzero(coefficients)
        for block in _blocks(len(chosen), rows):
            target += coefficients[chosen[block]] @ rows[chosen[block]]


def _blocks(count: int, array: FloatArray) -> Iterator[slice]:
    """Yield slices over `count` rows of the width of `array`, each about `_BLOCK_BYTES`."""
    step = max(1, _BLOCK_BYTES // (array.shape[1] * array.itemsize))
    for start in range(0, count, step):
        yield slice(start, start + step)
