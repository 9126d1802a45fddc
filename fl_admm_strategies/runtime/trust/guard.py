"""Uploads that would make a state infinite: their update is undone, and run without them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.checks import in_range
from ...maths.clienttable import ByClient
from ..members.membership import Membership
from ..messages.records import Reply

SUSPICIOUS = 1e12
"""Updates are watched from the first larger number on: smaller ones cannot overflow float32 in the
sums and squares of one round."""

Undo = Callable[[], None]


class Guard:
    """Watches over updates that may overflow, and finds the replies that make them do so."""

    _watching = False  # whether a number that large was ever taken in

    def begin(self, loaded: Mapping[str, NDArray[Any]]) -> None:
        """Go on with a state that is to be loaded."""
        # What clients measured are single numbers, which may be infinite.
        self._watching = any(
            _largest(array) > SUSPICIOUS for array in loaded.values() if array.ndim
        )

    def update(
        self,
        state: Any,
        membership: Membership,
        replies: dict[int, Reply],
        take: Callable[[dict[int, Reply]], None],
    ) -> dict[int, Reply]:
        """Let replies change a state; undo it where it is not finite then, and leave some out.

        Parameters
        ----------
        state, membership
            What `take` changes.
        replies : dict of int to Reply
        take : callable
            Lets replies change the state; it can be called again once the state was put back.

        Returns
        -------
        dict of int to Reply
            The replies that changed the state: without those of the largest numbers, as many as
            need be.
        """
        self._watching |= any(reply.largest > SUSPICIOUS for reply in replies.values())
        if not self._watching:
            take(replies)
            return replies
        undos = membership.snapshot(), snapshot(state, replies)
        by_size = sorted(replies, key=lambda client: replies[client].largest, reverse=True)

        def without(count: int) -> dict[int, Reply]:
            gone = set(by_size[:count])
            return {client: reply for client, reply in replies.items() if client not in gone}

        def is_finite_without(count: int) -> bool:
            for undo in undos:
                undo()
            if some := without(count):
                take(some)
            return is_finite(state, some)

        with np.errstate(over="ignore", invalid="ignore"):
            if is_finite_without(0):
                return replies
            # With nobody the state is the one before, which was finite.
            fewest = bisect_left(range(len(by_size)), True, lo=1, key=is_finite_without)
            is_finite_without(fewest)
        return without(fewest)


def snapshot(state: Any, clients: Iterable[int]) -> Undo:
    """Return what puts a state back as it is, after an update by these clients, any time."""
    undos = [_snapshot(state, field.name, list(clients)) for field in fields(state)]

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _snapshot(state: Any, name: str, clients: list[int]) -> Undo:
    value = getattr(state, name)
    if isinstance(value, ByClient):
        return value.snapshot(clients)
    if is_dataclass(value):
        return snapshot(value, clients)
    if hasattr(value, "load_state_arrays"):
        arrays = deepcopy(value.state_arrays())
        return lambda: value.load_state_arrays(arrays)
    saved = deepcopy(value)
    return lambda: setattr(state, name, deepcopy(saved))


def is_finite(state: Any, clients: Iterable[int]) -> bool:
    """Return whether a state's arrays are finite, as far as an update by these clients went.

    They must leave room for the sums of the coming rounds as well, as uploads must: `in_range`.
    """
    clients = list(clients)
    return all(_is_finite(getattr(state, field.name), clients) for field in fields(state))


def _is_finite(value: Any, clients: list[int]) -> bool:
    if isinstance(value, ByClient):
        return value.is_finite(clients)
    if isinstance(value, np.ndarray):
        return in_range(value)
    if isinstance(value, Mapping):
        return all(map(in_range, value.values()))
    return is_finite(value, clients) if is_dataclass(value) else True


def _largest(array: NDArray[Any]) -> float:
    if array.dtype.kind != "f":
        return 0.0
    return float(np.abs(array).max(initial=0, where=~np.isnan(array)))
