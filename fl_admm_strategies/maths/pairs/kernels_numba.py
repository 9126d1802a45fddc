"""The kernels compiled by numba; see `kernels_numpy` for what each of them computes.

A kernel works on a piece of its rows, sums or columns, without the interpreter's lock, and plain
threads share the pieces. Numba's own threads are not used: with OpenMP they share torch's library,
so that torch's number of threads changes behind its back and a process forked afterwards hangs.
Every number is computed by one thread in an order that no split changes, so the bits do not depend
on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .algebra import Float64Array, FloatArray, Indices, Mask, Places, Slots
from .compiling import PIECE_BYTES, jit, jit_exact, jit_ordered, share

# Columns of a vector at a time, so that the sums stay in a core's first cache; the fewer where
# several sums and rows are used at a time.
_COLUMNS, _MIXED_COLUMNS = 2048, 512
# Squares are added up in the vectors' precision in so many sums, of 1024/32 = 32 terms each, so
# that a norm in float32 is off by less than 1e-6. The bits of saved runs depend on both numbers.
_SUMS, _SUM_COLUMNS = 32, 1024


def _rows_in_piece(vectors: FloatArray) -> int:
    width, itemsize = int(vectors.shape[1]), int(vectors.itemsize)
    return max(1, PIECE_BYTES // (width * itemsize))


@jit_exact
def _renew(
    slab: FloatArray,
    row: np.uint64,
    omega: FloatArray,
    first: np.uint64,
    second: np.uint64,
    kept: Any,
    low: np.uint64,
    high: np.uint64,
) -> None:
    if kept == 0:  # what is multiplied by 0 must be finite
        for c in range(low, high):
            slab[row, c] = omega[first, c] - omega[second, c]
    else:
        for c in range(low, high):
            slab[row, c] = (omega[first, c] - omega[second, c]) + kept * slab[row, c]


@jit_exact
def _sum_of_squares(
    slab: FloatArray,
    row: np.uint64,
    low: np.uint64,
    high: np.uint64,
    sums: FloatArray,
    wide: Float64Array,
) -> Any:
    """Return the sum of squares of columns ``low:high``, of which `_SUMS` is a factor.

    Column c goes into sum c modulo `_SUMS`, in the order of the columns; these sums are widened,
    and the upper half of them is added to the lower until one is left.
    """
    one = np.uint64(len(sums))  # no constant: else the loops are unrolled, and not vectorised
    two, three, four = one + one, one + one + one, one + one + one + one
    sums[:] = 0
    start = low
    while start + four <= high:
        for k in range(one):
            c = start + k
            x0, x1 = slab[row, c], slab[row, c + one]
            x2, x3 = slab[row, c + two], slab[row, c + three]
            sums[k] = (((sums[k] + x0 * x0) + x1 * x1) + x2 * x2) + x3 * x3
        start += four
    while start < high:
        for k in range(one):
            x0 = slab[row, start + k]
            sums[k] += x0 * x0
        start += one
    wide[:] = sums
    half = len(wide) // 2
    while half:
        for k in range(half):
            wide[k] += wide[k + half]
        half //= 2
    return wide[0]


@jit_ordered
def _update_rows(
    slab: FloatArray,
    rows: Slots,
    i: Indices,
    j: Indices,
    omega: FloatArray,
    keep: FloatArray,
    sums: FloatArray,
    norms: Float64Array,
    start: int,
    stop: int,
) -> None:
    width = slab.shape[1]
    whole = width // len(sums) * len(sums)
    wide = np.empty(len(sums))
    for k in range(start, stop):
        # Unsigned, so that no index can mean one from the end.
        row, kept = np.uint64(rows[k]), keep[k]
        first, second = np.uint64(i[row]), np.uint64(j[row])
        total = 0.0
        for low in range(0, whole, _SUM_COLUMNS):
            begin, end = np.uint64(low), np.uint64(min(low + _SUM_COLUMNS, whole))
            _renew(slab, row, omega, first, second, kept, begin, end)
            total += _sum_of_squares(slab, row, begin, end, sums, wide)
        for c in range(np.uint64(whole), np.uint64(width)):
            new = omega[first, c] - omega[second, c]
            if kept != 0:
                new += kept * slab[row, c]
            slab[row, c] = new
            square = np.float64(new)
            total += square * square
        if total == np.inf:  # squares that only float64 can hold
            total = 0.0
            for c in range(width):
                square = np.float64(slab[row, c])
                total += square * square
        norms[k] = np.sqrt(total)


def update_rows(
    slab: FloatArray, rows: Slots, i: Indices, j: Indices, omega: FloatArray, keep: FloatArray
) -> Float64Array:
    """See `kernels_numpy.update_rows`."""
    omega = np.ascontiguousarray(omega)
    norms = np.empty(len(rows))

    def update(start: int, stop: int) -> None:
        sums = np.empty(_SUMS, slab.dtype)
        _update_rows(slab, rows, i, j, omega, keep, sums, norms, start, stop)

    share(update, (), len(rows), _rows_in_piece(slab), len(rows) * slab[0].nbytes)
    return norms


@jit
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
    share(_difference_norms, (omega, i, j, norms), len(i), _rows_in_piece(omega), nbytes)
    return norms


@jit
def _add_rows(
    slab: FloatArray,
    rows: Indices,
    clients: Slots,
    weight: Float64Array,
    total: Float64Array,
    first: int,
    last: int,
) -> None:
    chosen = np.empty(rows.shape[1], dtype=np.int64)
    signed = np.empty(rows.shape[1], dtype=slab.dtype)
    for k in range(first, last):
        count = 0
        for j in range(rows.shape[1]):
            row = rows[k, j]
            if 0 <= row < len(weight):
                chosen[count] = row
                signed[count] = weight[row] if j > clients[k] else -weight[row]
                count += 1
        for low in range(0, slab.shape[1], _COLUMNS):
            high = min(low + _COLUMNS, slab.shape[1])
            target = total[k, low:high]
            p = 0
            # Eight rows at a time, in their own precision: widened and stored once for eight.
            while p + 8 <= count:
                r0, r1 = slab[chosen[p], low:high], slab[chosen[p + 1], low:high]
                r2, r3 = slab[chosen[p + 2], low:high], slab[chosen[p + 3], low:high]
                r4, r5 = slab[chosen[p + 4], low:high], slab[chosen[p + 5], low:high]
                r6, r7 = slab[chosen[p + 6], low:high], slab[chosen[p + 7], low:high]
                c0, c1, c2, c3 = signed[p], signed[p + 1], signed[p + 2], signed[p + 3]
                c4, c5, c6, c7 = signed[p + 4], signed[p + 5], signed[p + 6], signed[p + 7]
                for c in range(len(target)):
                    target[c] += np.float64(
                        ((c0 * r0[c] + c1 * r1[c]) + (c2 * r2[c] + c3 * r3[c]))
                        + ((c4 * r4[c] + c5 * r5[c]) + (c6 * r6[c] + c7 * r7[c]))
                    )
                p += 8
            while p < count:
                one, c0 = slab[chosen[p], low:high], signed[p]
                for c in range(len(target)):
                    target[c] += np.float64(c0 * one[c])
                p += 1


def add_rows(
    slab: FloatArray, rows: Indices, clients: Slots, weight: Float64Array, total: Float64Array
) -> None:
    """See `kernels_numpy.add_rows`."""
    nbytes = np.count_nonzero((rows >= 0) & (rows < len(slab))) * slab[0].nbytes
    step = max(1, len(total) * PIECE_BYTES // max(1, nbytes))
    share(_add_rows, (slab, rows, clients, weight, total), len(total), step, nbytes)


@jit_ordered
def _zeta(
    total: Float64Array,
    near: Mask,
    which: Places,
    omega: FloatArray,
    clients: Places,
    result: FloatArray,
    low: int,
    high: int,
) -> None:
    models, counts = np.zeros((len(near), high - low)), np.zeros(len(near))
    for s in range(len(near)):
        target = models[s]
        for j in range(len(omega)):
            if near[s, j]:
                counts[s] += 1
                row = omega[j, low:high]
                for c in range(len(row)):
                    target[c] += np.float64(row[c])
    for k in range(len(total)):
        terms, others, count = total[k, low:high], models[which[k]], counts[which[k]]
        model, found = omega[clients[k], low:high], result[k, low:high]
        for c in range(len(found)):
            wide = np.float64(model[c])
            found[c] = (terms[c] + others[c] - count * wide) / len(omega) + wide


def zeta(
    total: Float64Array, near: Mask, which: Places, omega: FloatArray, clients: Places
) -> FloatArray:
    """See `kernels_numpy.zeta`."""
    result = np.empty(total.shape, dtype=omega.dtype)
    args = (total, near, which, omega, clients, result)
    share(_zeta, args, omega.shape[1], _COLUMNS, len(near) * omega.nbytes)
    return result


@jit_ordered
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
    share(_renew_weights, (weights, i, j, keep, place), len(i), 2**14, nbytes)


@jit_ordered
def _add_pairs(
    models: FloatArray,
    weights: Float64Array,
    i: Indices,
    j: Indices,
    total: Float64Array,
    start: int,
    stop: int,
) -> None:
    width = models.shape[2]
    for k in range(start, stop):
        a, b = i[k], j[k]
        u, w = weights[a, b], weights[b, a]
        for p in range(0, len(u), 4):
            if not (u[p : p + 4].any() or w[p : p + 4].any()):
                continue
            a0, a1, a2, a3 = u[p], u[p + 1], u[p + 2], u[p + 3]
            b0, b1, b2, b3 = w[p], w[p + 1], w[p + 2], w[p + 3]
            for low in range(0, width, _MIXED_COLUMNS):
                high = min(low + _MIXED_COLUMNS, width)
                target = total[k, low:high]
                f0, f1 = models[a, p, low:high], models[a, p + 1, low:high]
                f2, f3 = models[a, p + 2, low:high], models[a, p + 3, low:high]
                s0, s1 = models[b, p, low:high], models[b, p + 1, low:high]
                s2, s3 = models[b, p + 2, low:high], models[b, p + 3, low:high]
                for c in range(len(target)):
                    x0, x1 = np.float64(f0[c]), np.float64(f1[c])
                    x2, x3 = np.float64(f2[c]), np.float64(f3[c])
                    y0, y1 = np.float64(s0[c]), np.float64(s1[c])
                    y2, y3 = np.float64(s2[c]), np.float64(s3[c])
                    first = a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                    target[c] += first - (b0 * y0 + b1 * y1 + b2 * y2 + b3 * y3)


def add_pairs(
    models: FloatArray, weights: Float64Array, i: Indices, j: Indices, total: Float64Array
) -> None:
    """See `kernels_numpy.add_pairs`."""
    nbytes = 2 * len(i) * models[0].nbytes if len(models) else 0
    share(_add_pairs, (models, weights, i, j, total), len(i), 32, nbytes)


@jit_ordered
def _add_products(
    rows: FloatArray, weight: Float64Array, total: Float64Array, first: int, last: int
) -> None:
    for low in range(0, rows.shape[1], _MIXED_COLUMNS):
        high = min(low + _MIXED_COLUMNS, rows.shape[1])
        for r in range(0, len(rows), 4):
            h0, h1 = rows[r, low:high], rows[r + 1, low:high]
            h2, h3 = rows[r + 2, low:high], rows[r + 3, low:high]
            for k in range(first, last):
                w = weight[k, r : r + 4]
                if not w.any():
                    continue
                target = total[k, low:high]
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                for c in range(len(target)):
                    x0, x1 = np.float64(h0[c]), np.float64(h1[c])
                    x2, x3 = np.float64(h2[c]), np.float64(h3[c])
                    target[c] += w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


def add_products(rows: FloatArray, weight: Float64Array, total: Float64Array) -> None:
    """See `kernels_numpy.add_products`."""
    share(_add_products, (rows, weight, total), len(total), 16, len(total) * rows.nbytes)
