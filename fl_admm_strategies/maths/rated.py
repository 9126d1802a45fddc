"""Consensus on the items' factors of matrix completion, with memory for what clients rated only.

The dense form is `consensus.ConsensusADMM` with u_i = W_i and pi_i = Y_i: two numbers for every
client, item and factor. But a client's loss does not depend on the factors w of an item that it did
not rate, so that its N proximal gradient steps (15) on them only pull them to the anchor,

    w <- (L w + p beta (v - d)) / (L + p beta),     v, d = y/beta:  V's and the dual's of that item

with L = ||U_i^T U_i||_F. With q = (L/(L + p beta))^N, a round of the client is

    w <- q w + (1 - q) (v - d),     d <- d + w - v                                             (13)

with the same q for all items that it did not rate. They all start from w = v^0, d = 0. So both are
sums sum_k a_k v^k and sum_k b_k v^k over the V that the client was sent, with numbers a_k, b_k of
the client which are the same for all these items: what is kept is the V's, once for all clients,
and two numbers for each V and client. (w, d) contracts by sqrt(q) in every round of the client, so
that old V's fade: terms below `NEGLIGIBLE`, which adding them would round away, are dropped, and a
V that nobody refers to with them.

What else the dense form does with them is done with the sums: the mean of Z_i = w + d over the
clients adds up a_k + b_k first, and ||W_i W_i^T||_F, which the client's steps on its users need,
comes from the products V^k (V^l)^T, r x r, less those of the rated items, plus those of their own.
The results agree with the dense form to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .blocks import any_length, check_saved, spec_of
from .checks import in_range
from .clienttable import ByClient, Row
from .consensus import Prox

NEGLIGIBLE = 2.0**-60
"""A share of some V in a client's factors that is left out, against shares that add up to 1."""

RATED = "rated"
"""The entry of a client's row: which items it rated, shape (n,), bool."""

Factors = NDArray[Any]
Shares = Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Client:
    """The variables of one client.

    Attributes
    ----------
    items : ndarray of int32, shape (n_i,)
        The items that it rated, sorted.
    w, dual : ndarray of shape (n_i, r)
        W_i and Y_i/beta of these.
    past : mapping of int to (float, float)
        a_k and b_k of the others, by the number of V^k.
    """

    items: NDArray[np.int32]
    w: Factors
    dual: Factors
    past: Shares


class RatedConsensus(ByClient):
    """V, and W_i and Y_i/beta of every client, of the items that it rated.

    Items' factors have one row for each item here.

    Parameters
    ----------
    first : ndarray of shape (n, r)
        V^0; its dtype is kept.
    prox : callable, optional
        As in `Consensus.aggregate`, of an array of that shape.
    from_v, of_participants : bool (default: False)
        As `from_w` and `of_participants` in `ConsensusADMM`. From V on, w = V and d = 0 for what is
        not rated.

    Attributes
    ----------
    v : ndarray of shape (n, r)
        V.
    total : ndarray of shape (n, r), float64
        sum_i Z_i, or sum_i Y_i/beta where V is of the participants' W_i.
    """

    self_checked: ClassVar[bool] = True

    def __init__(
        self,
        first: Factors,
        prox: Prox | None = None,
        *,
        from_v: bool = False,
        of_participants: bool = False,
    ) -> None:
        self.prox = prox
        self.from_v, self.of_participants = from_v, of_participants
        self.v = np.ascontiguousarray(first)
        self.total = np.zeros(first.shape)
        self._clients: dict[int, Client] = {}
        self._joining: dict[int, Client] = {}
        self._sent: dict[int, Factors] = {}  # V^k that clients refer to, by number
        self._now: int | None = None  # the number of the present V, once a client refers to it
        self._pending: dict[int, float] = {}  # change of V^k's share in the sum since the last V
        self._active = 0  # participants since the last V
        self._before = self.total.copy()  # the sum with the last V
        self._products: dict[tuple[int, int], NDArray[np.float64]] = {}

    def __getitem__(self, client: int) -> Client:
        return self._clients[client] if client in self._clients else self._joining[client]

    @property
    def ids(self) -> list[int]:
        """The clients, sorted."""
        return list(self._clients)

    # --- What a client is sent ------------------------------------------------------------------

    def anchor(self, client: int) -> Factors:
        """Return V - Y_i/beta of the rated items, shape (n_i, r)."""
        row = self[client]
        anchor: Factors = self.v[row.items] - row.dual
        return anchor

    def curvature(self, client: int) -> float:
        """Return ||W_i W_i^T||_F over all items, or that of V where clients start at it."""
        if self.from_v:
            return float(np.linalg.norm(self.v.T.astype(np.float64) @ self.v))
        row = self[client]
        shares = {number: a for number, (a, _) in row.past.items()}
        gram = row.w.astype(np.float64).T @ row.w
        as_others = self._sum(shares, row.items)
        gram -= as_others.T @ as_others
        for one, share in shares.items():
            for other, beside in shares.items():
                gram += share * beside * self._product(one, other)
        return float(np.linalg.norm(gram))

    def _product(self, one: int, other: int) -> NDArray[np.float64]:
        """Return V^k (V^l)^T, shape (r, r)."""
        if (one, other) not in self._products:
            product = self._sent[one].T.astype(np.float64) @ self._sent[other]
            self._products[one, other], self._products[other, one] = product, product.T
        return self._products[one, other]

    def _sum(self, shares: Mapping[int, float], items: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return sum_k share_k V^k of some items."""
        total = np.zeros((len(items), self.v.shape[1]))
        for number, share in shares.items():
            total += share * self._sent[number][items]
        return total

    def start(self, client: int) -> Factors:
        """Return where the client's steps start, of the rated items, shape (n_i, r)."""
        row = self[client]
        start: Factors = self.v[row.items] if self.from_v else row.w
        return start

    # --- A round --------------------------------------------------------------------------------

    def update(self, client: int, uploaded: Factors, decay: float) -> None:
        """Take in a client's W_i of the rated items; V follows with `aggregate`.

        Parameters
        ----------
        client : int
        uploaded : ndarray of shape (n_i, r)
        decay : float
            q = (L/(L + p beta))^N, which says what became of the others.
        """
        row, now = self._clients[client], self._number()
        step = uploaded - self.v[row.items]
        change = step.astype(np.float64)
        if not self.of_participants:
            change += uploaded - row.w
        past, moved = dict(row.past), {}
        for number in sorted({*past, now}):  # in the same order after a resume
            a, b = past.get(number, (0.0, 0.0))
            here = float(number == now)
            start = here if self.from_v else a
            new_a = decay * start + (1 - decay) * (here - b)
            new = new_a, b + new_a - here
            past[number] = new
            if max(map(abs, new)) < NEGLIGIBLE:
                del past[number]
                new = 0.0, 0.0
            moved[number] = new[1] - b if self.of_participants else sum(new) - (a + b)
        self.total[row.items] += change - self._sum(moved, row.items)
        self._add(moved)
        self._clients[client] = Client(row.items, uploaded, row.dual + step, past)
        self._active += 1

    def aggregate(self, *, anew: bool = False) -> None:
        """Set V anew (see `Consensus`); with `anew` after adding up the clients' again."""
        self._add_changes()
        move = (self.total - self._before) / max(self._active, 1)  # a dual moves by W_i - V
        if anew:
            self._rebuild()
        mean = self.total / len(self._clients)
        if self.of_participants:
            mean += self.v + move
        v = mean.astype(self.v.dtype)
        self.v = v if self.prox is None else np.ascontiguousarray(self.prox(v))
        self._now = None
        self._begin_round()
        self._forget()

    def _begin_round(self) -> None:
        self._active, self._before = 0, self.total.copy()

    def _number(self) -> int:
        """Return the number of the present V, which is kept from here on."""
        if self._now is None:
            self._now = max(self._sent, default=-1) + 1
            self._sent[self._now] = self.v
        return self._now

    def _add(self, shares: Mapping[int, float]) -> None:
        for number, share in shares.items():
            self._pending[number] = self._pending.get(number, 0.0) + share

    def _add_changes(self) -> None:
        for number, change in sorted(self._pending.items()):
            if change:
                self.total += change * self._sent[number]
        self._pending = {}

    def _rebuild(self) -> None:
        """Add up the Z_i, or the Y_i/beta, of all clients anew: see `Consensus.rebuild`."""
        self.total = np.zeros_like(self.total)
        self._pending = {}
        for row in self._clients.values():
            w = 0 if self.of_participants else 1
            shares = {number: w * a + b for number, (a, b) in row.past.items()}
            self._add(shares)
            others = self._sum(shares, row.items)
            self.total[row.items] += w * row.w.astype(np.float64) + row.dual - others
        self._add_changes()

    def _forget(self) -> None:
        """Drop every V that nobody refers to."""
        used = {number for row in self._clients.values() for number in row.past}
        self._sent = {number: v for number, v in self._sent.items() if number in used}
        self._products = {k: product for k, product in self._products.items() if used.issuperset(k)}

    # --- Who takes part -------------------------------------------------------------------------

    def _start(self, row: Row) -> Client:
        """Return W_i = V, Y_i = 0; nothing is rated where a saved state is to follow."""
        rated = np.asarray(row.get(RATED, np.zeros(len(self.v), np.bool_)))
        items = np.flatnonzero(rated).astype(np.int32)
        w = self.v[items]
        return Client(items, w, np.zeros_like(w), {self._number(): (1.0, 0.0)})

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Let new clients count, with W_i = V and Y_i = 0."""
        both = self._clients | {client: self._start(row) for client, row in rows.items()}
        self._clients = dict(sorted(both.items()))
        if not self.of_participants:
            self.total += len(rows) * self.v.astype(np.float64)

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Know joining clients, with W_i = V and Y_i = 0."""
        self._joining = {client: self._start(row) for client, row in rows.items()}

    def remove(self, clients: Iterable[int], server_round: int) -> None:
        """Let clients count no more: their Z_i leave the sum."""
        gone = set(clients)
        self._clients = {c: row for c, row in self._clients.items() if c not in gone}
        self._rebuild()
        self._begin_round()

    def is_finite(self) -> bool:
        """Return whether V and the sum are finite."""
        return in_range(self.v) and in_range(self.total)

    # --- Saving ---------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables; those of the clients one after another."""
        clients = [*self._clients.values()]
        numbers = {number: place for place, number in enumerate(self._sent)}
        shares = [[numbers[k], *share] for row in clients for k, share in row.past.items()]
        shape = self.v.shape
        return {
            "v": self.v,
            "total": self.total,
            "sent": np.array([*self._sent.values()], self.v.dtype).reshape(-1, *shape),
            "items": _joined([row.items for row in clients], np.int32),
            "num_items": np.array([len(row.items) for row in clients], dtype=np.int64),
            "w": _joined([row.w.ravel() for row in clients], self.v.dtype),
            "dual": _joined([row.dual.ravel() for row in clients], self.v.dtype),
            "shares": np.array(shares, dtype=np.float64).reshape(-1, 3),
            "num_shares": np.array([len(row.past) for row in clients], dtype=np.int64),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients.

        Raises
        ------
        ValueError
            If the arrays are not those of such a state, or do not fit together.
        """
        own, (n, r) = spec_of(self.state_arrays()), self.v.shape
        rows = {name: own.pop(name) for name in ("sent", "items", "w", "dual", "shares")}
        check_saved(arrays, own | any_length(rows))
        items, counts, shares = arrays["items"], arrays["num_items"], arrays["shares"]
        if not (
            len(arrays["w"]) == len(arrays["dual"]) == items.size * r
            and min(counts.min(initial=0), arrays["num_shares"].min(initial=0)) >= 0
            and (counts.sum(), arrays["num_shares"].sum()) == (items.size, len(shares))
            and ((items >= 0) & (items < n)).all()
            and np.isin(shares[:, 0], np.arange(len(arrays["sent"]))).all()
        ):
            raise ValueError("The saved items' factors do not fit together: the state is damaged.")
        self.v, self.total = arrays["v"].copy(), arrays["total"].copy()
        self._sent = {k: v.copy() for k, v in enumerate(arrays["sent"])}
        self._now, self._products, self._pending = None, {}, {}
        self._begin_round()
        parts = zip(
            _cut(items, counts),
            _cut(arrays["w"].reshape(-1, r), counts),
            _cut(arrays["dual"].reshape(-1, r), counts),
            _cut(shares, arrays["num_shares"]),
            strict=True,
        )
        for client, (rated, w, dual, past) in zip(self._clients, parts, strict=True):
            known = {int(k): (float(a), float(b)) for k, a, b in past}
            self._clients[client] = Client(rated.copy(), w.copy(), dual.copy(), known)


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)


def _cut(array: NDArray[Any], counts: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    return iter(np.split(array, np.cumsum(counts)[:-1])) if len(counts) else iter(())
