"""Who belongs to a run, who came and who left, and what each client surely holds."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ..messages.records import Reply
from .client_keys import ClientKeys

MOST_ASKED = 5
"""How often a client is asked that was never heard, until it leaves the run."""


class Membership:
    """The clients of a run.

    Parameters
    ----------
    max_missed_rounds : int or None
        Rounds in a row in which a client is not connected until it has left; None: never.
    client_keys : str or mapping of int to str
        Which node may be which client; see `StatefulStrategy`.

    Attributes
    ----------
    ids : list of int
        The clients of the run, sorted.
    num_initial : int
        How many clients the run began with. It stands for m (or p, n) wherever that is a mere scale
        of the objective, so that no client's step changes when others come and go; means are over
        those that belong to the run.
    initial_examples : float
        The number of examples of those, where a handshake asked for it; NaN otherwise.
    announced : int
        The size of the federation as its nodes know it; 0 where they do not.
    version : int
        Increases when clients join or leave. The objective f is another function then: what
        compares rounds starts anew where it has changed.
    last_accepted : dict of int to int
        By client, the round of its last accepted upload; 0 before the first.
    last_seen : dict of int to int
        By client, the last round that found it connected.
    examples : dict of int to float
        By client, how many examples it reported last for its training.
    joining : dict of int to (Reply or None)
        Connected clients that do not belong to the run until a reply of theirs was accepted, with
        their reply to the handshake where there was one.
    waiting : dict of int to (int, int)
        By client that has no accepted upload: how often it was asked in vain, and from which round
        on it is asked again before it joins.
    client_keys : ClientKeys
        The keys of the nodes that the clients' ids belong to.
    """

    def __init__(
        self,
        max_missed_rounds: int | None = None,
        client_keys: str | Mapping[int, str] = "first",
    ) -> None:
        self.max_missed_rounds = max_missed_rounds
        self.client_keys = ClientKeys(client_keys)
        self.reset((), 0)

    def reset(self, ids: Iterable[int], announced: int) -> None:
        """Start a run with these clients."""
        self.ids = sorted(ids)
        self.num_initial = len(self.ids)
        self.version = 0
        self.initial_examples = np.nan
        self.announced = announced
        self.last_accepted = dict.fromkeys(self.ids, 0)
        self.last_seen = dict.fromkeys(self.ids, 0)
        self.examples: dict[int, float] = {}
        self.joining: dict[int, Reply | None] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self._current: set[int] = set()
        self.client_keys.bind(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, client: int) -> bool:
        return client in self.last_accepted

    def row(self, client: int) -> int:
        """Return a client's place in `ids`."""
        return bisect(self.ids, client) - 1

    def is_new(self, client: int) -> bool:
        """Return whether nothing of a client was accepted yet."""
        return self.last_accepted.get(client, 0) == 0

    def start_of(self, client: int, initial: Arrays, current: Arrays) -> Arrays | None:
        """Return what a client without an accepted upload starts from, None for all others.

        Those of the start get `initial`, one that joins in mid-run `current`.
        """
        if not self.is_new(client):
            return None
        return initial if client in self else current

    def has_current_state(self, client: int) -> bool:
        """Return whether a client surely holds what the server knows of it.

        Not before its first accepted upload, nor after one that was lost or refused, nor after a
        restart: then the server sends along what the client needs.
        """
        return client in self._current

    # ------------------------------------------------------------------------------------------
    # Changes
    # ------------------------------------------------------------------------------------------

    def record_connected(
        self, server_round: int, connected: Collection[int], announced: int
    ) -> None:
        """Note who is connected before a round."""
        self.announced = max(self.announced, announced)
        here = [client for client in self.ids if client in connected]
        self.last_seen |= dict.fromkeys(here, server_round)
        self.client_keys.bind(here)
        self.joining = {c: reply for c, reply in self.joining.items() if c in connected}

    def unknown(self, connected: Iterable[int], server_round: int) -> list[int]:
        """Return those of the connected clients that are to be asked whether they join, sorted."""
        return sorted(
            client
            for client in connected
            if client not in self
            and client not in self.joining
            and self.waiting.get(client, (0, 0))[1] <= server_round
        )

    def asked_in_vain(self, clients: Iterable[int], server_round: int) -> None:
        """Note who was asked and has not answered usably, if nothing of it was accepted yet.

        One that is joining is asked again after 1, 2, 4, ... rounds.
        """
        for client in filter(self.is_new, clients):
            times = self.waiting.get(client, (0, 0))[0] + 1
            self.waiting[client] = times, server_round + 2 ** min(times - 1, 30)
            self.joining.pop(client, None)

    def overdue(self, server_round: int) -> list[int]:
        """Return the clients that have missed too many rounds, unless all have."""
        if self.max_missed_rounds is None:
            return []
        limit = server_round - self.max_missed_rounds
        gone = [client for client, last in self.last_seen.items() if last <= limit]
        return gone if len(gone) < len(self.ids) else []

    def never_heard(self) -> list[int]:
        """Return the clients that were asked too often without an answer, where others answer."""
        if not any(self.last_accepted.values()):
            return []
        counts = {client: self.waiting.get(client, (0, 0))[0] for client in self.ids}
        return [client for client, count in counts.items() if count >= MOST_ASKED]

    def remove(self, clients: Collection[int]) -> list[int]:
        """Strike clients off; return the rows that they had."""
        gone = set(clients)
        rows = [self.row(client) for client in clients]
        self.ids = [client for client in self.ids if client not in gone]
        self.version += 1
        for client in clients:
            del self.last_accepted[client], self.last_seen[client]
            self.examples.pop(client, None)
        self._current.difference_update(clients)
        return rows

    def admit(self, clients: Sequence[int], server_round: int) -> list[int]:
        """Let joining clients belong to the run.

        Returns
        -------
        list of int
            For each of them the row before which its row goes, as `numpy.insert` counts.
        """
        places = [bisect(self.ids, client) for client in clients]
        self.ids = sorted([*self.ids, *clients])
        self.version += 1
        accepted = self.last_accepted | dict.fromkeys(clients, 0)
        seen = self.last_seen | dict.fromkeys(clients, server_round)
        self.last_accepted = {client: accepted[client] for client in self.ids}
        self.last_seen = {client: seen[client] for client in self.ids}
        for client in clients:
            del self.joining[client]
        self.client_keys.bind(clients)
        return places

    def accept(self, clients: Collection[int], server_round: int) -> None:
        """Note whose uploads became part of the state in a round."""
        self.last_accepted |= dict.fromkeys(clients, server_round)
        self._current.update(clients)
        self.waiting = {c: asked for c, asked in self.waiting.items() if c not in clients}

    def mark_uncertain(self, clients: Iterable[int]) -> None:
        """Note clients that may hold something else than the server knows: they were asked."""
        self._current.difference_update(clients)

    def mark_lost(self, clients: Iterable[int]) -> None:
        """Take clients that lost what they keep for clients without an accepted upload."""
        known = [client for client in clients if client in self]
        self.last_accepted |= dict.fromkeys(known, 0)
        self._current.difference_update(known)

    # ------------------------------------------------------------------------------------------
    # Saving
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything that outlives the process."""
        return {
            "client_ids": np.array(self.ids, dtype=np.uint64),
            "num_initial": np.array(self.num_initial, dtype=np.int64),
            "members_version": np.array(self.version, dtype=np.int64),
            "initial_examples": np.array(self.initial_examples),
            "announced": np.array(self.announced, dtype=np.int64),
            "last_accepted": np.array(list(self.last_accepted.values()), dtype=np.int64),
            "last_seen": np.array(list(self.last_seen.values()), dtype=np.int64),
            "counted_ids": np.array(sorted(self.examples), dtype=np.uint64),
            "counted": np.array([n for _, n in sorted(self.examples.items())], dtype=np.float64),
            "waiting_ids": np.array(sorted(self.waiting), dtype=np.uint64),
            "waiting": np.array(
                [self.waiting[client] for client in sorted(self.waiting)], dtype=np.int64
            ).reshape(-1, 2),
            **self.client_keys.state_arrays(),
        }

    def load_state_arrays(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, after `reset` with its clients."""
        rounds = (arrays[name].tolist() for name in ("last_accepted", "last_seen"))
        self.last_accepted, self.last_seen = (
            dict(zip(self.ids, column, strict=True)) for column in rounds
        )
        counted = zip(arrays["counted_ids"].tolist(), arrays["counted"].tolist(), strict=True)
        self.examples = dict(counted)
        waiting = zip(arrays["waiting_ids"].tolist(), arrays["waiting"].tolist(), strict=True)
        self.waiting = {client: (times, due) for client, (times, due) in waiting}
        self.num_initial = int(arrays["num_initial"])
        self.version = int(arrays["members_version"])
        self.initial_examples = float(arrays["initial_examples"])
        self.announced = max(self.announced, int(arrays["announced"]))
