"""Pairs with a vector of their own: delta_ij, its norm and s_ij, in slots 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..blocks import any_length, check_saved, spec_of
from .algebra import Indices, Mask, Places, Slots

_COLUMNS = ("pair_i", "pair_j", "norm", "scale", "delta")  # as saved


class Vectors:
    """Pairs by their vectors.

    A pair that turns plain gives its slot up, and the last one moves there, so that the vectors of
    few pairs take little memory.

    Parameters
    ----------
    num_clients : int
    width : int
        d.
    dtype : dtype
        Of the vectors.

    Attributes
    ----------
    pair_i, pair_j : ndarray of int
        By slot the clients of the pair, i < j.
    norm, scale : ndarray of float
        ||delta_ij|| and s_ij. Both are kept, since s_ij must survive a change of the penalty.
    delta : ndarray of shape (pairs, d)
    slot_of : ndarray of int, shape (m, m)
        The slot by (i, j) and by (j, i); -1 where a pair has none.
    """

    def __init__(self, num_clients: int, width: int, dtype: np.dtype[Any]) -> None:
        self.pair_i = np.empty(0, dtype=np.int32)
        self.pair_j = np.empty(0, dtype=np.int32)
        self.norm = np.empty(0)
        self.scale = np.empty(0)
        self.delta = np.empty((0, width), dtype)
        self._index(num_clients)

    def __len__(self) -> int:
        return len(self.pair_i)

    def slots_with(self, clients: Mask) -> Slots:
        """Return the slots of the pairs with one of these clients or two, ascending."""
        return np.flatnonzero(clients.take(self.pair_i) | clients.take(self.pair_j))

    def open(self, i: Indices, j: Indices) -> Slots:
        """Return new slots for plain pairs: s_ij is 1, so that no update reads their delta_ij."""
        slots = np.arange(len(self), len(self) + len(i))
        self.pair_i = np.concatenate([self.pair_i, i])
        self.pair_j = np.concatenate([self.pair_j, j])
        self.norm = np.concatenate([self.norm, np.zeros(len(i))])
        self.scale = np.concatenate([self.scale, np.ones(len(i))])
        self._resize(len(self))
        self.slot_of[i, j] = self.slot_of[j, i] = slots
        return slots

    def close(self, slots: Slots) -> None:
        """Give these slots up, ascending: the last ones move into the holes."""
        if not len(slots):
            return
        i, j = self.pair_i[slots], self.pair_j[slots]
        self.slot_of[i, j] = self.slot_of[j, i] = -1
        left = len(self) - len(slots)
        holes = slots[slots < left]
        movers = np.setdiff1d(np.arange(left, len(self)), slots, assume_unique=True)
        for hole, mover in zip(holes, movers, strict=True):
            self.delta[hole] = self.delta[mover]
        for array in (self.pair_i, self.pair_j, self.norm, self.scale):
            array[holes] = array[movers]
        self.pair_i, self.pair_j = self.pair_i[:left].copy(), self.pair_j[:left].copy()
        self.norm, self.scale = self.norm[:left].copy(), self.scale[:left].copy()
        self._resize(left)
        i, j = self.pair_i[holes], self.pair_j[holes]
        self.slot_of[i, j] = self.slot_of[j, i] = holes

    def renumber(self, new: Places, num_clients: int) -> None:
        """Give every client i its new index new[i] among so many; the order stays."""
        self.pair_i = new[self.pair_i].astype(np.int32)
        self.pair_j = new[self.pair_j].astype(np.int32)
        self._index(num_clients)

    def _index(self, num_clients: int) -> None:
        self.slot_of = np.full((num_clients, num_clients), -1, dtype=np.int32)
        slots = np.arange(len(self))
        self.slot_of[self.pair_i, self.pair_j] = self.slot_of[self.pair_j, self.pair_i] = slots

    def _resize(self, count: int) -> None:
        """Hold so many vectors; new ones are 0."""
        shape = (count, self.delta.shape[1])
        try:
            self.delta.resize(shape)  # in place, where a copy would take the memory twice
        except ValueError:  # others refer to it, such as a state that is being saved
            kept = self.delta[:count]
            self.delta = np.zeros(shape, kept.dtype)
            self.delta[: len(kept)] = kept

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the pairs and their vectors as plain arrays, not copied."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take in what `state_arrays` returned; copied.

        Raises
        ------
        ValueError
            If they do not fit together or these clients.
        """
        num_clients = len(self.slot_of)
        check_saved(arrays, any_length(spec_of(self.state_arrays())))
        i, j, scale = arrays["pair_i"], arrays["pair_j"], arrays["scale"]
        if (
            any(len(arrays[name]) != len(i) for name in _COLUMNS)
            or np.any((i < 0) | (i >= j) | (j >= num_clients) | np.isnan(scale))
            or len(np.unique(i.astype(np.int64) * num_clients + j)) != len(i)
        ):
            raise ValueError("The saved pairs do not agree: the state is damaged.")
        for name in _COLUMNS:
            setattr(self, name, np.array(arrays[name]))
        self._index(num_clients)
