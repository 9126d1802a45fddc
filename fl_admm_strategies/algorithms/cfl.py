"""CFL: clusters by recursive bipartition, from the directions in which the clients pull.

    split C  if  ||mean of the Delta_i|| < eps1  and  max ||Delta_i|| > eps2,    i in C

Where a cluster's model has come to rest while single clients still want to go, they want to go to
different places; the cluster is cut in two by the cosines of their updates Delta_i.

Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2021, arXiv:1910.01991; see docs/methods/cfl.md.
The client is `clients.CFLClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from logging import INFO
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block
from ..maths.checks import NotNegative, WholeNumber, listing
from ..maths.grouping import cut, tree
from ..runtime.messages.records import Reply
from .shared.base import Weights, mean_weights
from .shared.clustered import ClusteredState, ClusteredStrategy, Clusters

Updates = NDArray[np.float64]
"""Delta_i of some clients, shape (clients, d)."""


def bipartition(updates: Updates, linkage: Literal["single", "complete"]) -> NDArray[np.int64]:
    """Cut two clients or more in two by the cosines of their updates.

    An update that is 0 has the cosine 0 with all.

    Parameters
    ----------
    updates : ndarray of shape (clients, d)
    linkage : {"single", "complete"}
        "single" is the bipartition with the least alpha_cross^max, the largest cosine across it.

    Returns
    -------
    ndarray of shape (clients,)
        0 or 1 for every client, 0 for the first.
    """
    units = directions(updates)
    merges, _ = tree(-units @ units.T, linkage)
    return np.array(cut(merges, 2))


def directions(updates: Updates) -> Updates:
    """Return updates as vectors of length 1; an update of 0 stays 0."""
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    units: Updates = updates / np.maximum(lengths, np.finfo(np.float64).tiny)
    return units


class ClusterTree(Clusters):
    """The clusters that there are and those that were cut in two.

    Parameters
    ----------
    first : Arrays
        The model of the root, cluster 0.

    Attributes
    ----------
    children : list of int
        Of every cluster the first of the two that it was cut into, after which comes the other; 0
        where it was not cut.
    """

    def __init__(self, first: Arrays) -> None:
        super().__init__([first])
        self.children = [0]

    def cut(self, cluster: int) -> int:
        """Cut a cluster in two, which begin at its model; return the first of them."""
        self.children[cluster] = first = len(self.models)
        self.models += [self.models[cluster]] * 2
        self.children += [0, 0]
        return first

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables."""
        return super().state_arrays() | {"children": np.array(self.children)}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        super().load_state_arrays(arrays)
        self.children = arrays["children"].tolist()


class CFL(ClusteredStrategy):
    """Clustered federated learning by recursive bipartition (CFL).

    Parameters
    ----------
    eps1 : float
        eps_1: a cluster may be split where the norm of its mean update is below. 0 is FedAvg. It
        scales with step size, epochs and model: about a tenth of the largest norm seen.
    eps2 : float
        eps_2: and where the norm of some member's update is above; eps_1 to 10 eps_1.
    warmup_rounds : int (default: 20)
        Rounds before the first split.
    linkage : {"single", "complete"} (default: "single")
        How a cluster is cut. "single": the paper's, with the least similarity across the cut.
        "complete": the authors' code.
    weights : {"uniform", "size"} (default: "uniform")
        Whether a cluster's mean update is the plain mean or weighted by examples.
    **base
        The parameters of `ClusteredStrategy`.

    Notes
    -----
    In the paper all clients take part in every round. Here the rule is applied to the members that
    replied, at least three and half of the cluster. A member that did not reply when its cluster
    was cut is sent the model of that time when it is next drawn, and goes to the part whose model
    lies in the direction of its update. So does a client that joins the run, from the root, one
    cluster a round. See docs/methods/cfl.md.
    """

    method: ClassVar = "CFL"
    paper: ClassVar = "Sattler, Mueller, Samek, IEEE TNNLS 2021, arXiv:1910.01991"

    eps1: NotNegative = field(kw_only=False)
    eps2: NotNegative = field(kw_only=False)
    warmup_rounds: WholeNumber = 20
    linkage: Literal["single", "complete"] = "single"
    weights: Weights = "uniform"

    def init_state(self, arrays: Arrays) -> ClusteredState:
        """Start with all clients in one cluster."""
        self._block = Block.optimised(arrays, self.trained)
        return ClusteredState(ClusterTree(arrays))

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Split the clusters that are at rest, and move every model by its members' mean update."""
        clusters: ClusterTree = self.state.clusters
        for cluster, own in clusters.split(replies).items():
            updates = self._from(cluster, [reply.arrays for reply in own.values()])
            if first := clusters.children[cluster]:  # cut while these clients were absent
                children = [clusters.models[first], clusters.models[first + 1]]
                nearer = (updates @ directions(self._from(cluster, children)).T).argmax(axis=1)
                clusters.of |= dict(zip(own, (first + nearer).tolist(), strict=True))
                continue
            if server_round > self.warmup_rounds and self._is_at_rest(cluster, own, updates):
                first, parts = clusters.cut(cluster), bipartition(updates, self.linkage)
                clusters.of |= dict(zip(own, (first + parts).tolist(), strict=True))
                log(INFO, f"round {server_round}: a cluster of {listing(list(own))} is split")
            for part, members in clusters.split(own).items():
                clusters.average(part, members, self.weights)

    def _from(self, cluster: int, models: list[Arrays]) -> Updates:
        """Return how far models are from that of a cluster: one row each."""
        start = self._block.vector(self.state.clusters.models[cluster])
        ends = np.stack([self._block.vector(model) for model in models])
        moves: Updates = np.subtract(ends, start, dtype=np.float64)
        return moves

    def _is_at_rest(self, cluster: int, replies: Mapping[int, Reply], updates: Updates) -> bool:
        """Return whether a cluster's mean update is small, though that of some member is not."""
        mean, largest = norms(updates, mean_weights(replies, self.weights))
        size = list(self.state.clusters.of.values()).count(cluster)
        enough = len(updates) >= max(3, size / 2)
        return enough and mean < self.eps1 and largest > self.eps2


def norms(updates: Updates, weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return ||sum w_i Delta_i / sum w_i|| and max ||Delta_i||."""
    mean = (weights / weights.sum()) @ updates
    return float(np.linalg.norm(mean)), float(np.linalg.norm(updates, axis=1).max())
