"""Where FPFC's server keeps all models and, for every pair of clients that needs one, a vector.

A pair's theta_ij and v_ij are multiples of one vector delta_ij, by factors of one number s, and a
plain pair (theta_ij = omega_i - omega_j, v_ij = 0: all pairs at the start, later those far apart)
needs neither; see `algebra`. Where vectors for all pairs would not fit into memory, close pairs
are kept by the models of their clients (`history`) until vectors take less. All this is exact, not
an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..blocks import prefixed, under
from ..checks import listing
from ..penalties import Penalty
from . import algebra
from .history import History
from .kernels import Engine, choose_kernels
from .slabs import Slabs, fitting_rows

FloatArray = NDArray[np.floating]
Float64Array = NDArray[np.float64]
Clients = Sequence[int] | NDArray[np.integer]

_MOST_BYTES = 2 * 2**30
_PIVOTS = 32  # clients whose distances from all others spare `clusters` most others


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
    engine : {"numba", "numpy"}, optional
        The kernels; by default numba's, where numba can be imported.
    most_bytes : int (default: 2 GiB)
        Up to this size of all pairs' vectors together every close pair has one. Where they could
        take more, close pairs are kept by their clients' models until vectors for those that are
        close take no more than this, or than twice the models.

    Attributes
    ----------
    rho : float
    engine : str
        The kernels in use.
    self_checked : bool
        True: `load_state_arrays` itself compares what it loads with what it expects.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as above, or `penalty.check(rho)` fails.
    ImportError
        If ``engine="numba"`` and numba cannot be imported.
    """

    self_checked: ClassVar[bool] = True

    def __init__(
        self,
        omega: FloatArray,
        penalty: Penalty,
        rho: float,
        *,
        engine: Engine | None = None,
        most_bytes: int | None = None,
    ) -> None:
        omega = np.asarray(omega)
        if omega.ndim != 2 or omega.dtype not in (np.float32, np.float64) or not omega.size:
            raise ValueError(
                f"omega is {omega.dtype} of shape {omega.shape}, expected a non-empty array of "
                "shape (m, d), float32 or float64."
            )
        if not np.isfinite(omega).all():
            raise ValueError("omega holds NaN or Inf, expected finite numbers.")
        self.rho = rho
        self.penalty = penalty
        self.engine, self._kernels = choose_kernels(engine)
        self.most_bytes = _MOST_BYTES if most_bytes is None else most_bytes
        self._omega = omega.copy()
        self._clear()

    def _clear(self) -> None:
        """Make every pair plain."""
        # Slots 0..n-1 hold the n pairs that are not plain, each with a vector in the slabs.
        self._pair_i = np.empty(0, dtype=np.int32)
        self._pair_j = np.empty(0, dtype=np.int32)
        self._norm = np.empty(0)
        # Kept beside the norm, not computed from it: it must survive a change of the penalty.
        self._scale = np.empty(0)
        self._slabs = Slabs(self._omega.shape[1], self._omega.dtype, self._fitting_rows())
        self._slot_of = np.full(self._num_pairs, -1, dtype=np.int32)
        m, d = self._omega.shape
        self._history = History(m, d, self._omega.dtype, self._kernels)

    @property
    def _num_pairs(self) -> int:
        m = len(self._omega)
        return m * (m - 1) // 2

    def _fitting_rows(self) -> int:
        return fitting_rows(self._omega.shape[1], self._omega.dtype, self._num_pairs)

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

    @property
    def num_stored(self) -> int:
        """Number of unordered pairs that are not plain."""
        return self._num_slots + self._history.num_pairs

    @property
    def _num_slots(self) -> int:
        return len(self._pair_i)

    @property
    def nbytes(self) -> int:
        """Bytes held, the slabs' unused rows included."""
        index = (self._pair_i, self._pair_j, self._norm, self._scale, self._slot_of)
        arrays = sum(array.nbytes for array in (self._omega, *index))
        return arrays + self._slabs.nbytes + self._history.nbytes

    # ------------------------------------------------------------------------------------------
    # Algorithm 2
    # ------------------------------------------------------------------------------------------

    def update(self, active: Clients, new_omega: ArrayLike) -> None:
        """Take in the models of a round, and update every pair with an active client: (6), (A.3).

        A pair with one active client is updated as well as one with two, and that one once, with
        the dual of the round before (docs/methods/fpfc.md says why).

        Parameters
        ----------
        active : sequence of int
            A_k. Their order has no influence on the result.
        new_omega : array_like of shape (len(active), d)
            omega_i^{k+1}; converted to the dtype of the store.

        Raises
        ------
        ValueError
            If a client does not exist or is named twice, or `new_omega` is not of this shape or
            not finite in the store's dtype. Nothing has changed then.
        """
        clients = self._checked_clients("active", active)
        self._omega[clients] = self._checked_models("new_omega", new_omega, len(clients))
        m = len(self._omega)
        takes_part = np.zeros(m, dtype=np.bool_)
        takes_part[clients] = True
        slots = np.flatnonzero(takes_part[self._pair_i] | takes_part[self._pair_j])
        touched = self._num_pairs - (m - len(clients)) * (m - len(clients) - 1) // 2
        if len(slots) < touched:
            # Sorted, since slots are given in this order and that of `active` must not enter.
            i, j = _pairs_with(np.sort(clients), m)
            others = self._slot_of[self._condensed(i, j)] < 0
            i, j = i[others], j[others]
        self._update_stored(slots)
        if len(slots) < touched:
            by_models = ~np.isnan(self._history.scale(i, j))
            self._history.begin(clients)
            self._history.update(i[by_models], j[by_models], self._omega, self._penalty, self.rho)
            self._update_plain(i[~by_models], j[~by_models])
            self._give_vectors()

    def _update_stored(self, slots: NDArray[np.intp]) -> None:
        """Update the pairs in these slots, ascending; those that turn plain lose their slots."""
        before = self._scale[slots]
        norm = self._renew_deltas(slots, algebra.carried(before))
        scale = algebra.prox_scale(norm, self._penalty, self.rho)  # (6), and with it (A.3)
        self._norm[slots], self._scale[slots] = norm, scale
        if (plain := algebra.turns_plain(before, scale)).any():
            self._close(slots[plain])

    def _update_plain(self, i: NDArray[np.int32], j: NDArray[np.int32]) -> None:
        """Update these plain pairs; those that do not stay plain get slots."""
        norm = self._kernels.difference_norms(self._omega, i, j)
        scale = algebra.prox_scale(norm, self._penalty, self.rho)
        near = ~algebra.stays_plain(norm, scale)
        i, j = i[near], j[near]
        if self._num_pairs * self._omega[0].nbytes > self.most_bytes:
            self._history.open(i, j, norm[near], scale[near], self._omega)
            return
        slots = self._open(i, j)
        # The norm is that of the vector as it is stored, so it is taken once more.
        self._norm[slots] = self._renew_deltas(slots, np.zeros(len(i)))
        self._scale[slots] = algebra.prox_scale(self._norm[slots], self._penalty, self.rho)

    def _give_vectors(self) -> None:
        """Give the pairs that are kept by models vectors, once those take little memory.

        Or no more than twice the models', which grow: both are in memory for a moment.
        """
        history = self._history
        needed = history.num_pairs * self._omega[0].nbytes
        if not 0 < needed <= max(self.most_bytes - self._slabs.nbytes, 2 * history.nbytes):
            return
        i, j = history.pairs()
        slots = self._open(i, j)
        self._scale[slots] = history.scale(i, j)
        for part, vectors in history.vectors(i, j):
            for slot, vector in zip(slots[part], vectors, strict=True):
                self._slabs.row(slot)[:] = vector
            # To rounding the norm that s belongs to.
            self._norm[slots[part]] = np.sqrt(np.einsum("kc,kc->k", vectors, vectors))
        history.close(i, j)

    def _renew_deltas(
        self, slots: NDArray[np.intp], keep: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Set delta_ij to omega_i - omega_j + keep delta_ij, return ||delta_ij||; slots ascend."""
        norm = np.empty(len(slots))
        keep = keep.astype(self._omega.dtype)
        for slab, rows, part in self._slabs.pieces(slots):
            i, j = self._pair_i[slots[part]], self._pair_j[slots[part]]
            norm[part] = self._kernels.update_rows(slab, rows, i, j, self._omega, keep[part])
        return norm

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
        clients = self._checked_clients("indices", indices)
        slots = self._slots_of(clients)
        total = self._sum_deltas(clients, slots, algebra.zeta_weight(self._scale))
        near = slots >= 0
        if self._history.num_pairs:
            by_models = self._scales_by_models(clients)
            self._history.add_sums(clients, algebra.zeta_weight(by_models), total)
            near |= ~np.isnan(by_models)
        near[np.arange(len(clients)), clients] = True  # i itself
        # Clients of one cluster have the same set, whose sum is needed only once.
        if (near == near[:1]).all():
            total += self._kernels.sum_chosen(self._omega, near[:1])
        else:
            _, first, same = np.unique(
                np.packbits(near, axis=1), axis=0, return_index=True, return_inverse=True
            )
            total += self._kernels.sum_chosen(self._omega, near[first])[same.ravel()]
        own, count = self._omega[clients], near.sum(axis=1)
        return self._narrow(algebra.zeta(total, own, count, len(self._omega)))

    def mean_dual(self, indices: Clients | None = None) -> FloatArray:
        """Return (1/m) sum_j v_ij of some clients, by default all; see `zeta`."""
        everybody = range(len(self._omega))
        clients = self._checked_clients("indices", everybody if indices is None else indices)
        weight = algebra.dual_weight(self._scale, self.rho)
        total = self._sum_deltas(clients, self._slots_of(clients), weight)
        if self._history.num_pairs:
            by_models = self._scales_by_models(clients)
            self._history.add_sums(clients, algebra.dual_weight(by_models, self.rho), total)
        return self._narrow(algebra.mean_dual(total, len(self._omega)))

    def _scales_by_models(self, clients: NDArray[np.intp]) -> Float64Array:
        """Return s_ij of each client's pair with each other; NaN where not by models."""
        return self._history.scale(clients[:, None], np.arange(len(self._omega))[None, :])

    def _slots_of(self, clients: NDArray[np.intp]) -> NDArray[np.int32]:
        """Return the slot of each client's pair with each other, or -1; shape (len(clients), m)."""
        first, second = clients[:, None], np.arange(len(self._omega))
        slots = np.full((len(clients), len(self._omega)), -1, dtype=np.int32)
        pairs = first != second
        low, high = np.minimum(first, second)[pairs], np.maximum(first, second)[pairs]
        slots[pairs] = self._slot_of[self._condensed(low, high)]
        return slots

    def _sum_deltas(
        self,
        clients: NDArray[np.intp],
        slots: NDArray[np.int32],
        weight: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return sum_j weight_ij delta_ij over the stored pairs of each client, in float64."""
        total = np.zeros((len(clients), self._omega.shape[1]))
        slots = np.sort(slots, axis=1)
        place, _ = np.nonzero(slots >= 0)
        slot = slots[slots >= 0].astype(np.int64)
        # By slab, then client, then row.
        slab = slot // self._slabs.rows
        if len(self._slabs) > 1:
            order = np.argsort(slab, kind="stable")
            slot, place, slab = slot[order], place[order], slab[order]
        row = slot - slab * self._slabs.rows
        sign = np.where(self._pair_i[slot] == clients[place], 1.0, -1.0)  # delta_ji = -delta_ij
        signed = sign * weight[slot]
        group = slab * len(clients) + place
        starts = np.searchsorted(group, np.arange(len(self._slabs) * len(clients) + 1))
        for number, vectors in enumerate(self._slabs):
            bounds = starts[number * len(clients) : (number + 1) * len(clients) + 1]
            self._kernels.add_rows(vectors, row, bounds, signed, total)
        return total

    # ------------------------------------------------------------------------------------------
    # What the pairs are
    # ------------------------------------------------------------------------------------------

    def theta(self, i: int, j: int) -> FloatArray:
        """Return theta_ij, shape (d,). theta_ji = -theta_ij and theta_ii = 0."""
        found = self._find(i, j)
        if found is None:
            difference: FloatArray = self._omega[i] - self._omega[j]
            return difference
        return self._narrow(algebra.theta(*found))

    def v(self, i: int, j: int) -> FloatArray:
        """Return v_ij, shape (d,). v_ji = -v_ij and v_ii = 0."""
        found = self._find(i, j)
        if found is None:
            return np.zeros_like(self._omega[i])
        return self._narrow(algebra.dual(*found, self.rho))

    def _find(self, i: int, j: int) -> tuple[Float64Array, FloatArray] | None:
        """Return s and delta_ij of a pair, or None if it is plain."""
        self._checked_clients("i", [i])
        self._checked_clients("j", [j])
        low, high = np.array([[min(i, j)], [max(i, j)]], dtype=np.int32)
        sign = 1 if i < j else -1
        if not np.isnan(scale := self._history.scale(low, high)):
            ((_, vectors),) = self._history.vectors(low, high)
            return scale, sign * vectors[0]
        if i == j or (slot := self._slot_of[self._condensed(low, high)][0]) < 0:
            return None
        return self._scale[slot], sign * self._slabs.row(slot)

    def theta_norms(self) -> NDArray[np.float64]:
        """Return ||theta_ij|| of all pairs, shape (m, m), symmetric with zero diagonal."""
        m = len(self._omega)
        norms = np.zeros((m, m))
        norms[self._pair_i, self._pair_j] = algebra.theta(self._scale, self._norm)
        i, j = (index.astype(np.int32) for index in np.triu_indices(m, k=1))
        # triu_indices runs in condensed order
        scale = self._history.scale(i, j)
        plain = (self._slot_of < 0) & np.isnan(scale)
        norms[i[plain], j[plain]] = self._kernels.difference_norms(self._omega, i[plain], j[plain])
        near = ~np.isnan(scale)
        norms[i[near], j[near]] = algebra.theta(scale[near], self._history.norms(i[near], j[near]))
        return norms + norms.T

    def clusters(self, nu: float) -> NDArray[np.intp]:
        """Return the connected components of ||theta_ij|| <= nu (Remark 2).

        As `maths.clustering.clusters` of `theta_norms`, and without that matrix: a client is
        compared only with those that have no cluster yet, and not with those whose distance from
        the first client of some cluster differs by more than nu.

        Parameters
        ----------
        nu : float
            nu >= 0.

        Returns
        -------
        ndarray of int, shape (m,)
            The cluster of each client, numbered from 0 in the order of their first members.
        """
        if not nu >= 0:
            raise ValueError(f"nu is {nu!r}, expected a number >= 0.")
        m = len(self._omega)
        everybody = np.arange(m, dtype=np.int32)
        labels = np.full(m, -1, dtype=np.intp)
        pivots: list[Float64Array] = []
        for first in range(m):
            if labels[first] >= 0:
                continue
            labels[first] = labels.max() + 1
            if len(pivots) < _PIVOTS:
                pivot = np.full(m, first, dtype=np.int32)
                pivots.append(self._kernels.difference_norms(self._omega, pivot, everybody))
            frontier = [first]
            while frontier:
                client = frontier.pop()
                others = np.flatnonzero(labels < 0).astype(np.int32)
                linked = others[self._are_linked(client, others, nu, pivots)]
                labels[linked] = labels[first]
                frontier.extend(linked)
        return labels

    def _are_linked(
        self, client: int, others: NDArray[np.int32], nu: float, pivots: Sequence[Float64Array]
    ) -> NDArray[np.bool_]:
        """Return whether ||theta_ij|| <= nu for a client and each of the others."""
        i = np.minimum(others, np.int32(client))
        j = np.maximum(others, np.int32(client))
        linked = np.zeros(len(others), dtype=np.bool_)
        slots, scale = self._slot_of[self._condensed(i, j)], self._history.scale(i, j)
        stored, by_models = slots >= 0, np.flatnonzero(~np.isnan(scale))
        own = slots[stored]
        linked[stored] = algebra.theta(self._scale[own], self._norm[own]) <= nu
        if len(by_models):
            i_near, j_near, s = i[by_models], j[by_models], scale[by_models]
            near = algebra.theta(s, self._history.bounds(i_near, j_near)) <= nu
            norms = self._history.norms(i_near[~near], j_near[~near])
            near[~near] = algebra.theta(s[~near], norms) <= nu
            linked[by_models] = near
        maybe = ~stored & np.isnan(scale)
        for distance in pivots:
            # The triangle inequality, with room for the rounding of distances.
            room = nu + 1e-6 * (distance[client] + distance[others])
            maybe &= np.abs(distance[client] - distance[others]) <= room
        i, j = i[maybe], j[maybe]
        linked[maybe] = self._kernels.difference_norms(self._omega, i, j) <= nu
        return linked

    def primal_residual(self) -> float:
        """Return max_ij ||omega_i - omega_j - theta_ij||, the third condition of (11)."""
        largest = 0.0
        for slab, rows, part in self._slabs.pieces(np.arange(self._num_slots)):
            i, j, scale = self._pair_i[part], self._pair_j[part], self._scale[part]
            norms = self._kernels.residual_norms(slab, rows, i, j, self._omega, scale)
            largest = max(largest, float(norms.max()))
        i, j = self._history.pairs()
        for some, vectors in self._history.vectors(i, j):
            scale = self._history.scale(i[some], j[some])[:, None]
            rest = self._omega[i[some]] - self._omega[j[some]] - algebra.theta(scale, vectors)
            largest = max(largest, float(np.linalg.norm(rest, axis=1).max()))
        return largest

    # ------------------------------------------------------------------------------------------
    # Clients that come and go
    # ------------------------------------------------------------------------------------------

    def add(self, places: Sequence[int], omega: ArrayLike) -> None:
        """Take in clients with these models; all of their pairs are plain.

        Parameters
        ----------
        places : sequence of int
            For every one the present client before which it goes, as `numpy.insert` counts.
        omega : array_like of shape (len(places), d)
            Their models; converted to the dtype of the store.

        Raises
        ------
        ValueError
            If `omega` is not of this shape or not finite in the store's dtype.
        """
        models = self._checked_models("omega", omega, len(places))
        is_old = np.insert(np.ones(len(self._omega), dtype=np.bool_), places, False)
        self._omega = np.insert(self._omega, places, models, axis=0)
        self._history.insert(places)
        self._renumber(np.flatnonzero(is_old))
        # Slabs were made for the pairs of fewer clients; many small ones would be slow.
        if (rows := self._fitting_rows()) > self._slabs.rows:
            self._slabs.widen(rows, self._num_slots)

    def remove(self, indices: Sequence[int]) -> None:
        """Let clients go, with their models and pairs.

        Parameters
        ----------
        indices : sequence of int
            Some of the clients, each at most once; one at least must be left.

        Raises
        ------
        ValueError
            If a client does not exist or is named twice, or nobody would be left.
        """
        clients = self._checked_clients("indices", indices)
        if len(clients) == len(self._omega):
            raise ValueError("indices are all of the clients, expected that one is left at least.")
        gone = np.zeros(len(self._omega), dtype=np.bool_)
        gone[clients] = True
        self._close(np.flatnonzero(gone[self._pair_i] | gone[self._pair_j]))
        self._omega = self._omega[~gone]
        self._history.remove(~gone)
        self._renumber(np.cumsum(~gone) - 1)

    def _renumber(self, new: NDArray[np.integer]) -> None:
        """Give every client i of the stored pairs its new index new[i]; the order stays."""
        self._pair_i = new[self._pair_i].astype(np.int32)
        self._pair_j = new[self._pair_j].astype(np.int32)
        self._slot_of = np.full(self._num_pairs, -1, dtype=np.int32)
        self._slot_of[self._condensed(self._pair_i, self._pair_j)] = np.arange(self._num_slots)

    # ------------------------------------------------------------------------------------------
    # Slots
    # ------------------------------------------------------------------------------------------

    def _open(self, i: NDArray[np.int32], j: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return new slots for these pairs; vector, norm and scale are still to be written."""
        slots = np.arange(self._num_slots, self._num_slots + len(i))
        self._pair_i = np.concatenate([self._pair_i, i])
        self._pair_j = np.concatenate([self._pair_j, j])
        self._norm = np.concatenate([self._norm, np.empty(len(i))])
        self._scale = np.concatenate([self._scale, np.empty(len(i))])
        self._slot_of[self._condensed(i, j)] = slots
        self._slabs.resize(self._num_slots)
        return slots

    def _close(self, slots: NDArray[np.intp]) -> None:
        """Give these slots up, ascending: the last ones move into the holes."""
        if not len(slots):
            return
        self._slot_of[self._condensed(self._pair_i[slots], self._pair_j[slots])] = -1
        left = self._num_slots - len(slots)
        holes = slots[slots < left]
        stays = np.ones(len(slots), dtype=np.bool_)
        stays[slots[slots >= left] - left] = False
        movers = left + np.flatnonzero(stays)
        for hole, mover in zip(holes, movers, strict=True):
            self._slabs.row(hole)[:] = self._slabs.row(mover)
        for array in (self._pair_i, self._pair_j, self._norm, self._scale):
            array[holes] = array[movers]
        self._pair_i, self._pair_j = self._pair_i[:left].copy(), self._pair_j[:left].copy()
        self._norm, self._scale = self._norm[:left].copy(), self._scale[:left].copy()
        self._slot_of[self._condensed(self._pair_i[holes], self._pair_j[holes])] = holes
        self._slabs.resize(left)

    def _condensed(self, i: NDArray[np.integer], j: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the place of pair i < j in the upper triangle, row by row."""
        row = i.astype(np.int64)
        return row * (2 * len(self._omega) - row - 3) // 2 + j - 1

    # ------------------------------------------------------------------------------------------
    # Saving and loading
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state as plain arrays, for a checkpoint.

        The vectors are views of the store (``delta.0``, ``delta.1``, ...), so that a large one is
        not held twice: write or copy them before the next update.
        """
        vectors = enumerate(self._slabs.used(self._num_slots))
        return {
            "rho": np.array(self.rho, dtype=np.float64),
            "omega": self.omega,
            "pair_i": self._pair_i,
            "pair_j": self._pair_j,
            "norm": self._norm,
            "scale": self._scale,
            **{f"delta.{number}": rows for number, rows in vectors},
            **prefixed("history.", self._history.state_arrays()),
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
        _check_complete(arrays)
        if not np.array_equal(arrays["rho"], self.rho):
            raise ValueError(
                f"The saved rho is {arrays['rho']}, expected {self.rho}. Continue with the former."
            )
        omega = np.array(arrays["omega"])
        if (omega.shape, omega.dtype) != (self._omega.shape, self._omega.dtype):
            raise ValueError(
                f"The saved omega is {omega.dtype} of shape {omega.shape}, expected "
                f"{self._omega.dtype} of shape {self._omega.shape}. Continue with the clients and "
                "the model of the saved run."
            )
        if not np.isfinite(omega).all():
            raise ValueError("The saved omega holds NaN or Inf, expected finite numbers.")
        m, d = omega.shape
        history = History(m, d, omega.dtype, self._kernels)
        history.load_state_arrays(m, under("history.", arrays))
        i, j, norm, scale = (arrays[name] for name in ("pair_i", "pair_j", "norm", "scale"))
        parts = [arrays[name] for name in _delta_names(arrays)]
        if (
            any(part.dtype != omega.dtype or part.shape[1:] != (d,) for part in parts)
            or not i.shape == j.shape == norm.shape == scale.shape == (sum(map(len, parts)),)
            or not i.dtype.kind == j.dtype.kind == "i"
            or np.any((i < 0) | (i >= j) | (j >= m))
            or len(np.unique(self._condensed(i, j))) != len(i)
            or not np.isnan(history.scale(i, j)).all()
        ):
            raise ValueError(
                "The saved pairs do not agree, expected pair_i < pair_j < m, each pair once, and "
                f"for each an entry of norm and scale and a row of {d} {omega.dtype} in delta.*. "
                "Was the checkpoint cut short or mixed with another?"
            )
        self._omega = omega
        self._clear()
        self._history = history
        slots = self._open(i.astype(np.int32), j.astype(np.int32))
        self._norm[slots], self._scale[slots] = norm, scale
        start = 0
        for saved in parts:
            span = slots[start : start + len(saved)]
            for slab, rows, part in self._slabs.pieces(span):
                slab[rows] = saved[part]
            start += len(saved)

    @classmethod
    def from_state_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        penalty: Penalty,
        rho: float,
        *,
        engine: Engine | None = None,
    ) -> Self:
        """Return a new store with what `state_arrays` gave; see `load_state_arrays`."""
        _check_complete(arrays)
        store = cls(arrays["omega"], penalty, rho, engine=engine)
        store.load_state_arrays(arrays)
        return store

    # ------------------------------------------------------------------------------------------
    # Checks
    # ------------------------------------------------------------------------------------------

    def _checked_clients(self, name: str, indices: Clients) -> NDArray[np.intp]:
        clients = np.asarray(indices)
        if clients.ndim != 1 or not (np.issubdtype(clients.dtype, np.integer) or not clients.size):
            raise ValueError(f"{name} is {indices!r}, expected a sequence of integers.")
        m = len(self._omega)
        if np.any((clients < 0) | (clients >= m)):
            raise ValueError(
                f"{name} is {listing(clients.tolist())}, expected clients in 0..{m - 1}."
            )
        if len(np.unique(clients)) != len(clients):
            raise ValueError(
                f"{name} is {listing(clients.tolist())}, expected each client at most once."
            )
        return clients.astype(np.intp)

    def _checked_models(self, name: str, models: ArrayLike, count: int) -> FloatArray:
        with np.errstate(over="ignore"):  # an overflow in the cast is reported just below
            checked: FloatArray = np.asarray(models).astype(self._omega.dtype)
        expected = (count, self._omega.shape[1])
        if checked.shape != expected:
            raise ValueError(f"{name} is of shape {checked.shape}, expected {expected}.")
        if not np.isfinite(checked).all():
            raise ValueError(
                f"{name} holds NaN or Inf, expected numbers that are finite in {checked.dtype}."
            )
        return checked

    def _narrow(self, array: NDArray[np.floating]) -> FloatArray:
        narrow: FloatArray = array.astype(self._omega.dtype, copy=False)
        return narrow


def _pairs_with(
    clients: NDArray[np.intp], num_clients: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return all pairs i < j with one or two of these clients, each once."""
    rank = np.full(num_clients, len(clients))
    rank[clients] = np.arange(len(clients))
    # Client k's partners: all that are not a client listed before it, nor itself.
    position, partner = np.nonzero(rank[None, :] > np.arange(len(clients))[:, None])
    client = clients[position]
    low, high = np.minimum(client, partner), np.maximum(client, partner)
    return low.astype(np.int32), high.astype(np.int32)


def _delta_names(arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    count = sum(name.startswith("delta.") for name in arrays)
    return [f"delta.{number}" for number in range(count)]


def _check_complete(arrays: Mapping[str, NDArray[Any]]) -> None:
    names = ["rho", "omega", "pair_i", "pair_j", "norm", "scale", *_delta_names(arrays)]
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(
            f"The saved pairs lack {missing}, expected {names}. Was the checkpoint cut short?"
        )
