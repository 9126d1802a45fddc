"""The kernels compiled by numba; see `kernels_numpy` for what each of them computes.

A kernel works on a piece of its rows or sums without the interpreter's lock, and plain threads
share the pieces. Numba's own threads are not used: with OpenMP they share torch's library, so that
torch's number of threads changes behind its back and a process forked afterwards hangs. Every
number is computed by one thread in an order that no split changes, so the bits do not depend on the
number of threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba
import numpy as np

from .algebra import Float64Array, FloatArray, Indices, Slots

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Lets sums be vectorised. 'nnan' and 'ninf' are left out so that NaN and Inf stay what they are.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
_PIECE_BYTES = 2 * 2**20  # what a thread takes at a time: enough to outweigh handing it over
_COLUMNS = 512  # of a vector at a time, so that a sum stays in a core's first cache


def _jit(function: _Function) -> _Function:
    """Compile a kernel; it is kept on disk for the next process."""
    try:
        compiled = numba.njit(nogil=True, fastmath=_FASTMATH, cache=True)(function)
    except RuntimeError:  # numba found no directory it may write its cache to
        compiled = numba.njit(nogil=True, fastmath=_FASTMATH)(function)
    return cast(_Function, compiled)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fpfc-pairs")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _share(
    kernel: Callable[..., None], args: tuple[Any, ...], count: int, step: int, nbytes: int
) -> None:
    """Run ``kernel(*args, start, stop)`` over ``range(count)`` in pieces of `step`, on all cores.

    `nbytes` are read in all; few are not worth starting threads for.
    """
    if count <= step or nbytes < 8 * _PIECE_BYTES:
        kernel(*args, 0, count)
        return
    starts = range(0, count, step)
    # list() waits for every piece and raises what one raised.
    list(_pool().map(lambda start: kernel(*args, start, min(start + step, count)), starts))


def _rows_in_piece(vectors: FloatArray) -> int:
    return max(1, _PIECE_BYTES // (int(vectors.shape[1]) * int(vectors.itemsize)))


@_jit
def _update_rows(
    slab: FloatArray,
    rows: Slots,
    i: Indices,
    j: Indices,
    omega: FloatArray,
    keep: FloatArray,
    norms: Float64Array,
    start: int,
    stop: int,
) -> None:
    for k in range(start, stop):
        delta, first, second = slab[rows[k]], omega[i[rows[k]]], omega[j[rows[k]]]
        kept = keep[k]
        if kept == 0:  # what is multiplied by 0 must be finite
            for c in range(len(delta)):
                delta[c] = first[c] - second[c]
        else:
            for c in range(len(delta)):
                delta[c] = (first[c] - second[c]) + kept * delta[c]
        total = 0.0
        for c in range(len(delta)):
            wide = np.float64(delta[c])
            total += wide * wide
        norms[k] = np.sqrt(total)


def update_rows(
    slab: FloatArray, rows: Slots, i: Indices, j: Indices, omega: FloatArray, keep: FloatArray
) -> Float64Array:
    """See `kernels_numpy.update_rows`."""
    norms = np.empty(len(rows))
    args = (slab, rows, i, j, omega, keep, norms)
    _share(_update_rows, args, len(rows), _rows_in_piece(slab), len(rows) * slab[0].nbytes)
    return norms


@_jit
def _difference_norms(
    omega: FloatArray, i: Indices, j: Indices, norms: Float64Array, start: int, stop: int
) -> None:
    for k in range(start, stop):
        first = omega[i[k]]
        second = omega[j[k]]
        total = 0.0
        for c in range(len(first)):
            wide = np.float64(first[c] - second[c])
            total += wide * wide
        norms[k] = np.sqrt(total)


def difference_norms(omega: FloatArray, i: Indices, j: Indices) -> Float64Array:
    """See `kernels_numpy.difference_norms`."""
    norms = np.empty(len(i))
    nbytes = len(i) * omega[0].nbytes
    _share(_difference_norms, (omega, i, j, norms), len(i), _rows_in_piece(omega), nbytes)
    return norms


@_jit
def _add_rows(
    slab: FloatArray,
    rows: Indices,
    clients: Slots,
    weight: FloatArray,
    total: Float64Array,
    first: int,
    last: int,
) -> None:
    chosen = np.zeros(rows.shape[1] + 3, dtype=np.int64)
    for k in range(first, last):
        count = 0
        signed = np.zeros(rows.shape[1] + 3, dtype=slab.dtype)  # 0 beyond the last row
        for j in range(rows.shape[1]):
            row = rows[k, j]
            if 0 <= row < len(weight):
                chosen[count], signed[count] = row, weight[row] if j > clients[k] else -weight[row]
                count += 1
        chosen[count : count + 3] = chosen[0]
        for low in range(0, slab.shape[1], _COLUMNS):
            high = min(low + _COLUMNS, slab.shape[1])
            target = total[k, low:high]
            for p in range(0, count, 4):  # a sum is read and stored once for four rows
                r0, r1 = slab[chosen[p], low:high], slab[chosen[p + 1], low:high]
                r2, r3 = slab[chosen[p + 2], low:high], slab[chosen[p + 3], low:high]
                w = signed[p : p + 4]
                for c in range(len(target)):
                    target[c] += (w[0] * r0[c] + w[1] * r1[c]) + (w[2] * r2[c] + w[3] * r3[c])


def add_rows(
    slab: FloatArray, rows: Indices, clients: Slots, weight: Float64Array, total: Float64Array
) -> None:
    """See `kernels_numpy.add_rows`."""
    nbytes = np.count_nonzero((rows >= 0) & (rows < len(slab))) * slab[0].nbytes
    step = max(1, len(total) * _PIECE_BYTES // max(1, nbytes))
    own = weight.astype(slab.dtype)  # products in the vectors' precision, sums in float64
    _share(_add_rows, (slab, rows, clients, own, total), len(total), step, nbytes)


@_jit
def _renew_weights(
    weights: Float64Array,
    i: Indices,
    j: Indices,
    keep: Float64Array,
    place: Slots,
    start: int,
    stop: int,
) -> None:
    for k in range(start, stop):
        first = weights[i[k], j[k]]
        second = weights[j[k], i[k]]
        for p in range(len(first)):
            first[p] *= keep[k]
            second[p] *= keep[k]
        if place[i[k]] >= 0:
            first[place[i[k]]] += 1
        if place[j[k]] >= 0:
            second[place[j[k]]] += 1


def renew_weights(
    weights: Float64Array, i: Indices, j: Indices, keep: Float64Array, place: Slots
) -> None:
    """See `kernels_numpy.renew_weights`."""
    nbytes = 256 * len(i)  # a cache line of each weight, read and written
    _share(_renew_weights, (weights, i, j, keep, place), len(i), 2**14, nbytes)


@_jit
def _add_pairs(
    models: FloatArray,
    weights: Float64Array,
    i: Indices,
    j: Indices,
    total: Float64Array,
    start: int,
    stop: int,
) -> None:
    for k in range(start, stop):
        u, w = weights[i[k], j[k]], weights[j[k], i[k]]
        for low in range(0, models.shape[2], _COLUMNS):
            high = min(low + _COLUMNS, models.shape[2])
            target = total[k, low:high]
            for p in range(len(u)):
                if u[p] == 0 and w[p] == 0:
                    continue
                first, second = models[i[k], p, low:high], models[j[k], p, low:high]
                for c in range(len(target)):
                    target[c] += u[p] * np.float64(first[c]) - w[p] * np.float64(second[c])


def add_pairs(
    models: FloatArray, weights: Float64Array, i: Indices, j: Indices, total: Float64Array
) -> None:
    """See `kernels_numpy.add_pairs`."""
    nbytes = 2 * len(i) * models[0].nbytes if len(models) else 0
    _share(_add_pairs, (models, weights, i, j, total), len(i), 32, nbytes)


@_jit
def _add_products(
    rows: FloatArray, weight: Float64Array, total: Float64Array, first: int, last: int
) -> None:
    for low in range(0, rows.shape[1], _COLUMNS):
        high = min(low + _COLUMNS, rows.shape[1])
        for r in range(0, len(rows), 4):  # a sum is read and stored once for four rows
            x0, x1 = rows[r, low:high], rows[r + 1, low:high]
            x2, x3 = rows[r + 2, low:high], rows[r + 3, low:high]
            for k in range(first, last):
                w = weight[k, r : r + 4]
                if w.any():
                    target = total[k, low:high]
                    for c in range(len(target)):
                        target[c] += w[0] * x0[c] + w[1] * x1[c] + w[2] * x2[c] + w[3] * x3[c]


def add_products(rows: FloatArray, weight: Float64Array, total: Float64Array) -> None:
    """See `kernels_numpy.add_products`."""
    _share(_add_products, (rows, weight, total), len(total), 16, len(total) * rows.nbytes)
