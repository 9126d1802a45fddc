"""Numba kernels of `fl_admm_strategies.pairwise`; the numpy forms there say what each computes.

Every result element is computed by one thread in an order that does not depend on the number of
threads, so neither do the bits.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Lets sums be vectorised. 'nnan' and 'ninf' are left out so that NaN and Inf stay what they are.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

# Columns that one thread sums at a time. Fixed: see the module docstring.
_COLUMNS = 1024


def _jit(function: _Function) -> _Function:
    try:
        compiled = numba.njit(parallel=True, fastmath=_FASTMATH, cache=True)(function)
    except RuntimeError:  # numba found no directory it may write its cache to
        compiled = numba.njit(parallel=True, fastmath=_FASTMATH)(function)
    return cast(_Function, compiled)


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
    plus: NDArray[np.int32],
    minus: NDArray[np.int32],
    coefficient: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    width = slab.shape[1]
    for chunk in numba.prange((width + _COLUMNS - 1) // _COLUMNS):
        low = chunk * _COLUMNS
        high = min(low + _COLUMNS, width)
        for k in range(len(rows)):
            delta = slab[rows[k], low:high]
            weight = coefficient[k]
            if plus[k] >= 0:
                target = total[plus[k], low:high]
                for c in range(len(delta)):
                    target[c] += weight * np.float64(delta[c])
            if minus[k] >= 0:
                target = total[minus[k], low:high]
                for c in range(len(delta)):
                    target[c] -= weight * np.float64(delta[c])


@_jit
def add_partners(
    omega: NDArray[Any], partners: NDArray[np.bool_], total: NDArray[np.float64]
) -> None:
    width = omega.shape[1]
    for chunk in numba.prange((width + _COLUMNS - 1) // _COLUMNS):
        low = chunk * _COLUMNS
        high = min(low + _COLUMNS, width)
        for k in range(len(partners)):
            target = total[k, low:high]
            for j in range(len(omega)):
                if partners[k, j]:
                    row = omega[j, low:high]
                    for c in range(len(row)):
                        target[c] += np.float64(row[c])
