"""Vectors in numbered slots, in blocks of memory that are given back when they are empty."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np

from .algebra import FloatArray, Slots

# Above 32 MiB glibc gives each block its own mapping, so a dropped slab really goes back to the OS.
_SLAB_BYTES = 48 * 2**20


def fitting_rows(width: int, dtype: np.dtype[Any], most: int) -> int:
    """Return how many vectors a slab should hold where there can be `most` of them at a time."""
    return max(1, min(most, _SLAB_BYTES // (width * dtype.itemsize)))


class Slabs:
    """Vectors of one width in slots 0, 1, 2, ..., so many to a slab.

    Parameters
    ----------
    width : int
        Length of a vector.
    dtype : dtype
        Of its entries.
    rows : int
        Vectors to a slab; see `fitting_rows`.
    """

    def __init__(self, width: int, dtype: np.dtype[Any], rows: int) -> None:
        self.width = width
        self.dtype = dtype
        self.rows = rows
        self._slabs: list[FloatArray] = []

    def __len__(self) -> int:
        """Return the number of slabs."""
        return len(self._slabs)

    def __iter__(self) -> Iterator[FloatArray]:
        return iter(self._slabs)

    @property
    def nbytes(self) -> int:
        """Bytes held, unused rows included."""
        return sum(slab.nbytes for slab in self._slabs)

    def resize(self, count: int) -> None:
        """Hold as many slabs as the slots 0..count-1 need; rows of a new one are not written."""
        needed = -(-count // self.rows)
        del self._slabs[needed:]
        while len(self._slabs) < needed:
            # Not zeros: a page costs memory only once a row on it is written.
            self._slabs.append(np.empty((self.rows, self.width), dtype=self.dtype))

    def widen(self, rows: int, count: int) -> None:
        """Put more rows into a slab, keeping slots 0..count-1, which are in one slab at most."""
        for slab in self._slabs:
            larger = np.empty((rows, self.width), dtype=self.dtype)
            larger[:count] = slab[:count]
            self._slabs = [larger]
        self.rows = rows

    def row(self, slot: int | np.integer) -> FloatArray:
        """Return the vector of a slot, a view."""
        number, row = divmod(int(slot), self.rows)
        vector: FloatArray = self._slabs[number][row]
        return vector

    def pieces(self, slots: Slots) -> Iterator[tuple[FloatArray, slice, Slots, slice]]:
        """Yield for ascending slots each slab with some of them.

        And the span of all slots in it, the rows in it that are asked for, and the part of `slots`
        that these are.
        """
        stop = 0
        for number, slab in enumerate(self._slabs):
            span = slice(number * self.rows, (number + 1) * self.rows)
            start, stop = stop, bisect_left(slots, span.stop, stop)
            if start < stop:
                part = slice(start, stop)
                yield slab, span, slots[part] - span.start, part

    def used(self, count: int) -> Iterator[tuple[FloatArray, slice]]:
        """Yield each slab's rows of slots 0..count-1, a view, and the span of these slots."""
        for number, slab in enumerate(self._slabs):
            span = slice(number * self.rows, min((number + 1) * self.rows, count))
            yield slab[: span.stop - span.start], span
