"""Uploads that would make a state infinite: the update is undone, and done without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.checks import in_range, largest_allowed
from ...maths.clienttable import ByClient
from ..members.membership import Membership
from ..messages.records import Reply

SUSPICIOUS = 1e12
"""An upload with larger numbers is watched: below, no sum of one round can overflow float32."""

Undo = Callable[[], None]


class Guard:
    """Watches over updates that may overflow, and finds the replies that make them do so."""

    def __init__(self) -> None:
        self._watching = False  # whether a number that large was ever taken in

    def begin(self, loaded: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Start a run, or go on with a state that is to be loaded.

        Raises
        ------
        ValueError
            If it holds numbers that no run has.
        """
        self._watching = False
        for name, array in (loaded or {}).items():
            if not array.ndim:  # what clients measured, which may be infinite
                continue
            largest = _largest(array)
            if array.dtype.kind == "f" and largest > largest_allowed(array.dtype):
                raise ValueError(
                    f"The saved '{name}' holds {largest:.2g}, which no run has: it is damaged."
                )
            self._watching |= largest > SUSPICIOUS

    def absorb(
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
            Lets replies change the state.

        Returns
        -------
        dict of int to Reply
            The replies that changed the state: without those of the largest numbers, as many as
            need be.
        """
        self._watching |= any(reply.largest > SUSPICIOUS for reply in replies.values())
        if not self._watching or not _can_undo(state):
            take(replies)
            return replies
        undo_members, undo_state = membership.snapshot(), remember(state, replies)

        def attempt(count: int) -> bool:
            undo_members()
            undo_state()
            if some := without(count):
                take(some)
            return is_finite(state, some)

        by_size = sorted(replies, key=lambda client: replies[client].largest, reverse=True)

        def without(count: int) -> dict[int, Reply]:
            gone = set(by_size[:count])
            return {client: reply for client, reply in replies.items() if client not in gone}

        with np.errstate(over="ignore", invalid="ignore"):
            if attempt(0):
                return replies
            low, high = 1, len(by_size)  # with nobody the state is the one before, which was finite
            while low < high:
                middle = (low + high) // 2
                if attempt(middle):
                    high = middle
                else:
                    low = middle + 1
            attempt(low)
        return without(low)


def _can_undo(state: Any) -> bool:
    """Return whether all of a state can be put back; structures of their own kind cannot."""
    values = [getattr(state, field.name) for field in fields(state)]
    own_kind = [value for value in values if not isinstance(value, ByClient)]
    return not any(getattr(value, "self_checked", False) for value in own_kind)


def remember(state: Any, clients: Iterable[int]) -> Undo:
    """Return what puts a state back as it is, after an update by these clients, any time."""
    undos = [_remember(state, field.name, list(clients)) for field in fields(state)]

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _remember(state: Any, name: str, clients: list[int]) -> Undo:
    value = getattr(state, name)
    if isinstance(value, ByClient):
        return value.remember(clients)
    if is_dataclass(value):
        return remember(value, clients)
    if isinstance(value, np.ndarray):
        saved = value.copy()
        return lambda: setattr(state, name, saved.copy())
    if isinstance(value, Mapping):
        arrays = {key: array.copy() for key, array in value.items()}
        return lambda: setattr(state, name, {key: a.copy() for key, a in arrays.items()})
    return lambda: setattr(state, name, value)


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
