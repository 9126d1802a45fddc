"""Where FPFC's server keeps all models, and theta_ij and v_ij of all pairs of clients.

Both are multiples of one vector delta_ij, by factors of one number s, and a plain pair (theta_ij =
omega_i - omega_j, v_ij = 0: all pairs at the start, later those far apart) needs neither; see
`algebra`. The other pairs have a vector each (`vectors`). All this is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..blocks import check_saved, spec_of
from ..penalties import Penalty
from . import algebra
from .algebra import (
    Clients,
    Float64Array,
    FloatArray,
    Indices,
    Mask,
    Places,
    Slots,
    Weight,
    row_norms,
)
from .components import components, theta_norms
from .kernels import Kernels, fastest_kernels
from .vectors import Vectors

_AT_ONCE = 2**20  # numbers of vectors that are read at a time


@dataclass(frozen=True)
class Groups:
    """Groups of clients that are held together, each pair inside by a penalty of its own.

    Not in FPFC's paper: docs/methods/fpfc.md, "Without a lambda".

    Attributes
    ----------
    labels : ndarray of int, shape (m,)
        The group of every client; -1 for one that is not in any pair yet.
    inside : Penalty
        g of the pairs of a group.
    move : bool
        Whether members that sat out move by the mean move of those that took part.
    """

    labels: NDArray[np.int64]
    inside: Penalty
    move: bool


class PairwiseStore:
    """The models omega_i of all clients, with theta_ij and v_ij of all pairs.

    Parameters
    ----------
    omega : ndarray of shape (m, d), float32 or float64
        omega_i^0; copied. Algorithm 2 starts all of them at one omega^0, with theta = v = 0. Where
        they differ, theta_ij = omega_i - omega_j and v_ij = 0.
    penalty : Penalty
        g, the fusion penalty.
    rho : float
        rho, the ADMM penalty parameter.
    kernels : module, optional
        By default `fastest_kernels`.

    Attributes
    ----------
    rho : float
    groups : Groups or None
        Groups that the next update is to hold together; None: the paper's update.
    self_checked : bool
        True: `load_state_arrays` itself compares what it loads with what it expects.

    Raises
    ------
    TypeError, ValueError
        If `penalty.check(rho)` fails.
    """

    self_checked: ClassVar[bool] = True

    def __init__(
        self, omega: FloatArray, penalty: Penalty, rho: float, kernels: Kernels | None = None
    ) -> None:
        self.rho = rho
        self.penalty = penalty
        self.groups: Groups | None = None
        self._kernels = kernels or fastest_kernels()
        self._omega = omega.copy()
        self._vectors = Vectors(len(omega), omega.shape[1], omega.dtype)

    @property
    def penalty(self) -> Penalty:
        """The penalty g of the next update; setting it leaves omega, theta and v as they are.

        So the next lambda of a warm-up starts where the last one ended: with theta = v = 0 every
        zeta_i would be the mean of all models, and the clusters lost.
        """
        return self._penalty

    @penalty.setter
    def penalty(self, penalty: Penalty) -> None:
        penalty.check(self.rho)
        self._penalty = penalty

    @property
    def omega(self) -> FloatArray:
        """omega, shape (m, d); a read-only view."""
        view = self._omega.view()
        view.flags.writeable = False
        return view

    # ------------------------------------------------------------------------------------------
    # Algorithm 2
    # ------------------------------------------------------------------------------------------

    def update(self, active: Clients, new_omega: ArrayLike) -> Places:
        """Take in the models of a round, and update every pair with an active client: (6), (A.3).

        A pair with one active client is updated as well as one with two, and that one once, with
        the dual of the round before (docs/methods/fpfc-notes.md, P1).

        Parameters
        ----------
        active : sequence of int
            A_k, each once. Their order has no influence on the result.
        new_omega : array_like of shape (len(active), d)
            omega_i^{k+1}; converted to the dtype of the store.

        Returns
        -------
        ndarray of int
            The clients that sat out and moved with their group.
        """
        clients, models = np.asarray(active, np.intp), np.asarray(new_omega, self._omega.dtype)
        moved = self._move_with_group(clients, models)
        self._omega[clients] = models
        takes_part = np.zeros(len(self._omega), dtype=np.bool_)
        takes_part[clients] = True
        plain = self._plain_pairs_with(clients)  # now, as the update of the others makes more
        self._update_vectors(self._vectors.slots_with(takes_part))
        self._update_plain(*plain)
        return moved

    def _plain_pairs_with(self, clients: Places) -> tuple[Indices, Indices]:
        """Return the plain pairs with one or two of these clients, but none between groups -1."""
        # Sorted, since slots are given in this order and that of `clients` must not enter.
        i, j = _pairs_with(np.sort(clients), len(self._omega))
        plain = self._vectors.slot_of[i, j] < 0
        if self.groups is not None:
            plain &= (self.groups.labels[i] >= 0) & (self.groups.labels[j] >= 0)
        return i[plain], j[plain]

    def _update_vectors(self, slots: Slots) -> None:
        """Update the pairs in these slots, ascending; those that turn plain give them up."""
        vectors = self._vectors
        before, i, j = vectors.scale[slots], vectors.pair_i, vectors.pair_j
        keep = algebra.carried(before).astype(self._omega.dtype)
        norm = self._kernels.update_rows(vectors.delta, slots, i, j, self._omega, keep)
        scale = self._prox(norm, i[slots], j[slots])  # (6), and with it (A.3)
        vectors.norm[slots], vectors.scale[slots] = norm, scale
        vectors.close(slots[algebra.turns_plain(before, scale)])

    def _update_plain(self, i: Indices, j: Indices) -> None:
        """Update these plain pairs; those that do not stay plain are given vectors."""
        norm = self._kernels.difference_norms(self._omega, i, j)
        near = ~algebra.stays_plain(norm, self._prox(norm, i, j))
        self._update_vectors(self._vectors.open(i[near], j[near]))

    def _prox(self, norm: Float64Array, i: Indices, j: Indices) -> Float64Array:
        """Return s of pairs for ||delta_ij||."""
        scale = self._penalty.prox_scale(norm, self.rho)
        if self.groups is not None:
            inside = self.groups.labels[i] == self.groups.labels[j]
            scale[inside] = self.groups.inside.prox_scale(norm[inside], self.rho)
        return scale

    def _move_with_group(self, clients: Places, models: FloatArray) -> Places:
        """Move members that sit out by the mean move of their group's others, and return them.

        Two of them stay where they are to each other, and so do theta_ij and v_ij of a pair inside,
        and theta_ij = omega_i - omega_j of a plain one. A pair between two groups that is not plain
        keeps its theta_ij until one of its clients takes part: only v_ij enters its next update.
        """
        if self.groups is None or not self.groups.move:
            return np.empty(0, np.intp)
        sits_out = np.ones(len(self._omega), dtype=np.bool_)
        sits_out[clients] = False
        labels, of_clients = self.groups.labels, self.groups.labels[clients]
        for group in np.unique(of_clients[of_clients >= 0]):
            here = of_clients == group
            moves = models[here].astype(np.float64) - self._omega[clients[here]]
            rows = sits_out & (labels == group)
            self._omega[rows] += moves.mean(axis=0).astype(self._omega.dtype)
        return np.flatnonzero(sits_out & np.isin(labels, of_clients) & (labels >= 0))

    def place(self, clients: Clients, omega: ArrayLike) -> None:
        """Set the models of clients with plain pairs alone: one for all or one for each."""
        self._omega[clients] = omega

    def zeta(self, indices: Clients) -> FloatArray:
        """Return zeta_i = (1/m) sum_j (omega_j + theta_ij - v_ij/rho) of some clients.

        Parameters
        ----------
        indices : sequence of int
            Clients, each at most once.

        Returns
        -------
        ndarray of shape (len(indices), d)
            In the dtype of the store; summed in float64, by numba eight terms at a time.
        """
        clients = np.asarray(indices, np.intp)
        total, near = self._sums(clients, algebra.zeta_weight)
        # With i itself the clients of one cluster have the same N_i: its models are summed up once.
        near[np.arange(len(clients)), clients] = True
        known: dict[bytes, int] = {}
        which = np.array([known.setdefault(row.tobytes(), len(known)) for row in near], np.intp)
        first = np.unique(which, return_index=True)[1]
        sums = near[first].astype(np.float64) @ self._omega.astype(np.float64)
        total += sums[which]
        counts = near.sum(axis=1)
        return self._narrow(algebra.zeta(total, self._omega[clients], counts, len(self._omega)))

    def mean_dual(self, indices: Clients | None = None) -> FloatArray:
        """Return (1/m) sum_j v_ij of some clients, by default all; see `zeta`."""
        clients = np.arange(len(self._omega)) if indices is None else np.asarray(indices, np.intp)
        total, _ = self._sums(clients, lambda scale: algebra.dual_weight(scale, self.rho))
        return self._narrow(total / len(self._omega))  # -grad f_i(omega_i) at a stationary point

    def _sums(self, clients: Places, weight: Weight) -> tuple[Float64Array, Mask]:
        """Return sum_j weight(s_ij) delta_ij of each client, and its partners in the sum."""
        total = np.zeros((len(clients), self._omega.shape[1]))
        slots, weights = self._vectors.slot_of[clients], weight(self._vectors.scale)
        self._kernels.add_rows(self._vectors.delta, slots, clients, weights, total)
        return total, slots >= 0

    # ------------------------------------------------------------------------------------------
    # What the pairs are
    # ------------------------------------------------------------------------------------------

    def theta_norms(self) -> Float64Array:
        """Return ||theta_ij|| of all pairs, shape (m, m), symmetric with zero diagonal."""
        m = len(self._omega)
        norms = np.zeros((m, m))
        i, j = (index.astype(np.int32) for index in np.triu_indices(m, k=1))
        norms[i, j] = theta_norms(i, j, self._omega, self._vectors, self._kernels)
        return norms + norms.T

    def clusters(self, nu: float, alone: Clients = ()) -> Places:
        """Return the connected components of ||theta_ij|| <= nu (Remark 2).

        As `maths.clustering.clusters` of `theta_norms`, and without that matrix: a client is
        compared only with those that have no cluster yet, and not with those that the triangle
        inequality sets apart, by the distances from the first clients of clusters.

        Parameters
        ----------
        nu : float
            nu >= 0.
        alone : sequence of int
            Clients that are a cluster of their own, wherever they are.

        Returns
        -------
        ndarray of int, shape (m,)
            The cluster of each client, numbered from 0 in the order of their first members.
        """
        if not nu >= 0:
            raise ValueError(f"nu is {nu!r}, expected a number >= 0.")
        return components(self._omega, self._vectors, self._kernels, nu, alone)

    def primal_residual(self) -> float:
        """Return max_ij ||omega_i - omega_j - theta_ij||, the third condition of (11)."""
        vectors, largest = self._vectors, 0.0
        step = max(1, _AT_ONCE // self._omega.shape[1])
        for start in range(0, len(vectors), step):
            part = slice(start, start + step)
            difference = self._omega[vectors.pair_i[part]] - self._omega[vectors.pair_j[part]]
            theta = vectors.scale[part, None] * vectors.delta[part]
            largest = max(largest, float(row_norms(difference - theta).max()))
        return largest

    # ------------------------------------------------------------------------------------------
    # Clients that come and go
    # ------------------------------------------------------------------------------------------

    def add(self, places: Sequence[int], omega: ArrayLike) -> None:
        """Add clients with these models; all of their pairs are plain.

        Parameters
        ----------
        places : sequence of int
            For every one the present client before which it goes, as `numpy.insert` counts.
        omega : array_like of shape (len(places), d)
            Their models; converted to the dtype of the store.
        """
        is_old = np.insert(np.ones(len(self._omega), dtype=np.bool_), places, False)
        self._omega = np.insert(self._omega, places, omega, axis=0)
        self._vectors.renumber(np.flatnonzero(is_old), len(is_old))

    def remove(self, indices: Sequence[int]) -> None:
        """Remove clients, with their models and pairs.

        Parameters
        ----------
        indices : sequence of int
            Some of the clients; one at least is left.
        """
        stays = np.ones(len(self._omega), dtype=np.bool_)
        stays[list(indices)] = False
        self._omega = self._omega[stays]
        self._vectors.close(self._vectors.slots_with(~stays))
        self._vectors.renumber(np.cumsum(stays) - 1, len(self._omega))

    # ------------------------------------------------------------------------------------------
    # Saving and loading
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state as plain arrays, for a checkpoint.

        They are the store's own, so that a large one is not held twice: write or copy them before
        the next update.
        """
        return {
            "rho": np.array(self.rho, dtype=np.float64),
            "omega": self.omega,
            **self._vectors.state_arrays(),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` gave; the store continues with the same bits.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            Of as many clients, the same model size and dtype, and the same rho, since the duals
            are stored relative to it. The penalty may differ. Copied.

        Raises
        ------
        ValueError
            If an array is missing or they do not fit together or this store. Nothing has changed
            then.
        """
        check_saved(arrays, spec_of({"rho": np.array(self.rho), "omega": self._omega}))
        if arrays["rho"] != self.rho:
            raise ValueError(
                f"The saved rho is {arrays['rho']}, expected {self.rho}. Continue with the former."
            )
        omega = np.array(arrays["omega"])
        if not np.isfinite(omega).all():
            raise ValueError("The saved omega holds NaN or Inf, expected finite numbers.")
        vectors = Vectors(len(omega), omega.shape[1], omega.dtype)
        vectors.load_state_arrays(arrays)
        self._omega, self._vectors = omega, vectors

    def _narrow(self, array: FloatArray) -> FloatArray:
        narrow: FloatArray = array.astype(self._omega.dtype, copy=False)
        return narrow


def _pairs_with(clients: Places, num_clients: int) -> tuple[Indices, Indices]:
    """Return all pairs i < j with one or two of these clients, each once."""
    rank = np.full(num_clients, len(clients))
    rank[clients] = np.arange(len(clients))
    # Client k's partners: all that are not a client listed before it, nor itself.
    position, partner = np.nonzero(rank[None, :] > np.arange(len(clients))[:, None])
    client = clients[position]
    low, high = np.minimum(client, partner), np.maximum(client, partner)
    return low.astype(np.int32), high.astype(np.int32)
