"""A table of clients that keeps duals of matrix completion for what the clients rated only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .blocks import any_length, check_saved, spec_of
from .clienttable import ClientTable, Row

RATED = "rated"
"""The entry of a client's row: which items it rated, shape (n,), bool."""


@dataclass
class RatedRow:
    """The items that a client rated, sorted, (n_i,), and Y_i/beta of these, (n_i, r)."""

    items: NDArray[np.int32]
    dual: NDArray[Any]


class RatedTable(ClientTable):
    """Rows by client, and for each client its `RatedRow`.

    Parameters
    ----------
    rank : int
        r.
    dtype : dtype
        That of the duals.
    **columns : array_like
        As in `ClientTable`.
    """

    self_checked: ClassVar[bool] = True

    def __init__(self, rank: int, dtype: DTypeLike, **columns: ArrayLike) -> None:
        super().__init__(**columns)
        self._no_dual = np.zeros((0, rank), dtype)
        self._rated: dict[int, RatedRow] = {}
        self._pending_rated: dict[int, RatedRow] = {}

    def rated(self, client: int) -> RatedRow:
        """Return a client's items and duals."""
        return self._rated[client] if client in self._rated else self._pending_rated[client]

    def _begin(self, rows: Mapping[int, Row]) -> dict[int, RatedRow]:
        """Return duals of 0; nothing is rated where a saved state is to follow."""
        begun = {}
        for client, row in rows.items():
            items = np.flatnonzero(np.asarray(row.get(RATED, False))).astype(np.int32)
            begun[client] = RatedRow(
                items, np.resize(self._no_dual, (len(items), self._no_dual.shape[1]))
            )
        return begun

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Take in new clients, with duals of 0."""
        super().insert(_without_items(rows))
        self._rated = dict(sorted((self._rated | self._begin(rows)).items()))

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Know joining clients, with duals of 0."""
        super().add_pending(_without_items(rows))
        self._pending_rated = self._begin(rows)

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Let clients go."""
        gone = set(clients)
        super().remove(gone, server_round)
        self._rated = {client: row for client, row in self._rated.items() if client not in gone}

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables; items and duals of the clients one after another."""
        rows = [*self._rated.values()]
        return super().state_arrays() | {
            "items": np.concatenate([np.empty(0, np.int32), *(row.items for row in rows)]),
            "num_items": np.array([len(row.items) for row in rows], dtype=np.int64),
            "dual": np.concatenate([self._no_dual, *(row.dual for row in rows)]),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients.

        Raises
        ------
        ValueError
            If the arrays are not those of such a state, or do not fit together.
        """
        own = spec_of(self.state_arrays())
        ragged = {name: own.pop(name) for name in ("items", "dual")}
        check_saved(arrays, own | any_length(ragged))
        items, counts, dual = arrays["items"], arrays["num_items"], arrays["dual"]
        if (
            not len(dual) == len(items) == counts.sum()
            or min(counts.min(initial=0), items.min(initial=0)) < 0
        ):
            raise ValueError("The saved items' duals do not fit together: the state is damaged.")
        super().load_state_arrays(arrays)
        ends = np.cumsum(counts)
        for client, begin, end in zip(self._rated, ends - counts, ends, strict=True):
            self._rated[client] = RatedRow(items[begin:end].copy(), dual[begin:end].copy())


def _without_items(rows: Mapping[int, Row]) -> dict[int, Row]:
    return {c: {name: v for name, v in row.items() if name != RATED} for c, row in rows.items()}
