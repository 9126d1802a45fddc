"""Pairs without a vector of their own: what their clients have sent, and how much of it counts.

delta_ij <- omega_i - omega_j + (1 - s_ij) delta_ij sums up models of i and of j. With h_i(p) the
p-th model that client i has had,

    delta_ij = sum_p W_ij(p) h_i(p) - sum_q W_ji(q) h_j(q)

where an update of the pair multiplies its weights W by 1 - s_ij and adds 1 to the two that belong
to omega_i and omega_j. Exact, and for many clients small: each model is kept once with a weight
for every partner, instead of a vector for every pair. It grows with the rounds and not with the
pairs, so the store gives pairs a vector once that takes less (docs/methods/fpfc-notes.md, P17).

The norm of a vector is needed only where s depends on it. With

    ||delta_ij|| <= ||omega_i - omega_j|| + (1 - s_ij) ||delta_ij||

of the update before, a pair that cannot have left the innermost case of (6) is not summed up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..blocks import check_saved, spec_of
from . import algebra
from .algebra import Float64Array, FloatArray, Indices, Mask, Places, Prox, Weight, row_norms
from .kernels import BLOCK_BYTES, CHUNK, Kernels

_TILE = 16  # clients of a block on either side, whose models then stay in the cache
_OF_PAIRS, _OF_CLIENTS = ("scale", "bound", "is_norm"), ("count", "has_latest")  # as saved
_ROUND_UP = 1 + 1e-6  # more than the rounding of a distance in float32


class ModelHistory:
    """Pairs by the models of their clients.

    Parameters
    ----------
    omega : ndarray of shape (m, d)
        The clients' models.
    kernels : Kernels

    Attributes
    ----------
    num_pairs : int
        Number of unordered pairs that are kept here.
    """

    def __init__(self, omega: FloatArray, kernels: Kernels) -> None:
        num_clients, self.width = omega.shape
        self.dtype = omega.dtype
        self._kernels = kernels
        self._clear(num_clients)

    def _clear(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self.num_pairs = 0
        # Matrices, empty as long as there are no pairs: s_ij, NaN where a pair is not kept here;
        # at least ||delta_ij||; and whether it is that norm.
        self._scale = np.empty((0, 0))
        self._bound = np.empty((0, 0))
        self._is_norm = np.empty((0, 0), dtype=np.bool_)
        # h_i(p) and W_ij(p) of p = k CHUNK, ... are models[k][i] and weights[k][i, j].
        self._models: list[FloatArray] = []
        self._weights: list[Float64Array] = []
        self._count = np.zeros(num_clients, dtype=np.int64)
        self._has_latest = np.zeros(num_clients, dtype=np.bool_)  # its last model is omega_i

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        pairs = (self._scale, self._bound, self._is_norm)
        return sum(array.nbytes for array in (*pairs, *self._models, *self._weights))

    def scale(self, i: NDArray[np.integer], j: NDArray[np.integer]) -> Float64Array:
        """Return s_ij, by element; NaN where a pair is not kept here."""
        if not self.num_pairs:
            return np.full(np.broadcast(i, j).shape, np.nan)
        scale: Float64Array = self._scale[i, j]
        return scale

    def pairs(self) -> tuple[Indices, Indices]:
        """Return the pairs i < j that are kept here."""
        i, j = np.nonzero(np.triu(~np.isnan(self._scale)))
        return i.astype(np.int32), j.astype(np.int32)

    # ------------------------------------------------------------------------------------------
    # Algorithm 2
    # ------------------------------------------------------------------------------------------

    def begin(self, active: Places) -> None:
        """Before an update: these clients have new models."""
        self._has_latest[active] = False

    def update(self, i: Indices, j: Indices, omega: FloatArray, prox: Prox) -> None:
        """Update these pairs, which are kept here; those that turn plain are given up."""
        if not len(i):
            return
        before = self._scale[i, j]
        keep = algebra.carried(before)
        self._add(i, j, omega, keep)
        moved = self._kernels.difference_norms(omega, i, j)
        norm = _ROUND_UP * (moved + keep * self._bound[i, j])
        scale = prox(norm, i, j)
        unsure = np.flatnonzero(scale != prox(np.zeros(len(i)), i, j))
        for part, vectors in self.vectors(i[unsure], j[unsure]):
            norm[unsure[part]] = row_norms(vectors)
        scale[unsure] = prox(norm[unsure], i[unsure], j[unsure])
        self._set(i, j, norm, scale)
        self._is_norm[i, j] = self._is_norm[j, i] = False
        self._is_norm[i[unsure], j[unsure]] = self._is_norm[j[unsure], i[unsure]] = True
        plain = algebra.turns_plain(before, scale)
        self.close(i[plain], j[plain])

    def open(
        self, i: Indices, j: Indices, norm: Float64Array, scale: Float64Array, omega: FloatArray
    ) -> None:
        """Take in plain pairs that an update has made something else: delta = omega_i - omega_j."""
        if not len(i):
            return
        if not self.num_pairs:
            shape = (self._num_clients, self._num_clients)
            self._scale, self._bound = np.full(shape, np.nan), np.zeros(shape)
            self._is_norm = np.zeros(shape, dtype=np.bool_)
        self.num_pairs += len(i)
        self._add(i, j, omega, np.zeros(len(i)))
        self._set(i, j, norm, scale)
        self._is_norm[i, j] = self._is_norm[j, i] = True

    def close(self, i: Indices, j: Indices) -> None:
        """Give pairs up, and with them the models that nobody needs any more."""
        if not len(i):
            return
        self.num_pairs -= len(i)
        if not self.num_pairs:
            self._clear(self._num_clients)
            return
        self._set(i, j, np.zeros(len(i)), np.full(len(i), np.nan))
        for weights in self._weights:
            weights[i, j] = weights[j, i] = 0
        clients = np.unique(np.concatenate([i, j]))
        alone = clients[np.isnan(self._scale[clients]).all(axis=1)]
        self._count[alone] = 0
        self._has_latest[alone] = False
        needed = -(-int(self._count.max()) // CHUNK)
        del self._models[needed:], self._weights[needed:]

    def _set(self, i: Indices, j: Indices, norm: Float64Array, scale: Float64Array) -> None:
        self._bound[i, j] = self._bound[j, i] = norm
        self._scale[i, j] = self._scale[j, i] = scale

    def _add(self, i: Indices, j: Indices, omega: FloatArray, keep: Float64Array) -> None:
        """Multiply the weights of pairs by `keep`, and add omega_i - omega_j to their vectors."""
        clients = np.unique(np.concatenate([i, j]))
        new = clients[~self._has_latest[clients]]
        self._has_latest[new] = True
        self._count[new] += 1
        m = self._num_clients
        while len(self._models) * CHUNK < self._count.max():
            # Zeros cost no memory until they are written to.
            self._models.append(np.zeros((m, CHUNK, self.width), dtype=self.dtype))
            self._weights.append(np.zeros((m, m, CHUNK)))
        latest = self._count - 1
        for k, (models, weights) in enumerate(zip(self._models, self._weights, strict=True)):
            here = new[latest[new] // CHUNK == k]
            models[here, latest[here] % CHUNK] = omega[here]
            place = np.where(latest // CHUNK == k, latest % CHUNK, -1)
            self._kernels.renew_weights(weights, i, j, keep, place)

    def vectors(self, i: Indices, j: Indices) -> Iterator[tuple[Places, Float64Array]]:
        """Yield delta_ij of some pairs, so many at a time: which of them, and shape (., d)."""
        step = max(1, BLOCK_BYTES // (8 * self.width))
        # So that the pairs of a block have few clients, whose models stay in the cache.
        order = np.lexsort((j // _TILE, i // _TILE))
        buffer = np.empty((min(step, len(i)), self.width))
        for start in range(0, len(i), step):
            part = order[start : start + step]
            total = buffer[: len(part)]
            total[:] = 0
            for models, weights in zip(self._models, self._weights, strict=True):
                self._kernels.add_pairs(models, weights, i[part], j[part], total)
            yield part, total

    def add_sums(self, clients: Places, weight: Weight, total: Float64Array) -> Mask:
        """Add sum_j weight(s_ij) delta_ij over the partners j of each client i to `total`.

        Returns
        -------
        ndarray of bool, shape (len(clients), m)
            Which clients are a partner.
        """
        scale = self.scale(clients[:, None], np.arange(self._num_clients)[None, :])
        partners = ~np.isnan(scale)
        weights = np.where(partners, weight(scale), 0)
        place = np.arange(len(clients))
        for models, kept in zip(self._models, self._weights, strict=True):
            of_partner = -weights[:, :, None] * kept[:, clients].transpose(1, 0, 2)
            of_client = np.einsum("kj,kjc->kc", weights, kept[clients])
            of_partner[place, clients] = of_client
            rows = models.reshape(-1, self.width)
            self._kernels.add_products(rows, of_partner.reshape(len(clients), len(rows)), total)
        return partners

    def norms(self, i: Indices, j: Indices) -> Float64Array:
        """Return ||delta_ij|| of pairs that are kept here."""
        found = self._bound[i, j]
        unsure = np.flatnonzero(~self._is_norm[i, j])
        for part, vectors in self.vectors(i[unsure], j[unsure]):
            found[unsure[part]] = row_norms(vectors)
        return found

    def are_within(self, i: Indices, j: Indices, nu: float) -> Mask:
        """Return whether ||theta_ij|| <= nu, of pairs that are kept here."""
        if not len(i):
            return np.empty(0, dtype=np.bool_)
        scale = self._scale[i, j]
        near: Mask = algebra.theta(scale, self._bound[i, j]) <= nu
        norms = self.norms(i[~near], j[~near])
        near[~near] = algebra.theta(scale[~near], norms) <= nu
        return near

    # ------------------------------------------------------------------------------------------
    # Clients that come and go; saving and loading
    # ------------------------------------------------------------------------------------------

    def insert(self, places: Sequence[int]) -> None:
        """Take in clients without pairs, before these present ones as `numpy.insert` counts."""
        self._num_clients += len(places)
        if self.num_pairs:
            self._scale = _widened(self._scale, places, np.nan)
            self._bound = _widened(self._bound, places, 0)
            self._is_norm = _widened(self._is_norm, places, False)
        for k, weights in enumerate(self._weights):
            self._models[k] = np.insert(self._models[k], places, 0, axis=0)
            self._weights[k] = _widened(weights, places, 0)
        self._count = np.insert(self._count, places, 0)
        self._has_latest = np.insert(self._has_latest, places, False)

    def remove(self, stays: Mask) -> None:
        """Remove all other clients, with their pairs."""
        i, j = self.pairs()
        gone = ~(stays[i] & stays[j])
        self.close(i[gone], j[gone])
        self._num_clients = int(stays.sum())
        self._count, self._has_latest = self._count[stays], self._has_latest[stays]
        if not self.num_pairs:
            return
        here = np.ix_(stays, stays)
        self._scale, self._bound = self._scale[here], self._bound[here]
        self._is_norm = self._is_norm[here]
        self._models = [models[stays] for models in self._models]
        self._weights = [weights[here] for weights in self._weights]

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as plain arrays, views; none where no pair is kept here."""
        if not self.num_pairs:
            return {}
        return {
            **{name: getattr(self, f"_{name}") for name in (*_OF_PAIRS, *_OF_CLIENTS)},
            **{f"models.{k}": models for k, models in enumerate(self._models)},
            **{f"weights.{k}": weights for k, weights in enumerate(self._weights)},
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take in, where no pair is kept yet, what `state_arrays` returned; copied.

        Raises
        ------
        ValueError
            If an array is missing, or they do not fit together.
        """
        if not arrays:
            return
        m, chunks = self._num_clients, range((len(arrays) - 5) // 2)
        check_saved(
            arrays,
            {name: ((m, m), getattr(self, f"_{name}").dtype) for name in _OF_PAIRS}
            | spec_of({name: getattr(self, f"_{name}") for name in _OF_CLIENTS})
            | {f"models.{k}": ((m, CHUNK, self.width), self.dtype) for k in chunks}
            | {f"weights.{k}": ((m, m, CHUNK), np.dtype(np.float64)) for k in chunks},
        )
        if not 0 < arrays["count"].max(initial=0) <= len(chunks) * CHUNK:
            raise ValueError("The saved models of the clients do not agree: the state is damaged.")
        for name in (*_OF_PAIRS, *_OF_CLIENTS):
            setattr(self, f"_{name}", np.array(arrays[name]))
        self._models = [np.array(arrays[f"models.{k}"]) for k in chunks]
        self._weights = [np.array(arrays[f"weights.{k}"]) for k in chunks]
        self.num_pairs = len(self.pairs()[0])


def _widened(matrix: NDArray[Any], places: Sequence[int], value: float) -> NDArray[Any]:
    return np.insert(np.insert(matrix, places, value, axis=0), places, value, axis=1)
