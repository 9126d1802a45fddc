"""The passes over the pairs' vectors in plain numpy, and what each of them computes.

The rows of `delta` are the vectors of pairs; `i` and `j` are their clients.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import algebra
from .algebra import Float64Array, FloatArray, Indices, Places, Slots, row_norms

# What a kernel works on at a time: a few such blocks fit a core's cache.
_BLOCK_BYTES = 2**18


def update_rows(
    delta: FloatArray, slots: Slots, i: Indices, j: Indices, omega: FloatArray, keep: FloatArray
) -> Float64Array:
    """Set ``delta[slots]`` to `algebra.next_delta` and return its norms.

    That is ``omega[i[slots]] - omega[j[slots]] + keep * delta[slots]``.
    """
    norms = np.empty(len(slots))
    for block in _blocks(len(slots), delta):
        chosen = slots[block]
        difference = omega[i[chosen]] - omega[j[chosen]]
        vectors = algebra.next_delta(difference, keep[block, None], delta[chosen])
        delta[chosen] = vectors
        norms[block] = row_norms(vectors)
    return norms


def difference_norms(omega: FloatArray, i: Indices, j: Indices) -> Float64Array:
    """Return ``||omega[i] - omega[j]||``."""
    norms = np.empty(len(i))
    for block in _blocks(len(i), omega):
        norms[block] = row_norms(omega[i[block]] - omega[j[block]])
    return norms


def add_rows(
    delta: FloatArray, slots: Indices, clients: Places, weight: Float64Array, total: Float64Array
) -> None:
    """Add to ``total[k]`` the ``weight * delta`` of client k's pairs, negated where it is `j`.

    ``slots[k, j]`` is the slot of its pair with client j; -1 where that has none.
    """
    for target, client, row in zip(total, clients, slots, strict=True):
        partners = np.flatnonzero(row >= 0)
        chosen = row[partners]
        signed = np.where(partners > client, weight[chosen], -weight[chosen])
        for block in _blocks(len(chosen), delta):
            target += signed[block] @ delta[chosen[block]]


def _blocks(count: int, array: FloatArray) -> Iterator[slice]:
    """Yield slices over `count` rows of the width of `array`, each about `_BLOCK_BYTES`."""
    step = max(1, _BLOCK_BYTES // (array.shape[1] * array.itemsize))
    for start in range(0, count, step):
        yield slice(start, start + step)
