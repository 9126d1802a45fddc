"""The consensus rule that FedADMM, FedAPM, FedMC-ADMM and Lp-Proj share.

    minimise  sum_i alpha_i f_i(u_i) + g(w)   subject to   u_i = w

A client that takes part moves its own copy u_i and its dual variable pi_i; the shared w is the
minimiser of the augmented Lagrangian over ALL clients, those that sat out included:

    pi_i <- pi_i + rho (u_i - w),    z_i = u_i + pi_i/rho,    w <- prox_{g/(m rho)}(mean_i z_i)

(FedAPM (12), (13), (8); FedMC-ADMM (13), (16); FLAME (13), (14).) What the client needs of w and
pi_i is one vector, the anchor: <pi_i, u - w> + rho/2 |u - w|^2 is rho/2 |u - (w - pi_i/rho)|^2 up
to a constant in u.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Prox = Callable[[NDArray[Any]], NDArray[Any]]


class Consensus:
    """w, and u_i and pi_i of every client, or their sum alone.

    Parameters
    ----------
    first : ndarray of shape (d,)
        u_i^0 = w^0, which every client starts from; its dtype is kept.
    num_clients : int
        m.
    rho : float
        rho > 0, one for all clients: with it the mean of the z_i is the exact minimiser whatever
        the alpha_i are (FedAPM specs 6.1, 5).
    prox : callable, optional
        prox_{g/(m rho)}: (d,) to (d,). Without it g = 0.
    on_clients : bool (default: False)
        Clients keep u_i and pi_i themselves and upload the change of their z_i. Then `iterates` and
        `duals` do not exist and the memory is O(d) instead of O(m d).

    Attributes
    ----------
    w : ndarray of shape (d,)
    iterates, duals : ndarray of shape (m, d)
        u_i, pi_i.
    first : ndarray of shape (d,)
        Where clients start that have not uploaded anything since round `began_in`, which is 0
        unless there was a `restart`.
    total : ndarray of shape (d,), float64
        sum_i z_i, kept up to date by the changes, so that a round costs O(d) for each participant.
    """

    def __init__(
        self,
        first: NDArray[Any],
        num_clients: int,
        rho: float,
        *,
        prox: Prox | None = None,
        on_clients: bool = False,
    ) -> None:
        self.rho = rho
        self.prox = prox
        self.num_clients = num_clients
        self.on_clients = on_clients
        self.w = first.copy()
        self.first = first.copy()
        self.began_in = 0
        self.total = first.astype(np.float64) * num_clients
        rows = 0 if on_clients else num_clients
        self.iterates = np.tile(first, (rows, 1))
        self.duals = np.zeros_like(self.iterates)
        self._step, self._change = np.empty_like(self.w), np.empty_like(self.w)

    def anchor(self, index: int) -> NDArray[Any]:
        """Return w - pi_i/rho of one client, shape (d,)."""
        anchor: NDArray[Any] = np.divide(self.duals[index], self._scalar(-self.rho))
        anchor += self.w
        return anchor

    def set_dual(self, index: int, dual: NDArray[Any]) -> None:
        """Start a client's pi_i at another value than 0; w follows with `aggregate`."""
        self.total += (dual - self.duals[index]) / self.rho
        self.duals[index] = dual

    def update(self, index: int, iterate: NDArray[Any]) -> float:
        """Take in one client's new u_i, shape (d,): its pi_i and z_i follow; w does not yet.

        Returns
        -------
        float
            ||u_i - w||.
        """
        step, change = self._step, self._change
        np.subtract(iterate, self.w, out=step)
        gap = float(np.linalg.norm(step))
        # z_new - z_old = (u_new - u_old) + (pi_new - pi_old)/rho, where the last is u_new - w.
        np.subtract(iterate, self.iterates[index], out=change)
        change += step
        self.total += change
        step *= self._scalar(self.rho)
        self.duals[index] += step
        self.iterates[index] = iterate
        return gap

    def update_message(self, change: NDArray[Any]) -> None:
        """Take in the change of one client's z_i, shape (d,), where clients keep their duals."""
        self.total += change

    def aggregate(self) -> None:
        """Set w to the minimiser over all clients, once the replies of a round are in."""
        mean = (self.total / self.num_clients).astype(self.w.dtype)
        self.w = mean if self.prox is None else self.prox(mean)

    def add(self, places: Sequence[int]) -> None:
        """Let new clients count, with u_i = w and pi_i = 0: their z_i = w leaves the mean as it is.

        Parameters
        ----------
        places : sequence of int
            For every new client the row before which it goes, as `numpy.insert` counts.
        """
        self.total += len(places) * self.w.astype(np.float64)
        self.num_clients += len(places)
        if not self.on_clients:
            self.iterates = np.insert(self.iterates, places, self.w, axis=0)
            self.duals = np.insert(self.duals, places, 0, axis=0)

    def remove(self, indices: Sequence[int], messages: NDArray[Any] | None = None) -> None:
        """Let clients count no more: their z_i leave the sum, and w with the next `aggregate`.

        ADMM for the clients that are left converges from any start, this one included. Where only
        the clients know their z_i, use `restart`.

        Parameters
        ----------
        indices : sequence of int
            Their rows.
        messages : ndarray of shape (len(indices), d), optional
            Their z_i, where they are not kept here.
        """
        if messages is None:
            messages = self.iterates[indices] + self.duals[indices] / self._scalar(self.rho)
        self.total -= messages.sum(axis=0, dtype=np.float64)
        self.num_clients -= len(indices)
        if not self.on_clients:
            self.iterates = np.delete(self.iterates, indices, axis=0)
            self.duals = np.delete(self.duals, indices, axis=0)

    def restart(self, server_round: int, *, left: int = 0) -> None:
        """Set every u_i to w and every pi_i to 0, where clients keep them.

        The sum holds a z_i of a client that has lost it, or has left; nobody knows it any more, so
        no new z_i can take its place, nor can it be taken out. ADMM converges from any start that
        both sides agree on, and this is the nearest that both know. The strategy must send it to
        everybody: see `starts`.

        Parameters
        ----------
        server_round : int
            The last round.
        left : int (default: 0)
            How many clients have left.
        """
        self.num_clients -= left
        self.total = self.w.astype(np.float64) * self.num_clients
        self.first = self.w.copy()
        self.began_in = server_round
        logging.getLogger("flwr").info("All clients go on from the global model with duals of 0")

    def starts(self, accepted_in: int) -> bool:
        """Return whether a client, by its last accepted round, is yet to start from `first`."""
        return accepted_in <= self.began_in

    def _scalar(self, value: float) -> Any:
        return self.w.dtype.type(value)  # keeps float32 arithmetic in float32

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables, not copied."""
        return {
            "w": self.w,
            "first": self.first,
            "began_in": np.array(self.began_in),
            "total": self.total,
            "iterates": self.iterates,
            "duals": self.duals,
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for as many clients."""
        for name in self.state_arrays():
            setattr(self, name, arrays[name].copy())
        self.began_in = int(self.began_in)
