"""Pairs with a vector of their own: delta_ij, its norm and s_ij, in slots 0, 1, 2, ...

A pair that turns plain gives its slot up, and the last one moves there, so that the vectors of few
pairs take little memory: they are in slabs, and an empty slab is dropped. The other form of a pair
is `history`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..blocks import any_length, check_saved, spec_of
from . import algebra
from .algebra import Float64Array, FloatArray, Indices, Mask, Places, Prox, Slots, Weight, row_norms
from .kernels import BLOCK_BYTES, Kernels

# Above 32 MiB glibc gives each block its own mapping, so a dropped slab really goes back to the OS.
_SLAB_BYTES = 48 * 2**20
_COLUMNS = ("pair_i", "pair_j", "norm", "scale")  # of the saved pairs, beside their vectors


class Vectors:
    """Pairs by their vectors.

    Parameters
    ----------
    omega : ndarray of shape (m, d)
        The clients' models, whose dtype the vectors have.
    kernels : Kernels
    """

    def __init__(self, omega: FloatArray, kernels: Kernels) -> None:
        self._num_clients, self.width = omega.shape
        self.dtype = omega.dtype
        self._kernels = kernels
        self._pair_i = np.empty(0, dtype=np.int32)
        self._pair_j = np.empty(0, dtype=np.int32)
        self._norm = np.empty(0)
        # Kept beside the norm, not computed from it: it must survive a change of the penalty.
        self._scale = np.empty(0)
        self._slab_rows = max(1, _SLAB_BYTES // (self.width * self.dtype.itemsize))
        self._slabs: list[FloatArray] = []
        self._slot_of = self._no_slots()

    def _no_slots(self) -> Indices:
        """Return an index of slots, by (i, j) and by (j, i): all -1, no pair has one."""
        return np.full((self._num_clients, self._num_clients), -1, dtype=np.int32)

    @property
    def num_pairs(self) -> int:
        """Number of unordered pairs that are kept here."""
        return len(self._pair_i)

    @property
    def nbytes(self) -> int:
        """Bytes held by the pairs that there are."""
        index = (self._pair_i, self._pair_j, self._norm, self._scale, self._slot_of)
        return sum(array.nbytes for array in index) + self.vector_bytes

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vectors alone."""
        return self.num_pairs * int(self.width) * self.dtype.itemsize

    def scale(self, i: NDArray[np.integer], j: NDArray[np.integer]) -> Float64Array:
        """Return s_ij of pairs i < j; NaN where a pair is not kept here."""
        if not self.num_pairs:
            return np.full(len(i), np.nan)
        slots = self._slot_of[i, j]
        return np.where(slots >= 0, self._scale[slots], np.nan)

    def norms(self, i: NDArray[np.integer], j: NDArray[np.integer]) -> Float64Array:
        """Return ||delta_ij|| of pairs i < j that are kept here."""
        norms: Float64Array = self._norm[self._slot_of[i, j]]
        return norms

    def are_within(self, i: Indices, j: Indices, nu: float) -> Mask:
        """Return whether ||theta_ij|| <= nu, of pairs i < j that are kept here."""
        near: Mask = algebra.theta(self.scale(i, j), self.norms(i, j)) <= nu
        return near

    def pairs(self) -> tuple[Indices, Indices]:
        """Return the pairs i < j that are kept here."""
        return self._pair_i, self._pair_j

    def vectors(self, i: Indices, j: Indices) -> Iterator[tuple[Places, FloatArray]]:
        """Yield delta_ij of some pairs, as `ModelHistory.vectors` does."""
        slots = self._slot_of[i, j].astype(np.int64)
        order, step = np.argsort(slots), max(1, BLOCK_BYTES // (8 * self.width))
        for start in range(0, len(order), step):
            pairs = order[start : start + step]
            for slab, _, rows, part in self._pieces(slots[pairs]):
                yield pairs[part], slab[rows]

    def slots_with(self, takes_part: Mask) -> Slots:
        """Return the slots of the pairs with one of these clients or two, ascending."""
        return np.flatnonzero(takes_part.take(self._pair_i) | takes_part.take(self._pair_j))

    # ------------------------------------------------------------------------------------------
    # Algorithm 2
    # ------------------------------------------------------------------------------------------

    def update(self, slots: Slots, omega: FloatArray, prox: Prox) -> None:
        """Update the pairs in these slots, ascending; those that turn plain are given up."""
        before = self._scale.take(slots)
        norm = self._renew_deltas(slots, omega, algebra.carried(before))
        scale = prox(norm, self._pair_i[slots], self._pair_j[slots])  # (6), and with it (A.3)
        self._norm[slots], self._scale[slots] = norm, scale
        if (plain := algebra.turns_plain(before, scale)).any():
            self._close(slots[plain])

    def open(self, i: Indices, j: Indices, omega: FloatArray, prox: Prox) -> None:
        """Take in plain pairs that an update has made something else: delta = omega_i - omega_j."""
        slots = self._append(i, j)
        # The norm is that of the vector as it is stored.
        self._norm[slots] = self._renew_deltas(slots, omega, np.zeros(len(i)))
        self._scale[slots] = prox(self._norm[slots], i, j)

    def take_over(
        self,
        i: Indices,
        j: Indices,
        scale: Float64Array,
        blocks: Iterator[tuple[Places, Float64Array]],
    ) -> None:
        """Take in pairs with these s_ij and delta_ij, which `ModelHistory.vectors` yields."""
        slots = self._append(i, j)
        self._scale[slots] = scale
        for part, vectors in blocks:
            for slot, vector in zip(slots[part], vectors, strict=True):
                self._row(slot)[:] = vector
            # To rounding the norm that s belongs to.
            self._norm[slots[part]] = row_norms(vectors)

    def _renew_deltas(self, slots: Slots, omega: FloatArray, keep: Float64Array) -> Float64Array:
        """Set delta_ij to omega_i - omega_j + keep delta_ij, return ||delta_ij||; slots ascend."""
        norm = np.empty(len(slots))
        keep = keep.astype(self.dtype)
        for slab, span, rows, part in self._pieces(slots):
            i, j = self._pair_i[span], self._pair_j[span]
            norm[part] = self._kernels.update_rows(slab, rows, i, j, omega, keep[part])
        return norm

    def add_sums(self, clients: Places, weight: Weight, total: Float64Array) -> Mask:
        """Add sum_j weight(s_ij) delta_ij over the partners j of each client i to `total`.

        Returns
        -------
        ndarray of bool, shape (len(clients), m)
            Which clients are a partner.
        """
        slots = self._slot_of[clients]
        weights = weight(self._scale)
        for slab, span in self._used():
            rows = slots - np.int32(span.start)
            self._kernels.add_rows(slab, rows, clients, weights[span], total)
        partners: Mask = slots >= 0
        return partners

    # ------------------------------------------------------------------------------------------
    # Clients that come and go
    # ------------------------------------------------------------------------------------------

    def insert(self, places: Sequence[int]) -> None:
        """Take in clients without pairs, before these present ones as `numpy.insert` counts."""
        is_old = np.insert(np.ones(self._num_clients, dtype=np.bool_), places, False)
        self._renumber(np.flatnonzero(is_old), len(is_old))

    def remove(self, stays: Mask) -> None:
        """Remove all other clients, with their pairs."""
        self._close(self.slots_with(~stays))
        self._renumber(np.cumsum(stays) - 1, int(stays.sum()))

    def _renumber(self, new: NDArray[np.integer], num_clients: int) -> None:
        """Give every client i its new index new[i] among so many; the order stays."""
        self._num_clients = num_clients
        self._pair_i = new[self._pair_i].astype(np.int32)
        self._pair_j = new[self._pair_j].astype(np.int32)
        self._slot_of = self._no_slots()
        self._index(np.arange(self.num_pairs))

    # ------------------------------------------------------------------------------------------
    # Slots
    # ------------------------------------------------------------------------------------------

    def _row(self, slot: int | np.integer) -> FloatArray:
        """Return the vector of a slot, a view."""
        number, row = divmod(int(slot), self._slab_rows)
        vector: FloatArray = self._slabs[number][row]
        return vector

    def _pieces(self, slots: Slots) -> Iterator[tuple[FloatArray, slice, Slots, slice]]:
        """Yield for ascending slots each slab with some of them.

        And the span of all slots in it, the rows in it that are asked for, and the part of `slots`
        that these are.
        """
        stop = 0
        for number, slab in enumerate(self._slabs):
            span = slice(number * self._slab_rows, (number + 1) * self._slab_rows)
            start, stop = stop, bisect_left(slots, span.stop, stop)
            if start < stop:
                part = slice(start, stop)
                yield slab, span, slots[part] - span.start, part

    def _used(self) -> Iterator[tuple[FloatArray, slice]]:
        """Yield each slab's used rows, a view, and the span of these slots."""
        for number, slab in enumerate(self._slabs):
            start = number * self._slab_rows
            span = slice(start, min(start + self._slab_rows, self.num_pairs))
            yield slab[: span.stop - span.start], span

    def _resize(self, count: int) -> None:
        """Hold as many slabs as the slots 0..count-1 need; rows of a new one are not written."""
        needed = -(-count // self._slab_rows)
        del self._slabs[needed:]
        while len(self._slabs) < needed:
            # Not zeros: a page costs memory only once a row on it is written.
            self._slabs.append(np.empty((self._slab_rows, self.width), self.dtype))

    def _append(self, i: Indices, j: Indices) -> Slots:
        """Return new slots for these pairs; vector, norm and scale are still to be written."""
        slots = np.arange(self.num_pairs, self.num_pairs + len(i))
        self._pair_i = np.concatenate([self._pair_i, i])
        self._pair_j = np.concatenate([self._pair_j, j])
        self._norm = np.concatenate([self._norm, np.empty(len(i))])
        self._scale = np.concatenate([self._scale, np.empty(len(i))])
        self._index(slots)
        self._resize(self.num_pairs)
        return slots

    def _close(self, slots: Slots) -> None:
        """Give these slots up, ascending: the last ones move into the holes."""
        if not len(slots):
            return
        i, j = self._pair_i[slots], self._pair_j[slots]
        self._slot_of[i, j] = self._slot_of[j, i] = -1
        left = self.num_pairs - len(slots)
        holes = slots[slots < left]
        stays = np.ones(len(slots), dtype=np.bool_)
        stays[slots[slots >= left] - left] = False
        movers = left + np.flatnonzero(stays)
        for hole, mover in zip(holes, movers, strict=True):
            self._row(hole)[:] = self._row(mover)
        for array in (self._pair_i, self._pair_j, self._norm, self._scale):
            array[holes] = array[movers]
        self._pair_i, self._pair_j = self._pair_i[:left].copy(), self._pair_j[:left].copy()
        self._norm, self._scale = self._norm[:left].copy(), self._scale[:left].copy()
        self._index(holes)
        self._resize(left)

    def _index(self, slots: Slots) -> None:
        """Note that the pairs of these slots are in them."""
        i, j = self._pair_i[slots], self._pair_j[slots]
        self._slot_of[i, j] = self._slot_of[j, i] = slots

    # ------------------------------------------------------------------------------------------
    # Saving and loading
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as plain arrays; the vectors ``delta.0``, ... are views."""
        columns = (self._pair_i, self._pair_j, self._norm, self._scale)
        vectors = enumerate(slab for slab, _ in self._used())
        return {
            **dict(zip(_COLUMNS, columns, strict=True)),
            **{f"delta.{number}": rows for number, rows in vectors},
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take in, where no pair is kept yet, what `state_arrays` returned; copied.

        Raises
        ------
        ValueError
            If they do not fit together or these clients.
        """
        deltas = [f"delta.{k}" for k in range(sum(name.startswith("delta.") for name in arrays))]
        spec = any_length(spec_of(self.state_arrays()))
        check_saved(arrays, spec | dict.fromkeys(deltas, ((-1, self.width), self.dtype)))
        i, j, norm, scale = (arrays[name] for name in _COLUMNS)
        vectors = [arrays[name] for name in deltas]
        if (
            not len(i) == len(j) == len(norm) == len(scale) == sum(map(len, vectors))
            or np.any((i < 0) | (i >= j) | (j >= self._num_clients) | np.isnan(scale))
            or len(np.unique(i.astype(np.int64) * self._num_clients + j)) != len(i)
        ):
            raise ValueError("The saved pairs do not agree: the state is damaged.")
        slots = self._append(i, j)
        self._norm[:], self._scale[:] = norm, scale
        for slot, vector in zip(slots, chain(*vectors), strict=True):
            self._row(slot)[:] = vector
