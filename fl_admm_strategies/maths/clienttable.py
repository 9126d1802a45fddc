"""What an algorithm keeps for every client: arrays with one row a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Row = Mapping[str, ArrayLike]


class ClientRow:
    """One client's row: ``row.theta`` reads the entry of a column, ``row.theta = x`` writes it.

    An entry that is an array is a view, so that it can be changed in place.
    """

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: dict[str, NDArray[Any]], index: int) -> None:
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_index", index)

    def __getattr__(self, name: str) -> Any:
        return self._column(name)[self._index]

    def __setattr__(self, name: str, value: ArrayLike) -> None:
        self._column(name)[self._index] = value

    def _column(self, name: str) -> NDArray[Any]:
        try:
            column: NDArray[Any] = self._columns[name]
        except KeyError:
            raise AttributeError(
                f"{name!r} is no column of the table, expected one of {list(self._columns)}."
            ) from None
        return column


class ByClient(ABC):
    """A part of a state that holds something for every client.

    The runtime calls these when clients come and go, and to save and load.
    """

    @abstractmethod
    def insert(self, rows: Mapping[int, Row]) -> None:
        """Take in new clients, with what the algorithm's `new_client` says of them."""

    @abstractmethod
    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Know these clients for the present round, without taking them in; forget earlier ones."""

    @abstractmethod
    def remove(self, clients: Iterable[int], server_round: int) -> Any:
        """Let clients go that have left by this round."""

    def is_finite(self) -> bool:
        """Return whether what it keeps of all clients together is finite."""
        return True

    @abstractmethod
    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables, not copied."""

    @abstractmethod
    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients."""


class ClientTable(ByClient):
    """Rows by client, in the order of the clients' ids.

    The base of the strategies inserts, removes, saves and loads the rows; an algorithm declares the
    columns and reads and writes them.

    Parameters
    ----------
    **columns : array_like
        For every column what a client's entry starts from, which also says its shape and dtype.

    Attributes
    ----------
    ids : list of int
        The clients, sorted.
    pending : dict of int to ClientRow
        Rows of clients that are asked to train and are not in the table yet: ``table[client]``
        finds them as well.

    Examples
    --------
    >>> table = ClientTable(theta=np.zeros(3), alpha=0.5)
    >>> table.insert({7: {}, 2: {"alpha": 0.25}})
    >>> table[2].theta += 1
    >>> table.column("alpha")
    array([0.25, 0.5 ])
    """

    def __init__(self, **columns: ArrayLike) -> None:
        self.ids: list[int] = []
        self.pending: dict[int, ClientRow] = {}
        self._index: dict[int, int] = {}
        self._start = {name: np.asarray(entry) for name, entry in columns.items()}
        self._columns = {
            name: np.empty((0, *entry.shape), entry.dtype) for name, entry in self._start.items()
        }

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __getitem__(self, client: int) -> ClientRow:
        if (index := self._index.get(client)) is None:
            return self.pending[client]
        return ClientRow(self._columns, index)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column: one row for each client, in the order of `ids`."""
        return self._columns[name]

    def rows(self, name: str, clients: Iterable[int]) -> NDArray[Any]:
        """Return a copy of some clients' entries of a column, in their order."""
        return self._columns[name][[self._index[client] for client in clients]]

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Let these be the pending ones: new clients that are asked to train; earlier ones go."""
        self.pending = {}
        for client, row in rows.items():
            columns = {name: np.array(entry)[None] for name, entry in self._completed(row).items()}
            self.pending[client] = ClientRow(columns, 0)

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Take in new clients; an entry that a row lacks is what its column starts from."""
        ids = sorted([*self.ids, *rows])
        index = {client: place for place, client in enumerate(ids)}
        places = [index[client] for client in self.ids]
        completed = {client: self._completed(row) for client, row in rows.items()}
        columns = {}
        for name, old in self._columns.items():
            columns[name] = new = np.zeros((len(ids), *old.shape[1:]), old.dtype)
            new[places] = old
            start = self._start[name]
            zero = not start.tobytes().strip(b"\0")
            for client, row in completed.items():
                if not (zero and row[name] is start):  # zeros that were not written take no memory
                    new[index[client]] = row[name]
        self.ids, self._index, self._columns = ids, index, columns

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Let clients go."""
        gone = set(clients)
        stay = [place for place, client in enumerate(self.ids) if client not in gone]
        columns = {}
        for name, column in self._columns.items():
            columns[name] = new = np.zeros((len(stay), *column.shape[1:]), column.dtype)
            np.take(column, stay, axis=0, out=new, mode="clip")  # "raise" would make a copy
        self._columns = columns
        self.ids = [client for client in self.ids if client not in gone]
        self._index = {client: place for place, client in enumerate(self.ids)}

    def _completed(self, row: Row) -> dict[str, NDArray[Any]]:
        if unknown := sorted(row.keys() - self._start.keys()):
            raise KeyError(
                f"A client's row has {unknown}, expected some of {list(self._start)}. Declare all "
                "columns where the table is made."
            )
        return {
            name: np.asarray(row.get(name, start), start.dtype)
            for name, start in self._start.items()
        }

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns, not copied."""
        return dict(self._columns)

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients."""
        columns = {}
        for name, old in self._columns.items():
            columns[name] = new = np.zeros(arrays[name].shape, old.dtype)
            new[...] = arrays[name]
        self._columns = columns
