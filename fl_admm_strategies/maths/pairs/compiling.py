"""How `kernels_numba` compiles its kernels, and shares their work among threads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Lets sums be vectorised. 'nnan' and 'ninf' are left out so that NaN and Inf stay what they are.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

PIECE_BYTES = 2 * 2**20  # what a thread takes at a time: enough to outweigh handing it over


def jit(function: _Function, fastmath: set[str] = _FASTMATH) -> _Function:
    """Compile a kernel; it is kept on disk for the next process."""
    try:
        compiled = numba.njit(nogil=True, fastmath=fastmath, cache=True)(function)
    except RuntimeError:  # numba found no directory it may write its cache to
        compiled = numba.njit(nogil=True, fastmath=fastmath)(function)
    return cast(_Function, compiled)


def jit_ordered(function: _Function) -> _Function:
    """Compile without leave to reorder sums, for kernels that vectorise without it."""
    return jit(function, {"contract"})


def jit_exact(function: _Function) -> _Function:
    """Compile so that every product is rounded before it is added, on every processor."""
    return jit(function, set())


def share(
    kernel: Callable[..., None], args: tuple[Any, ...], count: int, step: int, nbytes: int
) -> None:
    """Run ``kernel(*args, start, stop)`` over ``range(count)`` in pieces of `step`, on all cores.

    `nbytes` are read in all; few are not worth starting threads for.
    """
    if count <= step or nbytes < 8 * PIECE_BYTES:
        kernel(*args, 0, count)
        return
    starts = range(0, count, step)
    # list() waits for every piece and raises what one raised.
    list(_pool().map(lambda start: kernel(*args, start, min(start + step, count)), starts))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fpfc-pairs")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)
