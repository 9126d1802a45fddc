"""Which kernels do the passes over the pairs' vectors."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Literal

from ..checks import check_choice
from . import kernels_numpy

BLOCK_BYTES = 8 * 2**20  # of vectors that are read at a time, as float64
CHUNK = 8  # models of a client in one array of `history.History`, which the kernels know

Engine = Literal["numba", "numpy"]


Kernels = ModuleType
"""`kernels_numpy`, which says what each kernel computes, or `kernels_numba`, which does it in one
pass over the vectors. Numbers of the two agree to rounding."""


def choose_kernels(engine: Engine | None) -> tuple[Engine, Kernels]:
    """Return the kernels asked for; with None numba's, where numba can be imported.

    Raises
    ------
    ValueError
        If `engine` is neither.
    ImportError
        If ``engine="numba"`` and numba cannot be imported.
    """
    if engine is not None:
        check_choice("engine", engine, ("numba", "numpy"))
    if engine == "numpy":
        return "numpy", kernels_numpy
    kernels = numba_kernels()
    if not isinstance(kernels, ImportError):
        return "numba", kernels
    if engine == "numba":
        raise ImportError(
            "engine is 'numba', expected that numba can be imported. Install it: pip install numba"
        ) from kernels
    return "numpy", kernels_numpy


@cache
def numba_kernels() -> Kernels | ImportError:
    """Import numba's kernels, or return why that fails and log it, once.

    Not at the top of the module, since it takes half a second.
    """
    try:
        from . import kernels_numba
    except ImportError as error:
        logging.getLogger("flwr").info(
            "FPFC's pair updates run on numpy, several times slower than on numba, which cannot be "
            "imported (%s). To install it: pip install numba",
            error,
        )
        return error
    return kernels_numba
