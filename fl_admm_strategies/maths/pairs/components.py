"""The clusters of Remark 2 without a matrix of all pairs."""

from __future__ import annotations

import numpy as np

from .algebra import Clients, Float64Array, FloatArray, Indices, Places
from .kernels import Kernels
from .vectors import Vectors

_PIVOTS = 32  # clients; their distances from all others spare most comparisons


def theta_norms(
    i: Indices, j: Indices, omega: FloatArray, vectors: Vectors, kernels: Kernels
) -> Float64Array:
    """Return ||theta_ij|| of some pairs; a plain one's is ||omega_i - omega_j||."""
    slots = vectors.slot_of[i, j]
    norms: Float64Array = np.empty(len(slots))
    plain = slots < 0
    norms[plain] = kernels.difference_norms(omega, i[plain], j[plain])
    kept = slots[~plain]
    norms[~plain] = vectors.scale[kept] * vectors.norm[kept]
    return norms


def components(
    omega: FloatArray, vectors: Vectors, kernels: Kernels, nu: float, alone: Clients
) -> Places:
    """Return the connected components of ||theta_ij|| <= nu; see `PairwiseStore.clusters`."""
    m = len(omega)
    all_clients = np.arange(m, dtype=np.int32)
    labels = np.full(m, -1, dtype=np.intp)
    takes_part = np.ones(m, dtype=np.bool_)
    takes_part[list(alone)] = False
    pivots: list[Float64Array] = []

    def linked(client: int, others: Indices) -> Indices:
        possible = np.ones(len(others), dtype=np.bool_)
        for distance in pivots:
            # The triangle inequality, with room for the rounding of distances.
            room = nu + 1e-6 * (distance[client] + distance[others])
            possible &= np.abs(distance[client] - distance[others]) <= room
        others = others[possible | (vectors.slot_of[client, others] >= 0)]
        i = np.full(len(others), client, dtype=np.int32)
        return others[theta_norms(i, others, omega, vectors, kernels) <= nu]

    for first in range(m):
        if labels[first] >= 0:
            continue
        labels[first] = labels.max() + 1
        if len(pivots) < _PIVOTS:
            pivot = np.full(m, first, dtype=np.int32)
            pivots.append(kernels.difference_norms(omega, pivot, all_clients))
        frontier = [first] if takes_part[first] else []
        while frontier:
            client = frontier.pop()
            found = linked(client, np.flatnonzero(takes_part & (labels < 0)).astype(np.int32))
            labels[found] = labels[first]
            frontier.extend(found)
    return labels
