"""The consensus rule that FedADMM, FedAPM, FedMC-ADMM, FLAME and Lp-Proj share.

    minimise  sum_i alpha_i f_i(u_i) + g(w)   subject to   u_i = w

A client that takes part moves its own copy u_i and its dual variable pi_i. The papers' w is the
minimiser of the augmented Lagrangian over ALL clients, those that sat out included:

    pi_i <- pi_i + rho (u_i - w),    z_i = u_i + pi_i/rho,    w <- prox_{g/(m rho)}(mean_i z_i)

(FedAPM (12), (13), (8); FedMC-ADMM (13), (16); FLAME (13), (14).) With one rho for all clients the
mean of the z_i is the exact minimiser whatever the alpha_i are. FedDyn's (Acar et al., ICLR 2021,
Algorithm 1, with h = -mean_i pi_i) takes the u_i of this round's participants P and the duals of
all; where everybody takes part it is the same:

    w <- prox_{g/(m rho)}(mean_{i in P} u_i + mean_i pi_i/rho)

What a client needs of w and pi_i is one vector, the anchor: <pi_i, u - w> + rho/2 |u - w|^2 is
rho/2 |u - (w - pi_i/rho)|^2 up to a constant in u.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .blocks import PIECE, Arrays, Vector, pieces
from .checks import in_range
from .clienttable import ByClient, ClientRow, ClientTable, Row

Prox = Callable[[NDArray[Any]], NDArray[Any]]

NO_PULL = 2.0**-64
"""rho until one is found: it moves nobody. A power of two, so that the duals lose nothing."""
REBUILD_EVERY = 256
"""Rounds after which the sum of the z_i is added up anew, where they are known."""


def message_of(iterate: Arrays, anchor: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return z_i = u_i + pi_i/rho after a client's step, by its anchor w - pi_i/rho."""
    return {name: 2 * array - anchor[name] for name, array in iterate.items()}


def iterate_of(message: Arrays, anchor: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the u_i of which the server makes a z_i: `message_of` undone."""
    return {name: (array + anchor[name]) / 2 for name, array in message.items()}


@dataclass
class Consensus:
    """w and the sum of the clients' messages. The u_i and pi_i are the caller's, or the clients'.

    A message is z_i, or pi_i/rho where w is of the participants' u_i.

    Attributes
    ----------
    w : ndarray of shape (d,)
    total : ndarray of shape (d,), float64
        The sum of all messages, kept up to date by the changes, so that a round costs O(d) for each
        participant.
    first : ndarray of shape (d,)
        Where clients that keep their own variables start, if they have not uploaded anything since
        round `began_in`.
    began_in : int
        0, or the round of the last `restart`.
    of_participants : bool
        Whether w is of the participants' u_i.
    was_replaced : bool
        Whether `total` has a part that is no client's message: see `adopt`.
    """

    w: NDArray[Any]
    total: NDArray[np.float64]
    first: NDArray[Any]
    began_in: int = 0
    of_participants: bool = False
    was_replaced: bool = False

    def __post_init__(self) -> None:
        self._noise: NDArray[np.float64] | None = None  # of the mean of this round's u_i

    @classmethod
    def start(cls, first: NDArray[Any], *, of_participants: bool = False) -> Self:
        """Start with w = `first`, whose dtype is kept, and no client."""
        total = np.zeros(first.shape)
        return cls(first.copy(), total, first.copy(), of_participants=of_participants)

    def add_change(self, change: NDArray[Any]) -> None:
        """Take in the change of one client's message, shape (d,); that of pi_i/rho is u_i - w."""
        self.total += change

    def add_noise(self, noise: NDArray[Any], num_replies: int) -> None:
        """Add noise to the sum of the changes of this round, and to no client's variables.

        The sum is the only way to w, so what is given out has the noise, and no client's later
        variables depend on it but by w. It stays in the sum, which is not added up anew.

        Parameters
        ----------
        noise : ndarray of shape (d,)
        num_replies : int
            k, of this round.
        """
        self.total += noise
        self.was_replaced = True
        self._noise = noise / num_replies

    def aggregate(
        self,
        num_clients: int,
        prox: Prox | None = None,
        *,
        move: NDArray[np.float64] | None = None,
    ) -> None:
        """Set w anew, once the replies of a round are in.

        Parameters
        ----------
        num_clients : int
            m.
        prox : callable, optional
            prox_{g/(m rho)}: (d,) to (d,). Without it g = 0.
        move : ndarray of shape (d,), optional
            The participants' mean of u_i - w, where w is of the participants' u_i.
        """
        w = np.empty_like(self.w)
        for part in pieces(len(w)):
            mean = self.total[part] / num_clients
            if move is not None:
                mean += self.w[part] + move[part]
                if self._noise is not None:
                    mean += self._noise[part]
            w[part] = mean
        self._noise = None
        self.w = w if prox is None else prox(w)

    def join(self, count: int) -> None:
        """Let new clients count, with u_i = w, pi_i = 0, which leaves w as it is."""
        if not self.of_participants:
            self.total += count * self.w.astype(np.float64)

    def adopt(self, w: NDArray[Any], num_clients: int, num_replies: int) -> None:
        """Go on from another w than `aggregate` made, with the sum that leads to it.

        What was added to w, xi, was added to the mean of the round's uploads: w is of k u_i, which
        enter it once as they are and once by the k/m of the mean dual, so that a change of xi comes
        of one of xi/(1 + k/m) in their mean, and of k times that in the sum. Where w is the mean of
        all z_i, it comes of m xi in the sum. So w and the sum remain a function of what was given
        out: with noise in w alone, that of each round would be without it in the sum, and with it
        in every later w (docs/composition.md).

        Parameters
        ----------
        w : ndarray of shape (d,)
        num_clients : int
            m.
        num_replies : int
            k, of the last round; 0 before the first, where w alone changes.
        """
        weight = float(num_clients)
        if self.of_participants:
            weight *= num_replies / (num_clients + num_replies)
        self.total += weight * np.subtract(w, self.w, dtype=np.float64)
        self.w, self.was_replaced = w, True

    def drop(
        self, gone: Iterable[NDArray[Any]], left: Callable[[], Iterable[NDArray[Any]]]
    ) -> None:
        """Take the messages of clients that leave out of the sum; `left` has those of the others.

        By `rebuild` from the latter, but where the sum has more than these.
        """
        if not self.was_replaced:
            self.rebuild(left())
            return
        for message in gone:
            self.total -= message

    def rebuild(self, messages: Iterable[NDArray[Any]]) -> None:
        """Add up the messages of all clients anew, where they are known; w follows.

        When a client has left: ADMM for the clients that are left converges from any start, this
        one included. And every `REBUILD_EVERY` rounds: what a large upload once rounded away of the
        others' small changes would otherwise be missing for ever. Not where the sum has more than
        the messages: see `adopt`.
        """
        if self.was_replaced:
            return
        self.total = np.zeros_like(self.total)
        for message in messages:
            self.total += message

    def restart(self, server_round: int, num_clients: int) -> None:
        """Set every u_i to w and every pi_i to 0, where clients keep them.

        The sum holds a message of a client that has lost it, or has left; nobody knows it any more,
        so no new one can take its place, nor can it be taken out. ADMM converges from any start
        that both sides agree on, and this is the nearest that both know. The strategy must send it
        to everybody: see `starting_point`.
        """
        self.total = np.zeros_like(self.total)
        self.was_replaced = False
        self.join(num_clients)
        self.first = self.w.copy()
        self.began_in = server_round
        logging.getLogger("flwr").info("All clients go on from the global model with duals of 0")

    def starting_point(self, last_accepted: int) -> NDArray[Any] | None:
        """Return what a client that keeps its variables starts from; None if it has started.

        Parameters
        ----------
        last_accepted : int
            The round of its last accepted upload, 0 before the first.
        """
        return self.first if last_accepted <= self.began_in else None

    def beginning(
        self, last_accepted: int | None, *, from_w: bool
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return u_i and pi_i as a client that keeps its variables is sent them along.

        Parameters
        ----------
        last_accepted : int or None
            As for `starting_point`; None for a client that is joining.
        from_w : bool
            Whether clients start at w.

        Returns
        -------
        start : ndarray of shape (d,), or None
            u_i where the client begins and it is needed; then pi_i is 0.
        dual : ndarray of shape (0,), or None
            Without numbers, which is 0, where the client begins and needs no u_i.
        """
        start = self.w if last_accepted is None else self.starting_point(last_accepted)
        if start is not None and from_w and self.of_participants:
            return None, np.empty(0, self.w.dtype)
        return start, None


class ConsensusADMM(ByClient):
    """w, and u_i and pi_i of every client, or their sum alone where the clients keep theirs.

    Parameters
    ----------
    first : ndarray of shape (d,)
        u_i^0 = w^0; its dtype is kept.
    rho : float, optional
        rho > 0. None: it is `NO_PULL` until `set_rho`, and belongs to the state.
    on_clients : bool (default: False)
        Clients keep u_i and pi_i themselves and upload the change of their message: O(d) memory
        here instead of O(m d).
    from_w : bool (default: False)
        Clients start their steps at w, and not at their own u_i.
    of_participants : bool (default: False)
        w is of the participants' u_i, see `Consensus`.
    prox : callable, optional
        As in `Consensus.aggregate`.

    Attributes
    ----------
    mean : Consensus
        w and the sum of the messages.
    clients : ClientTable
        Rows ``pi``, shape (d,), and ``u`` where clients start at it or z_i is made of it; no
        columns with `on_clients`.
    primal, dual : float
        The residuals of the last round: the participants' mean ||u_i - w||, with the w that they
        were sent, NaN where u_i is not known here; and rho ||w - w before||.
    """

    def __init__(
        self,
        first: NDArray[Any],
        rho: float | None,
        *,
        on_clients: bool = False,
        from_w: bool = False,
        of_participants: bool = False,
        prox: Prox | None = None,
    ) -> None:
        self._found_later = rho is None
        self.rho = NO_PULL if rho is None else rho
        self.prox = prox
        self.on_clients, self.from_w, self.of_participants = on_clients, from_w, of_participants
        self.mean = Consensus.start(first, of_participants=of_participants)
        self.primal = self.dual = math.nan
        self._scratch = np.empty((2, min(PIECE, len(first))), first.dtype)
        self._wide = np.empty(min(PIECE, len(first)))
        columns = {} if on_clients else {"pi": np.zeros_like(first)}
        if not on_clients and not (from_w and of_participants):
            columns = {"u": first, **columns}
        self.clients = ClientTable(**columns)
        self._begin_round()

    @property
    def w(self) -> NDArray[Any]:
        """The global variable, shape (d,)."""
        return self.mean.w

    def anchor(self, client: int) -> NDArray[Any]:
        """Return w - pi_i/rho, or w where the client has or gets pi_i itself, shape (d,)."""
        if self.on_clients or self.from_w:
            return self.w
        pi, rho, w = self.clients[client].pi, self._scalar(-self.rho), self.w
        anchor: NDArray[Any] = np.empty_like(w)
        for part in pieces(len(w)):
            np.divide(pi[part], rho, out=anchor[part])
            anchor[part] += w[part]
        return anchor

    def beginning(
        self, client: int, *, holds_start: bool, holds_dual: bool, last_accepted: int | None
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return the u_i and the pi_i that a client is to be sent along, where it needs them.

        Parameters
        ----------
        client : int
        holds_start, holds_dual : bool
            Whether it has its u_i and pi_i, where the strategy has them too.
        last_accepted : int or None
            The round of its last accepted upload; None for a client that is joining.
        """
        if self.on_clients:
            return self.mean.beginning(last_accepted, from_w=self.from_w)
        row = self.clients[client]
        if self.from_w:
            return None, None if holds_dual else row.pi
        return None if holds_start else row.u, None

    @property
    def seeks_rho(self) -> bool:
        """Whether rho is still to be found."""
        return self.rho == NO_PULL

    def set_rho(self, rho: float) -> None:
        """Go on with another rho. All pi_i/rho stay as they are, and with them w."""
        for client in () if self.on_clients else self.clients.ids:
            row = self.clients[client]
            if row.pi.any():  # zeros that nobody wrote take no memory
                row.pi *= self._scalar(rho / self.rho)
        self.rho = rho

    def update(self, uploads: Mapping[int, Vector]) -> None:
        """Take in clients' u_i, or the changes of their messages; w follows with `aggregate`."""
        if self.on_clients:
            for uploaded in uploads.values():
                self._add_change(uploaded[:])
            return
        rows, squares = [self.clients[client] for client in uploads], [0.0] * len(uploads)
        rho, keeps_u = self._scalar(self.rho), "u" in self.clients
        for part in pieces(len(self.w)):  # of all clients, so that the sums stay in the cache
            for place, (row, uploaded) in enumerate(zip(rows, uploads.values(), strict=True)):
                squares[place] += self._advance(row, uploaded[part], part, rho, keeps_u)
        self._distances += map(math.sqrt, squares)

    def _add_change(self, change: NDArray[Any]) -> None:
        self.mean.add_change(change)
        if self._move is not None:
            self._move += change
            self._distances.append(float(np.linalg.norm(change)))

    def _advance(
        self, row: ClientRow, new: NDArray[Any], part: slice, rho: Any, keeps_u: bool
    ) -> float:
        """Move a part of a client's variables to its new u_i; return its ||u_i - w||^2."""
        mean, move = self.mean, self._move
        step = np.subtract(new, mean.w[part], out=self._scratch[0][: len(new)])
        square = float(step @ step)
        if move is None:
            # z_new - z_old = (u_new - u_old) + (pi_new - pi_old)/rho; the last is u_new - w.
            change = np.subtract(new, row.u[part], out=self._scratch[1][: len(new)])
            change += step
            mean.total[part] += change
        else:
            wide = self._wide[: len(new)]  # once, for two sums
            wide[:] = step
            mean.total[part] += wide
            move[part] += wide
        step *= rho
        row.pi[part] += step
        if keeps_u:
            row.u[part] = new
        return square

    def adopt(self, w: NDArray[Any], num_replies: int) -> None:
        """Go on from another w than `aggregate` made; see `Consensus.adopt`."""
        self.mean.adopt(w, len(self.clients), num_replies)

    def add_noise(self, noise: NDArray[Any], num_replies: int) -> None:
        """Add noise to this round's changes of the sum; see `Consensus.add_noise`."""
        self.mean.add_noise(noise, num_replies)

    def still(self, client: int) -> NDArray[Any]:
        """Return the u_i with which a client's message would stay as it is, shape (d,).

        pi_i/rho changes by u_i - w, and z_i by u_i less the last u_i more.
        """
        return self.w if self.of_participants else (self.clients[client].u + self.w) / 2

    def set_dual(self, client: int, dual: NDArray[Any]) -> None:
        """Start a client's pi_i at another value than 0; w follows with `update`."""
        if self.on_clients:
            self.mean.add_change(dual / self._scalar(self.rho))
        else:
            self.mean.add_change((dual - self.clients[client].pi) / self.rho)
            self.clients[client].pi = dual

    def aggregate(self, *, anew: bool = False) -> None:
        """Set w anew, once the replies of a round are in.

        With `anew` the messages are added up again where they are known, see `Consensus.rebuild`.
        """
        if anew and not self.on_clients:
            self.mean.rebuild(self._messages(self.clients.ids))
        before, count = self.w, len(self._distances)
        if self._move is not None:
            self._move /= max(count, 1)
        self.mean.aggregate(len(self.clients), self.prox, move=self._move)
        self.primal = sum(self._distances) / count if count else math.nan
        self.dual = self.rho * float(np.linalg.norm(self.w - before))
        self._begin_round()

    def _begin_round(self) -> None:
        self._distances: list[float] = []  # ||u_i - w|| of this round's participants
        self._move = np.zeros(self.w.shape) if self.of_participants else None  # sum of u_i - w

    def _messages(self, clients: Iterable[int]) -> Iterator[NDArray[Any]]:
        """Return the messages of some clients, z_i = u_i + pi_i/rho or pi_i/rho."""
        for client in clients:
            row = self.clients[client]
            dual = row.pi / self._scalar(self.rho)
            yield dual if self.of_participants else row.u + dual

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Let new clients count, with u_i = w and pi_i = 0."""
        self.mean.join(len(rows))
        self.clients.insert(self._starts(rows))

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Know joining clients, with u_i = w and pi_i = 0."""
        self.clients.add_pending(self._starts(rows))

    def _starts(self, clients: Iterable[int]) -> dict[int, Row]:
        row = {"u": self.w} if "u" in self.clients else {}
        return dict.fromkeys(clients, row)

    def remove(self, clients: Iterable[int], server_round: int) -> None:
        """Let clients count no more: their messages leave the sum, or all restart."""
        clients = list(clients)
        gone = [] if self.on_clients else [*self._messages(clients)]
        self.clients.remove(clients)
        if self.on_clients:
            self.restart(server_round, len(self.clients))
        else:
            self.mean.drop(gone, lambda: self._messages(self.clients.ids))

    def restart(self, server_round: int, num_clients: int) -> None:
        """Start everybody from w, where clients keep their variables: see `Consensus.restart`."""
        self.mean.restart(server_round, num_clients)

    def _scalar(self, value: float) -> Any:
        return self.w.dtype.type(value)  # keeps float32 arithmetic in float32

    def is_finite(self) -> bool:
        """Return whether w and the sum are finite."""
        return in_range(self.mean.w) and in_range(self.mean.total)

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables, not copied."""
        mean = self.mean
        arrays = {"w": mean.w, "total": mean.total, "first": mean.first}
        rho = {"rho": np.array(self.rho)} if self._found_later else {}
        said = {n: np.array(getattr(mean, n)) for n in ("began_in", "was_replaced")}
        return arrays | said | rho | self.clients.state_arrays()

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients."""
        w, total, first = (arrays[name].copy() for name in ("w", "total", "first"))
        began_in, replaced = int(arrays["began_in"]), bool(arrays["was_replaced"])
        self.mean = Consensus(w, total, first, began_in, self.of_participants, replaced)
        if self._found_later:
            self.rho = float(arrays["rho"])
        self.clients.load_state_arrays(arrays)
