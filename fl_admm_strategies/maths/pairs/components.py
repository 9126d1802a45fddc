"""The clusters of Remark 2 without a matrix of all pairs."""

from __future__ import annotations

import numpy as np

from .algebra import Clients, Float64Array, FloatArray, Indices, Places
from .history import ModelHistory
from .kernels import Kernels
from .vectors import Vectors

_PIVOTS = 32  # clients whose distances from all others spare most others


def components(
    omega: FloatArray,
    forms: tuple[Vectors, ModelHistory],
    kernels: Kernels,
    nu: float,
    alone: Clients,
) -> Places:
    """Return the connected components of ||theta_ij|| <= nu; see `PairwiseStore.clusters`."""
    m = len(omega)
    everybody = np.arange(m, dtype=np.int32)
    labels = np.full(m, -1, dtype=np.intp)
    takes_part = np.ones(m, dtype=np.bool_)
    takes_part[list(alone)] = False
    pivots: list[Float64Array] = []

    def linked(client: int, others: Indices) -> Indices:
        i, j = np.minimum(others, np.int32(client)), np.maximum(others, np.int32(client))
        near, plain = np.zeros(len(others), dtype=np.bool_), np.ones(len(others), dtype=np.bool_)
        for form in forms:
            kept_here = ~np.isnan(form.scale(i, j))
            near[kept_here] = form.are_within(i[kept_here], j[kept_here], nu)
            plain &= ~kept_here
        for distance in pivots:
            # The triangle inequality, with room for the rounding of distances.
            room = nu + 1e-6 * (distance[client] + distance[others])
            plain &= np.abs(distance[client] - distance[others]) <= room
        near[plain] = kernels.difference_norms(omega, i[plain], j[plain]) <= nu
        return others[near]

    for first in range(m):
        if labels[first] >= 0:
            continue
        labels[first] = labels.max() + 1
        if len(pivots) < _PIVOTS:
            pivot = np.full(m, first, dtype=np.int32)
            pivots.append(kernels.difference_norms(omega, pivot, everybody))
        frontier = [first] if takes_part[first] else []
        while frontier:
            client = frontier.pop()
            found = linked(client, np.flatnonzero(takes_part & (labels < 0)).astype(np.int32))
            labels[found] = labels[first]
            frontier.extend(found)
    return labels
