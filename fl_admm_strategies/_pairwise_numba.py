"""Numba kernels of `fl_admm_strategies.pairwise`; the numpy forms there say what each computes.

Every result element is computed by one thread in an order that does not depend on the number of
threads, so neither do the bits.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Lets sums be vectorised. 'nnan' and 'ninf' are left out so that NaN and Inf stay what they are.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

# Columns that one thread sums at a time. Fixed: see the module docstring.
_COLUMNS = 512


# With OpenMP, numba's usual choice, a process forked after the first kernel has run hangs as soon
# as torch uses its threads: the two share one OpenMP library. Workers are forked like that.
# NUMBA_THREADING_LAYER still decides where it is set.
_config: Any = numba.config
if _config.THREADING_LAYER == "default":
    _config.THREADING_LAYER = "workqueue"

# The work queue ends the process if two threads enter it at a time.
_ONE_AT_A_TIME = threading.Lock()


def _jit(function: _Function) -> _Function:
    try:
        compiled = numba.njit(parallel=True, fastmath=_FASTMATH, cache=True)(function)
    except RuntimeError:  # numba found no directory it may write its cache to
        compiled = numba.njit(parallel=True, fastmath=_FASTMATH)(function)

    @functools.wraps(function)
    def run(*arrays: Any) -> Any:
        with _ONE_AT_A_TIME:
            return compiled(*arrays)

    return cast(_Function, run)


@_jit
def update_rows(
    slab: NDArray[Any],
    rows: NDArray[np.int64],
    i: NDArray[np.int32],
    j: NDArray[np.int32],
    omega: NDArray[Any],
    keep: NDArray[Any],
) -> NDArray[np.float64]:
    norms = np.empty(len(rows))
    for k in numba.prange(len(rows)):
        delta = slab[rows[k]]
        first = omega[i[k]]
        second = omega[j[k]]
        kept = keep[k]
        total = 0.0
        if kept == 0:
            for c in range(len(delta)):
                new = first[c] - second[c]
                delta[c] = new
                wide = np.float64(new)
                total += wide * wide
        else:
            for c in range(len(delta)):
                new = first[c] - second[c] + kept * delta[c]
                delta[c] = new
                wide = np.float64(new)
                total += wide * wide
        norms[k] = np.sqrt(total)
    return norms


@_jit
def difference_norms(
    omega: NDArray[Any], i: NDArray[np.int32], j: NDArray[np.int32]
) -> NDArray[np.float64]:
    norms = np.empty(len(i))
    for k in numba.prange(len(i)):
        first = omega[i[k]]
        second = omega[j[k]]
        total = 0.0
        for c in range(len(first)):
            wide = np.float64(first[c] - second[c])
            total += wide * wide
        norms[k] = np.sqrt(total)
    return norms


@_jit
def residual_norms(
    slab: NDArray[Any],
    rows: NDArray[np.int64],
    i: NDArray[np.int32],
    j: NDArray[np.int32],
    omega: NDArray[Any],
    scale: NDArray[np.float64],
) -> NDArray[np.float64]:
    norms = np.empty(len(rows))
    for k in numba.prange(len(rows)):
        delta = slab[rows[k]]
        first = omega[i[k]]
        second = omega[j[k]]
        total = 0.0
        for c in range(len(delta)):
            wide = np.float64(first[c] - second[c]) - scale[k] * np.float64(delta[c])
            total += wide * wide
        norms[k] = np.sqrt(total)
    return norms


@_jit
def add_rows(
    slab: NDArray[Any],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    coefficient: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    width = slab.shape[1]
    for chunk in numba.prange((width + _COLUMNS - 1) // _COLUMNS):
        low = chunk * _COLUMNS
        high = min(low + _COLUMNS, width)
        for k in range(len(total)):
            target = total[k, low:high]
            p = starts[k]
            # Four rows at a time, so that the sum is loaded and stored once for four of them.
            while p + 4 <= starts[k + 1]:
                row0 = slab[rows[p], low:high]
                row1 = slab[rows[p + 1], low:high]
                row2 = slab[rows[p + 2], low:high]
                row3 = slab[rows[p + 3], low:high]
                c0 = coefficient[p]
                c1 = coefficient[p + 1]
                c2 = coefficient[p + 2]
                c3 = coefficient[p + 3]
                for c in range(len(target)):
                    target[c] += (c0 * np.float64(row0[c]) + c1 * np.float64(row1[c])) + (
                        c2 * np.float64(row2[c]) + c3 * np.float64(row3[c])
                    )
                p += 4
            while p < starts[k + 1]:
                row = slab[rows[p], low:high]
                c0 = coefficient[p]
                for c in range(len(target)):
                    target[c] += c0 * np.float64(row[c])
                p += 1


@_jit
def sum_chosen(omega: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    width = omega.shape[1]
    total = np.zeros((len(chosen), width))
    for chunk in numba.prange((width + _COLUMNS - 1) // _COLUMNS):
        low = chunk * _COLUMNS
        high = min(low + _COLUMNS, width)
        for k in range(len(chosen)):
            target = total[k, low:high]
            for j in range(len(omega)):
                if chosen[k, j]:
                    row = omega[j, low:high]
                    for c in range(len(row)):
                        target[c] += np.float64(row[c])
    return total
