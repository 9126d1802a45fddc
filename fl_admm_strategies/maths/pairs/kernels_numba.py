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

from .algebra import Float64Array, FloatArray, Indices, Places, Slots

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
    delta: FloatArray,
    slots: Slots,
    i: Indices,
    j: Indices,
    omega: FloatArray,
    keep: FloatArray,
    norms: Float64Array,
    start: int,
    stop: int,
) -> None:
    for k in range(start, stop):
        vector, first, second = delta[slots[k]], omega[i[slots[k]]], omega[j[slots[k]]]
        kept = keep[k]
        for c in range(len(vector)):
            vector[c] = (first[c] - second[c]) + kept * vector[c]
        total = 0.0
        for c in range(len(vector)):
            wide = np.float64(vector[c])
            total += wide * wide
        norms[k] = np.sqrt(total)


def update_rows(
    delta: FloatArray, slots: Slots, i: Indices, j: Indices, omega: FloatArray, keep: FloatArray
) -> Float64Array:
    """See `kernels_numpy.update_rows`."""
    norms = np.empty(len(slots))
    args = (delta, slots, i, j, omega, keep, norms)
    nbytes = len(slots) * delta.shape[1] * delta.itemsize
    _share(_update_rows, args, len(slots), _rows_in_piece(delta), nbytes)
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
    delta: FloatArray,
    slots: Indices,
    clients: Places,
    weight: FloatArray,
    total: Float64Array,
    start: int,
    stop: int,
) -> None:
    chosen = np.zeros(slots.shape[1] + 3, dtype=np.int64)
    for k in range(start, stop):
        count = 0
        signed = np.zeros(slots.shape[1] + 3, dtype=delta.dtype)  # 0 beyond the last vector
        for j in range(slots.shape[1]):
            slot = slots[k, j]
            if slot >= 0:
                chosen[count] = slot
                signed[count] = weight[slot] if j > clients[k] else -weight[slot]
                count += 1
        chosen[count : count + 3] = chosen[0]
        for low in range(0, delta.shape[1], _COLUMNS):
            high = min(low + _COLUMNS, delta.shape[1])
            target = total[k, low:high]
            for p in range(0, count, 4):  # a sum is read and stored once for four vectors
                r0, r1 = delta[chosen[p], low:high], delta[chosen[p + 1], low:high]
                r2, r3 = delta[chosen[p + 2], low:high], delta[chosen[p + 3], low:high]
                w = signed[p : p + 4]
                for c in range(len(target)):
                    target[c] += (w[0] * r0[c] + w[1] * r1[c]) + (w[2] * r2[c] + w[3] * r3[c])


def add_rows(
    delta: FloatArray, slots: Indices, clients: Places, weight: Float64Array, total: Float64Array
) -> None:
    """See `kernels_numpy.add_rows`."""
    nbytes = np.count_nonzero(slots >= 0) * delta.shape[1] * delta.itemsize
    step = max(1, len(total) * _PIECE_BYTES // max(1, nbytes))
    own = weight.astype(delta.dtype)  # products in the vectors' precision, sums in float64
    _share(_add_rows, (delta, slots, clients, own, total), len(total), step, nbytes)
