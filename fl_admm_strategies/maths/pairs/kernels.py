"""Which kernels do the passes over the pairs' vectors."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

from . import kernels_numpy

Kernels = ModuleType
"""`kernels_numpy`, which says what each kernel computes, or `kernels_numba`, which does it in one
pass over the vectors. Numbers of the two agree to rounding."""


@cache
def fastest_kernels() -> Kernels:
    """Return numba's kernels, or numpy's where numba cannot be imported."""
    try:
        from . import kernels_numba  # half a second
    except ImportError as error:
        logging.getLogger("flwr").info(
            "FPFC's pair updates run on numpy, several times slower than on numba, which cannot be "
            "imported (%s). To install it: pip install numba",
            error,
        )
        return kernels_numpy
    return kernels_numba
