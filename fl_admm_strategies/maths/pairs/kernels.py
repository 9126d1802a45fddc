"""Which kernels do the passes over the pairs' vectors."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Literal

from ..checks import check_choice
from . import kernels_numpy

BLOCK_BYTES = 8 * 2**20  # of vectors that are read at a time, as float64
CHUNK = 8  # models of a client in one array of `history.ModelHistory`; a multiple of 4

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
    if engine != "numpy":
        try:
            from . import kernels_numba  # half a second
        except ImportError as error:
            if engine == "numba":
                raise ImportError(
                    "engine is 'numba', expected that numba can be imported. Install it: pip "
                    "install numba"
                ) from error
            _say_once(str(error))
        else:
            return "numba", kernels_numba
    return "numpy", kernels_numpy


@cache
def _say_once(reason: str) -> None:
    logging.getLogger("flwr").info(
        "FPFC's pair updates run on numpy, several times slower than on numba, which cannot be "
        "imported (%s). To install it: pip install numba",
        reason,
    )
