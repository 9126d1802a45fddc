"""Consensus on the items' factors of matrix completion, with memory for what clients rated only.

A client that starts at V and takes the exact minimiser leaves the factors of an item that it did
not rate at V - Y_i/beta, and Y_i = 0 there at the start. So Y_i stays 0 for these items, and its
copy of them is V. Kept of a client are the items that it rated, and Y_i/beta of these. V is the
mean of the participants' copies plus the mean of all Y_i/beta, to rounding what `ConsensusADMM`
makes of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .blocks import any_length, check_saved, spec_of
from .checks import in_range
from .clienttable import ByClient, Row
from .consensus import Prox

RATED = "rated"
"""The entry of a client's row: which items it rated, shape (n,), bool."""

Factors = NDArray[Any]


@dataclass
class RatedRow:
    """One client: the items that it rated, sorted, (n_i,), and Y_i/beta of these, (n_i, r)."""

    items: NDArray[np.int32]
    dual: Factors


class RatedConsensus(ByClient):
    """V, and Y_i/beta of every client, of the items that it rated.

    Items' factors have one row for each item here.

    Parameters
    ----------
    first : ndarray of shape (n, r)
        V^0; its dtype is kept.
    prox : callable, optional
        As in `Consensus.aggregate`, of an array of that shape.

    Attributes
    ----------
    v : ndarray of shape (n, r)
        V.
    total : ndarray of shape (n, r), float64
        sum_i Y_i/beta.
    """

    self_checked: ClassVar[bool] = True

    def __init__(self, first: Factors, prox: Prox | None = None) -> None:
        self.prox = prox
        self.v = np.ascontiguousarray(first)
        self.total = np.zeros(first.shape)
        self._rows: dict[int, RatedRow] = {}
        self._joining: dict[int, RatedRow] = {}
        self._begin_round()

    def __getitem__(self, client: int) -> RatedRow:
        return self._rows[client] if client in self._rows else self._joining[client]

    @property
    def ids(self) -> list[int]:
        """The clients, sorted."""
        return list(self._rows)

    def anchor(self, client: int) -> Factors:
        """Return V - Y_i/beta of the rated items, shape (n_i, r)."""
        row = self[client]
        anchor: Factors = self.v[row.items] - row.dual
        return anchor

    def update(self, client: int, uploaded: Factors) -> None:
        """Take in a client's W_i of the rated items (13); V follows with `aggregate`."""
        row = self._rows[client]
        step = uploaded - self.v[row.items]
        row.dual = row.dual + step
        self.total[row.items] += step
        self._move[row.items] += step
        self._active += 1

    def aggregate(self) -> None:
        """Set V anew."""
        mean = self.v + self._move / max(self._active, 1) + self.total / len(self._rows)
        v = mean.astype(self.v.dtype)
        self.v = v if self.prox is None else np.ascontiguousarray(self.prox(v))
        self._begin_round()

    def _begin_round(self) -> None:
        self._active, self._move = 0, np.zeros(self.v.shape)  # participants, sum of W_i - V

    def _start(self, row: Row) -> RatedRow:
        """Return Y_i = 0; nothing is rated where a saved state is to follow."""
        items = np.flatnonzero(np.asarray(row.get(RATED, False))).astype(np.int32)
        return RatedRow(items, np.zeros((len(items), self.v.shape[1]), self.v.dtype))

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Let new clients count, with Y_i = 0."""
        both = self._rows | {client: self._start(row) for client, row in rows.items()}
        self._rows = dict(sorted(both.items()))

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Know joining clients, with Y_i = 0."""
        self._joining = {client: self._start(row) for client, row in rows.items()}

    def remove(self, clients: Iterable[int], server_round: int) -> None:
        """Let clients count no more: the sum is added up anew of those that are left."""
        gone = set(clients)
        self._rows = {c: row for c, row in self._rows.items() if c not in gone}
        self.total = np.zeros(self.v.shape)
        for row in self._rows.values():
            self.total[row.items] += row.dual

    def is_finite(self) -> bool:
        """Return whether V and the sum are finite."""
        return in_range(self.v) and in_range(self.total)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables; those of the clients one after another."""
        rows, (_, r) = [*self._rows.values()], self.v.shape
        no_items, no_duals = np.empty(0, np.int32), np.empty((0, r), self.v.dtype)
        return {
            "v": self.v,
            "total": self.total,
            "items": np.concatenate([no_items, *(row.items for row in rows)]),
            "num_items": np.array([len(row.items) for row in rows], dtype=np.int64),
            "dual": np.concatenate([no_duals, *(row.dual for row in rows)]),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients.

        Raises
        ------
        ValueError
            If the arrays are not those of such a state, or do not fit together.
        """
        own = spec_of(self.state_arrays())
        rows = {name: own.pop(name) for name in ("items", "dual")}
        check_saved(arrays, own | any_length(rows))
        items, counts, dual = arrays["items"], arrays["num_items"], arrays["dual"]
        known = (items >= 0) & (items < len(self.v))
        fits = len(dual) == len(items) == counts.sum() and known.all() and (counts >= 0).all()
        if not fits:
            raise ValueError("The saved items' factors do not fit together: the state is damaged.")
        self.v, self.total = arrays["v"].copy(), arrays["total"].copy()
        ends = np.cumsum(counts)
        for client, begin, end in zip(self._rows, ends - counts, ends, strict=True):
            self._rows[client] = RatedRow(items[begin:end].copy(), dual[begin:end].copy())
