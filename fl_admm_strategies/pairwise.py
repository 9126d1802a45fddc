"""The server's state of FPFC: all models and, for every pair that needs one, a vector.

FPFC ("Clustered Federated Learning based on Nonconvex Pairwise Fusion", arXiv:2211.04218v3,
Algorithm 2, Eqs. (6) and (A.3)) keeps for every pair of clients a difference θ_ij and a dual v_ij.
Right after a pair's update both are multiples of one vector, ``δ_ij = ω_i - ω_j + v_ij/ρ``:
``θ_ij = s δ_ij`` and ``v_ij = ρ(1 - s) δ_ij``, with s the penalty's `prox_scale` at ||δ_ij||. So
one vector per unordered pair is enough, and a pair with ``θ_ij = ω_i - ω_j`` and ``v_ij = 0`` (all
pairs at the start, and later those in the penalty's far regime) needs none. This is exact.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_admm_strategies.penalties import Penalty

FloatArray = NDArray[np.floating]
Engine = Literal["numba", "numpy"]

# Above 32 MiB glibc gives each block its own mapping, so a dropped slab really goes back to the OS.
_SLAB_BYTES = 48 * 2**20

# What the numpy kernels work on at a time: a few such blocks fit a core's cache.
_BLOCK_BYTES = 2**18


class PairwiseStore:
    """Models ω_i of all clients with the pairwise variables θ_ij and v_ij of FPFC.

    Parameters
    ----------
    omega : ndarray, shape (m, d), float32 or float64
        Initial models ω_i^0; copied. Algorithm 2 starts all of them at one ω^0, with θ = v = 0.
        If they differ, the start is θ_ij = ω_i - ω_j, v_ij = 0.
    penalty : Penalty
        Fusion penalty g̃.
    rho : float
        ADMM penalty parameter ρ.
    engine : {"numba", "numpy"}, optional
        Kernels to use. By default numba's where numba can be imported.

    Attributes
    ----------
    rho : float
        As given.
    engine : str
        The kernels in use.

    Raises
    ------
    ValueError
        If `omega` has the wrong shape or dtype or is not finite, or `penalty.check(rho)` fails.
    ImportError
        If ``engine="numba"`` is asked for and numba cannot be imported.
    """

    def __init__(
        self, omega: FloatArray, penalty: Penalty, rho: float, *, engine: Engine | None = None
    ) -> None:
        omega = np.asarray(omega)
        if omega.ndim != 2 or omega.dtype not in (np.float32, np.float64) or not omega.size:
            raise ValueError(
                "omega must be a non-empty float32 or float64 array of shape (m, d), got "
                f"{omega.dtype} {omega.shape}."
            )
        if not np.isfinite(omega).all():
            raise ValueError("omega must be finite, got NaN or Inf.")
        self.rho = rho
        self.penalty = penalty
        self.engine, self._kernels = _choose_kernels(engine)
        self._omega = omega.copy()
        # Slots 0..n-1 are all live, in the slabs one after the other.
        self._slabs: list[FloatArray] = []
        self._slab_rows = self._wanted_slab_rows()
        self._pair_i = np.empty(0, dtype=np.int32)
        self._pair_j = np.empty(0, dtype=np.int32)
        self._norm = np.empty(0)
        # Kept beside the norm, not recomputed from it: it must survive a change of penalty (A5).
        self._scale = np.empty(0)
        self._slot_of = np.full(self._num_pairs, -1, dtype=np.int32)

    @property
    def _num_pairs(self) -> int:
        m = len(self._omega)
        return m * (m - 1) // 2

    def _wanted_slab_rows(self) -> int:
        fitting = _SLAB_BYTES // self._omega[:1].nbytes
        return max(1, min(self._num_pairs, fitting))

    @property
    def penalty(self) -> Penalty:
        """Fusion penalty used by the next update.

        Setting another one leaves every ω, θ and v as it is (warm start of the next λ, A5).
        """
        return self._penalty

    @penalty.setter
    def penalty(self, penalty: Penalty) -> None:
        penalty.check(self.rho)
        self._penalty = penalty

    @property
    def omega(self) -> FloatArray:
        """Models ω, shape (m, d); a read-only view."""
        view = self._omega.view()
        view.flags.writeable = False
        return view

    @property
    def num_stored(self) -> int:
        """Number of unordered pairs that hold a vector."""
        return len(self._pair_i)

    @property
    def nbytes(self) -> int:
        """Bytes held, the slabs' unused rows included."""
        index = (self._pair_i, self._pair_j, self._norm, self._scale, self._slot_of)
        return sum(array.nbytes for array in (self._omega, *index, *self._slabs))

    def update(self, active: Sequence[int] | NDArray[np.integer], new_omega: ArrayLike) -> None:
        """Take the models of a round and update every pair they touch (Algorithm 2, Eqs. 6, A.3).

        A pair with one *or* both clients active is updated (A1), exactly once, with the dual of
        the round before (A2).

        Parameters
        ----------
        active : sequence of int
            Clients A_k, in any order; it has no influence on the result.
        new_omega : array_like, shape (len(active), d)
            Their models ω_i^{k+1}; converted to the dtype of the store.

        Raises
        ------
        ValueError
            If an index is out of range or occurs twice, or `new_omega` has the wrong shape or is
            not finite in the store's dtype. Nothing has changed then.
        """
        clients = self._checked_clients(active)
        with np.errstate(over="ignore"):  # an overflow in the cast is reported just below
            models = np.asarray(new_omega).astype(self._omega.dtype)
        expected = (len(clients), self._omega.shape[1])
        if models.shape != expected:
            raise ValueError(f"new_omega must have shape {expected}, got {models.shape}.")
        if not np.isfinite(models).all():
            raise ValueError(f"new_omega must be finite in {models.dtype}, got NaN or Inf.")
        self._omega[clients] = models
        # Slots are given in this order, so the order of `active` must not enter.
        i, j = self._pairs_of(np.sort(clients))
        slots = self._slot_of[self._condensed(i, j)]
        self._update_stored(np.sort(slots[slots >= 0]))
        self._store_near(i[slots < 0], j[slots < 0])

    def add(self, places: Sequence[int], omega: ArrayLike) -> None:
        """Take in new clients with these models, and v = 0, θ_ij = ω_i - ω_j for their pairs.

        Parameters
        ----------
        places : sequence of int
            For every new client the present client before which it goes, as `numpy.insert` counts.
        omega : array_like, shape (len(places), d)
            Their models; converted to the dtype of the store.

        Raises
        ------
        ValueError
            If `omega` has the wrong shape or is not finite in the store's dtype.
        """
        new = np.asarray(omega).astype(self._omega.dtype)
        expected = (len(places), self._omega.shape[1])
        if new.shape != expected or not np.isfinite(new).all():
            raise ValueError(f"omega must be finite and of shape {expected}, got {new.shape}.")
        is_old = np.insert(np.ones(len(self._omega), dtype=np.bool_), places, False)
        self._omega = np.insert(self._omega, places, new, axis=0)
        self._renumber(np.flatnonzero(is_old))
        if (rows := self._wanted_slab_rows()) > self._slab_rows:
            # The one slab there is at most was made for a few clients; many of its kind would be
            # slow.
            for slab in self._slabs:
                larger = np.empty((rows, slab.shape[1]), dtype=slab.dtype)
                larger[: self.num_stored] = slab[: self.num_stored]
                self._slabs = [larger]
            self._slab_rows = rows

    def remove(self, indices: Sequence[int]) -> None:
        """Let clients go, with their models and all of their pairs.

        Parameters
        ----------
        indices : sequence of int
            Some of the clients, not all; each at most once.

        Raises
        ------
        ValueError
            If an index is out of range or occurs twice, or nobody would be left.
        """
        clients = self._checked_clients(indices)
        if len(clients) == len(self._omega):
            raise ValueError("All clients were to be removed; a store has at least one.")
        gone = np.zeros(len(self._omega), dtype=np.bool_)
        gone[clients] = True
        self._release(np.flatnonzero(gone[self._pair_i] | gone[self._pair_j]))
        self._omega = self._omega[~gone]
        self._renumber(np.cumsum(~gone) - 1)

    def _renumber(self, new: NDArray[np.integer]) -> None:
        """Give every client i of the pairs its new index new[i]; the order stays."""
        self._pair_i = new[self._pair_i].astype(np.int32)
        self._pair_j = new[self._pair_j].astype(np.int32)
        self._slot_of = np.full(self._num_pairs, -1, dtype=np.int32)
        self._slot_of[self._condensed(self._pair_i, self._pair_j)] = np.arange(self.num_stored)

    def zeta(self, indices: Sequence[int] | NDArray[np.integer]) -> FloatArray:
        """Return ``ζ_i = (1/m) Σ_j (ω_j + θ_ij - v_ij/ρ)`` for some clients (Algorithm 2).

        A pair without a vector contributes exactly ω_i, so a client in the far regime of all
        others gets its own model back, to the last bit.

        Parameters
        ----------
        indices : sequence of int
            Clients, each at most once.

        Returns
        -------
        ndarray, shape (len(indices), d)
            In the dtype of the store; summed in float64, by numba eight terms at a time.

        Raises
        ------
        ValueError
            If an index is out of range or occurs twice.
        """
        clients = self._checked_clients(indices)
        # theta - v/rho = (2s - 1) delta for a stored pair and omega_i - omega_j for the others, so
        # zeta_i = omega_i + (1/m) sum over stored j of (omega_j - omega_i + (2s - 1) delta_ij).
        slots = self._slots_of(clients)
        total = self._sum_deltas(clients, slots, 2 * self._scale - 1)
        # i itself may be counted among the j. Then clients of one cluster have the same set, whose
        # sum is needed only once.
        near = slots >= 0
        near[np.arange(len(clients)), clients] = True
        _, first, same = np.unique(
            np.packbits(near, axis=1), axis=0, return_index=True, return_inverse=True
        )
        total += self._kernels.sum_chosen(self._omega, near[first])[same.ravel()]
        own = self._omega[clients]
        total -= near.sum(axis=1)[:, None] * own.astype(np.float64)
        total /= len(self._omega)
        total += own
        return self._narrow(total)

    def mean_dual(self, indices: Sequence[int] | NDArray[np.integer] | None = None) -> FloatArray:
        """Return ``(1/m) Σ_j v_ij``; at a KKT point it equals ``-grad f_i(ω_i)``, Eq. (11).

        Parameters
        ----------
        indices : sequence of int, optional
            Clients, each at most once; all of them by default.

        Returns
        -------
        ndarray, shape (len(indices), d)
            In the dtype of the store; summed in float64, by numba eight terms at a time.

        Raises
        ------
        ValueError
            If an index is out of range or occurs twice.
        """
        clients = self._checked_clients(range(len(self._omega)) if indices is None else indices)
        total = self._sum_deltas(clients, self._slots_of(clients), self.rho * (1 - self._scale))
        total /= len(self._omega)
        return self._narrow(total)

    def theta(self, i: int, j: int) -> FloatArray:
        """Return θ_ij, shape (d,). θ_ji = -θ_ij and θ_ii = 0."""
        slot, sign = self._find(i, j)
        if slot < 0:
            difference: FloatArray = self._omega[i] - self._omega[j]
            return difference
        return self._narrow(sign * self._scale[slot] * self._row(slot))

    def v(self, i: int, j: int) -> FloatArray:
        """Return the dual v_ij, shape (d,). v_ji = -v_ij and v_ii = 0."""
        slot, sign = self._find(i, j)
        if slot < 0:
            return np.zeros_like(self._omega[i])
        return self._narrow(sign * self.rho * (1 - self._scale[slot]) * self._row(slot))

    def theta_norms(self) -> NDArray[np.float64]:
        """Return ||θ_ij|| for all pairs, shape (m, m), symmetric with zero diagonal."""
        m = len(self._omega)
        norms = np.zeros((m, m))
        norms[self._pair_i, self._pair_j] = self._scale * self._norm
        i, j = (index.astype(np.int32) for index in np.triu_indices(m, k=1))
        unstored = self._slot_of < 0  # triu_indices runs in condensed order
        i, j = i[unstored], j[unstored]
        norms[i, j] = self._kernels.difference_norms(self._omega, i, j)
        return norms + norms.T

    def primal_residual(self) -> float:
        """Return ``max_ij ||ω_i - ω_j - θ_ij||``, the second KKT residual (11)."""
        largest = 0.0
        for slab, rows, part in self._by_slab(np.arange(self.num_stored)):
            i, j, scale = self._pair_i[part], self._pair_j[part], self._scale[part]
            norms = self._kernels.residual_norms(slab, rows, i, j, self._omega, scale)
            largest = max(largest, float(norms.max()))
        return largest

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state as plain numeric arrays, for a checkpoint.

        The vectors are views of the store (``delta.0``, ``delta.1``, ...), so that a large one is
        not held twice: write or copy them before the next update.
        """
        arrays: dict[str, NDArray[Any]] = {
            "rho": np.array(self.rho, dtype=np.float64),
            "omega": self.omega,
            "pair_i": self._pair_i,
            "pair_j": self._pair_j,
            "norm": self._norm,
            "scale": self._scale,
        }
        for number, slab in enumerate(self._slabs):
            live = min(self._slab_rows, self.num_stored - number * self._slab_rows)
            arrays[f"delta.{number}"] = slab[:live]
        return arrays

    @classmethod
    def from_state_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        penalty: Penalty,
        rho: float,
        *,
        engine: Engine | None = None,
    ) -> Self:
        """Return a store that continues from `state_arrays` with the same bits.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            What `state_arrays` gave; copied.
        penalty : Penalty
            Fusion penalty of the next update. It may differ from the one before (A5).
        rho : float
            ADMM penalty parameter ρ; must be the one the state was made with, since the duals are
            stored relative to it.
        engine : {"numba", "numpy"}, optional
            Kernels to use.

        Returns
        -------
        PairwiseStore
            The restored store.

        Raises
        ------
        ValueError
            If an array is missing, or shapes, dtypes, indices or `rho` do not agree.
        """
        missing = {"rho", "omega", "pair_i", "pair_j", "norm", "scale"} - arrays.keys()
        if missing:
            raise ValueError(f"The state lacks the arrays {sorted(missing)}.")
        if float(arrays["rho"]) != rho:
            raise ValueError(
                f"The state was made with rho={float(arrays['rho'])!r}, got rho={rho!r}. "
                "Continue with the former."
            )
        store = cls(arrays["omega"], penalty, rho, engine=engine)
        m, d = store._omega.shape
        i, j = arrays["pair_i"].astype(np.int32), arrays["pair_j"].astype(np.int32)
        norm, scale = arrays["norm"].astype(np.float64), arrays["scale"].astype(np.float64)
        parts = [
            arrays[f"delta.{k}"] for k in range(sum(name.startswith("delta.") for name in arrays))
        ]
        if (
            any(part.ndim != 2 for part in parts)
            or not i.shape == j.shape == norm.shape == scale.shape == (sum(map(len, parts)),)
            or any(part.dtype != store._omega.dtype or part.shape[1:] != (d,) for part in parts)
            or np.any((i < 0) | (i >= j) | (j >= m))
            or len(np.unique(store._condensed(i, j))) != len(i)
        ):
            raise ValueError(
                "The state's arrays do not agree: pair_i < pair_j < m, norm and scale need one "
                f"entry and delta.* one row of {d} {store._omega.dtype} per stored pair, each pair "
                "once. Was the checkpoint cut short or mixed with another?"
            )
        store._append_slots(i, j, norm, scale)
        start = 0
        for part in parts:
            for slab, rows, span in store._by_slab(np.arange(start, start + len(part))):
                slab[rows] = part[span - start]
            start += len(part)
        return store

    def _update_stored(self, slots: NDArray[np.intp]) -> None:
        """Renew δ, ||δ|| and s of these slots; let go of those that have become far."""
        old = self._scale[slots]
        # v/rho = (1 - s) delta, hence delta <- omega_i - omega_j + (1 - s) delta.
        norm = self._renew(slots, 1 - old)
        new = self._penalty.prox_scale(norm, self.rho)
        self._norm[slots] = norm
        self._scale[slots] = new
        # With s = 1 before, v was 0 and delta is omega_i - omega_j; with s = 1 now, so is theta.
        # The update that carries a pair across (s < 1 before) leaves theta = omega_i - omega_j +
        # v/rho, which must be kept until the pair's next update.
        self._release(slots[(old == 1) & (new == 1)])

    def _store_near(self, i: NDArray[np.int32], j: NDArray[np.int32]) -> None:
        """Give a slot to each touched pair that had none (so v = 0) and is not far (any more)."""
        norm = self._kernels.difference_norms(self._omega, i, j)
        near = (self._penalty.prox_scale(norm, self.rho) < 1) & (norm > 0)
        i, j = i[near], j[near]
        slots = np.arange(self.num_stored, self.num_stored + len(i))
        self._append_slots(i, j, norm[near], np.ones(len(i)))
        self._norm[slots] = self._renew(slots, np.zeros(len(i)))
        self._scale[slots] = self._penalty.prox_scale(self._norm[slots], self.rho)

    def _renew(self, slots: NDArray[np.intp], keep: NDArray[np.float64]) -> NDArray[np.float64]:
        """Set δ to ``ω_i - ω_j + keep * δ`` and return ||δ||, for ascending slots."""
        norm = np.empty(len(slots))
        keep = keep.astype(self._omega.dtype)
        done = 0
        for slab, rows, part in self._by_slab(slots):
            span = slice(done, done + len(part))
            i, j = self._pair_i[part], self._pair_j[part]
            norm[span] = self._kernels.update_rows(slab, rows, i, j, self._omega, keep[span])
            done = span.stop
        return norm

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
        coefficient: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return Σ_j coefficient_ij δ_ij over the stored pairs of each client."""
        total = np.zeros((len(clients), self._omega.shape[1]))
        place, _ = np.nonzero(slots >= 0)
        slab, row = np.divmod(slots[slots >= 0].astype(np.int64), self._slab_rows)
        # One sort by slab, then client, then row.
        key = np.sort((slab * len(clients) + place) * self._slab_rows + row)
        group, row = np.divmod(key, self._slab_rows)
        slab, place = np.divmod(group, max(1, len(clients)))
        slot = slab * self._slab_rows + row
        signed = np.where(self._pair_i[slot] == clients[place], 1.0, -1.0) * coefficient[slot]
        starts = np.searchsorted(group, np.arange(len(self._slabs) * len(clients) + 1))
        for number, vectors in enumerate(self._slabs):
            part = starts[number * len(clients) : (number + 1) * len(clients) + 1]
            self._kernels.add_rows(vectors, row, part, signed, total)
        return total

    def _append_slots(
        self,
        i: NDArray[np.int32],
        j: NDArray[np.int32],
        norm: NDArray[np.float64],
        scale: NDArray[np.float64],
    ) -> None:
        """Open slots for these pairs; their rows are not yet written."""
        start = self.num_stored
        self._pair_i = np.concatenate([self._pair_i, i])
        self._pair_j = np.concatenate([self._pair_j, j])
        self._norm = np.concatenate([self._norm, norm])
        self._scale = np.concatenate([self._scale, scale])
        self._slot_of[self._condensed(i, j)] = np.arange(start, start + len(i))
        while len(self._slabs) * self._slab_rows < self.num_stored:
            # Not zeros: a page costs memory only once a row on it is written.
            shape = (self._slab_rows, self._omega.shape[1])
            self._slabs.append(np.empty(shape, dtype=self._omega.dtype))

    def _release(self, released: NDArray[np.intp]) -> None:
        """Close these slots (ascending): the highest live rows fill the holes."""
        if not len(released):
            return
        self._slot_of[self._condensed(self._pair_i[released], self._pair_j[released])] = -1
        left = self.num_stored - len(released)
        holes = released[released < left]
        tail_live = np.ones(len(released), dtype=np.bool_)
        tail_live[released[released >= left] - left] = False
        movers = left + np.flatnonzero(tail_live)
        for hole, mover in zip(holes, movers, strict=True):
            self._row(hole)[:] = self._row(mover)
        for array in (self._pair_i, self._pair_j, self._norm, self._scale):
            array[holes] = array[movers]
        self._pair_i, self._pair_j = self._pair_i[:left].copy(), self._pair_j[:left].copy()
        self._norm, self._scale = self._norm[:left].copy(), self._scale[:left].copy()
        self._slot_of[self._condensed(self._pair_i[holes], self._pair_j[holes])] = holes
        del self._slabs[-(-left // self._slab_rows) :]

    def _by_slab(
        self, slots: NDArray[np.intp]
    ) -> Iterator[tuple[FloatArray, NDArray[np.int64], NDArray[np.intp]]]:
        """Yield (slab, rows in it, slots) for ascending slots."""
        edges = np.arange(len(self._slabs) + 1) * self._slab_rows
        bounds = np.searchsorted(slots, edges)
        for number, slab in enumerate(self._slabs):
            part = slots[bounds[number] : bounds[number + 1]]
            if len(part):
                yield slab, part.astype(np.int64) - edges[number], part

    def _narrow(self, array: NDArray[np.floating]) -> FloatArray:
        narrow: FloatArray = array.astype(self._omega.dtype, copy=False)
        return narrow

    def _row(self, slot: int | np.intp) -> FloatArray:
        number, row = divmod(int(slot), self._slab_rows)
        vector: FloatArray = self._slabs[number][row]
        return vector

    def _find(self, i: int, j: int) -> tuple[int, int]:
        """Return the slot of a pair, or -1, and the sign of its vector as seen from i."""
        self._checked_clients([i])
        self._checked_clients([j])
        if i == j:
            return -1, 0
        low, high = np.array([min(i, j)]), np.array([max(i, j)])
        return int(self._slot_of[self._condensed(low, high)][0]), 1 if i < j else -1

    def _condensed(self, i: NDArray[np.integer], j: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the place of pair i < j in row-major order of the upper triangle."""
        row = i.astype(np.int64)
        return row * (2 * len(self._omega) - row - 3) // 2 + j - 1

    def _pairs_of(self, clients: NDArray[np.intp]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return all pairs i < j with at least one of the clients, each once."""
        m = len(self._omega)
        rank = np.full(m, len(clients))
        rank[clients] = np.arange(len(clients))
        # Client k's partners: all that are not a client listed before it, nor itself.
        position, partner = np.nonzero(rank[None, :] > np.arange(len(clients))[:, None])
        client = clients[position]
        low, high = np.minimum(client, partner), np.maximum(client, partner)
        return low.astype(np.int32), high.astype(np.int32)

    def _checked_clients(self, indices: Sequence[int] | NDArray[np.integer]) -> NDArray[np.intp]:
        clients = np.asarray(indices)
        if clients.ndim != 1 or not (np.issubdtype(clients.dtype, np.integer) or not clients.size):
            raise ValueError(f"Client indices must be a sequence of integers, got {indices!r}.")
        m = len(self._omega)
        if np.any((clients < 0) | (clients >= m)):
            raise ValueError(f"Client indices must be in 0..{m - 1}, got {clients.tolist()}.")
        if len(np.unique(clients)) != len(clients):
            raise ValueError(f"Client indices must not repeat, got {clients.tolist()}.")
        return clients.astype(np.intp)


class _Kernels(Protocol):
    """The passes over vectors, in a numpy form below and a numba form in `_pairwise_numba`."""

    def update_rows(
        self,
        slab: FloatArray,
        rows: NDArray[np.int64],
        i: NDArray[np.int32],
        j: NDArray[np.int32],
        omega: FloatArray,
        keep: FloatArray,
    ) -> NDArray[np.float64]:
        """Set ``slab[rows] = omega[i] - omega[j] + keep * slab[rows]``; return the new norms.

        A row with ``keep == 0`` is not read: it may be uninitialised.
        """

    def difference_norms(
        self, omega: FloatArray, i: NDArray[np.int32], j: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        """Return ``||omega[i] - omega[j]||``."""

    def residual_norms(
        self,
        slab: FloatArray,
        rows: NDArray[np.int64],
        i: NDArray[np.int32],
        j: NDArray[np.int32],
        omega: FloatArray,
        scale: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return ``||omega[i] - omega[j] - scale * slab[rows]||``."""

    def add_rows(
        self,
        slab: FloatArray,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        coefficient: NDArray[np.float64],
        total: NDArray[np.float64],
    ) -> None:
        """Add to ``total[k]`` the ``coefficient * slab[rows]`` of ``starts[k]:starts[k + 1]``."""

    def sum_chosen(self, omega: FloatArray, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return for each k the sum of the ``omega[j]`` with ``chosen[k, j]``."""


class _NumpyKernels:
    """See `_Kernels`."""

    def update_rows(
        self,
        slab: FloatArray,
        rows: NDArray[np.int64],
        i: NDArray[np.int32],
        j: NDArray[np.int32],
        omega: FloatArray,
        keep: FloatArray,
    ) -> NDArray[np.float64]:
        norms = np.empty(len(rows))
        for block in _blocks(len(rows), slab):
            delta = slab[rows[block]]
            delta[keep[block] == 0] = 0
            delta *= keep[block, None]
            delta += omega[i[block]] - omega[j[block]]
            slab[rows[block]] = delta
            norms[block] = _row_norms(delta)
        return norms

    def difference_norms(
        self, omega: FloatArray, i: NDArray[np.int32], j: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        norms = np.empty(len(i))
        for block in _blocks(len(i), omega):
            norms[block] = _row_norms(omega[i[block]] - omega[j[block]])
        return norms

    def residual_norms(
        self,
        slab: FloatArray,
        rows: NDArray[np.int64],
        i: NDArray[np.int32],
        j: NDArray[np.int32],
        omega: FloatArray,
        scale: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        norms = np.empty(len(rows))
        for block in _blocks(len(rows), slab):
            difference = omega[i[block]] - omega[j[block]]
            norms[block] = _row_norms(difference - scale[block, None] * slab[rows[block]])
        return norms

    def add_rows(
        self,
        slab: FloatArray,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        coefficient: NDArray[np.float64],
        total: NDArray[np.float64],
    ) -> None:
        for k, target in enumerate(total):
            chosen = rows[starts[k] : starts[k + 1]]
            weight = coefficient[starts[k] : starts[k + 1]]
            for block in _blocks(len(chosen), slab):
                target += weight[block] @ slab[chosen[block]]

    def sum_chosen(self, omega: FloatArray, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        total = np.empty((len(chosen), omega.shape[1]))
        for row, members in zip(total, chosen, strict=True):
            omega[members].sum(axis=0, dtype=np.float64, out=row)
        return total


def _blocks(count: int, array: FloatArray) -> Iterator[slice]:
    """Yield slices over `count` rows of the width of `array`, each about `_BLOCK_BYTES`."""
    step = max(1, _BLOCK_BYTES // (array.shape[1] * array.itemsize))
    for start in range(0, count, step):
        yield slice(start, start + step)


def _row_norms(rows: FloatArray) -> NDArray[np.float64]:
    wide = rows.astype(np.float64, copy=False)
    norms: NDArray[np.float64] = np.sqrt(np.einsum("kc,kc->k", wide, wide))
    return norms


@cache
def _numba_kernels() -> _Kernels | ImportError:
    """Import the numba kernels once, and only where a store is built: it takes half a second."""
    try:
        from fl_admm_strategies import _pairwise_numba
    except ImportError as error:
        logging.getLogger("flwr").info(
            "FPFC's pair updates run on numpy, several times slower than on numba, which cannot be "
            "imported (%s). To install it: pip install numba",
            error,
        )
        return error
    return _pairwise_numba


def _choose_kernels(engine: Engine | None) -> tuple[Engine, _Kernels]:
    if engine not in (None, "numba", "numpy"):
        raise ValueError(f"engine must be 'numba', 'numpy' or None, got {engine!r}.")
    if engine == "numpy":
        return "numpy", _NumpyKernels()
    kernels = _numba_kernels()
    if not isinstance(kernels, ImportError):
        return "numba", kernels
    if engine == "numba":
        raise ImportError("engine='numba' needs numba: pip install numba") from kernels
    return "numpy", _NumpyKernels()
