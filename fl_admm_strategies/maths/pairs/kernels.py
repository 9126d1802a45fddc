"""The passes over the pairs' vectors: what a kernel computes, and which kernels to use."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, Protocol

from ..checks import check_choice
from . import kernels_numpy
from .algebra import Float64Array, FloatArray, Indices, Mask, Places, Slots

BLOCK_BYTES = 8 * 2**20  # of vectors that are read at a time, as float64
CHUNK = 8  # models of a client in one array of `history.History`, which the kernels know

Engine = Literal["numba", "numpy"]


class Kernels(Protocol):
    """`kernels_numpy` and `kernels_numba`, which do each of these in one pass over the vectors.

    The rows of a `slab` are the vectors delta of pairs, whose clients are `i` and `j`. Numbers of
    the two agree to rounding.
    """

    def update_rows(
        self,
        slab: FloatArray,
        rows: Slots,
        i: Indices,
        j: Indices,
        omega: FloatArray,
        keep: FloatArray,
    ) -> Float64Array:
        """Set ``slab[rows]`` to `algebra.next_delta` and return its norms.

        That is ``omega[i[rows]] - omega[j[rows]] + keep * slab[rows]``. A row with ``keep == 0`` is
        not read: it may be uninitialised. numba's sums of squares have up to 32 terms in
        `slab`'s precision, so that a norm in float32 is off by less than 1e-6, relatively.
        """

    def difference_norms(self, omega: FloatArray, i: Indices, j: Indices) -> Float64Array:
        """Return ``||omega[i] - omega[j]||``."""

    def add_rows(
        self,
        slab: FloatArray,
        rows: Indices,
        clients: Slots,
        weight: Float64Array,
        total: Float64Array,
    ) -> None:
        """Add to ``total[k]`` the ``weight * slab`` of client k's pairs, negated where it is `j`.

        ``rows[k, j]`` is the row of its pair with client j; where it is none of `slab`'s, another
        slab has the pair, or no slab.
        """

    def zeta(
        self, total: Float64Array, near: Mask, which: Places, omega: FloatArray, clients: Places
    ) -> FloatArray:
        """Return `algebra.zeta` of `clients`, in the dtype of `omega`.

        With ``near[which[k]]`` for N_i, and `total` without the omega_j; it is overwritten.
        """

    def renew_weights(
        self, weights: Float64Array, i: Indices, j: Indices, keep: Float64Array, place: Slots
    ) -> None:
        """Multiply ``weights[i, j]`` and ``weights[j, i]`` by `keep`; add 1 to those at `place`.

        ``place[i]`` is where in ``weights[i, j]``, or -1.
        """

    def add_pairs(
        self, models: FloatArray, weights: Float64Array, i: Indices, j: Indices, total: Float64Array
    ) -> None:
        """Add ``weights[i, j] @ models[i] - weights[j, i] @ models[j]`` to `total`."""

    def add_products(self, rows: FloatArray, weight: Float64Array, total: Float64Array) -> None:
        """Add ``weight @ rows`` to `total`; a sum does not depend on which others there are."""


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
