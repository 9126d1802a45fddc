"""CFL: clusters by recursive bipartition, from the directions in which the clients pull.

    split C  if  ||mean of the Delta_i|| < eps1  and  max ||Delta_i|| > eps2,    i in C

Where a cluster's model has come to rest while single clients still want to go, they want to go to
different places; the cluster is cut in two by the cosines of their updates Delta_i.

Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2021, arXiv:1910.01991; see docs/methods/cfl.md.
The client is `clients.CFLClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from logging import INFO
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block
from ..maths.checks import NotNegative, WholeNumber, in_range, listing
from ..maths.grouping import cut, tree
from ..runtime.messages.records import Reply
from .shared.base import Weights, mean_weights
from .shared.clustered import ClusteredState, ClusteredStrategy, Clusters


class Bipartition(NamedTuple):
    """A cluster cut in two.

    Attributes
    ----------
    parts : ndarray of int, shape (clients,)
        0 or 1 for every client, 0 for the first.
    cross : float
        alpha_cross^max, the largest cosine between clients of different parts.
    """

    parts: NDArray[np.int64]
    cross: float


def bipartition(
    updates: NDArray[np.floating], linkage: Literal["single", "complete"]
) -> Bipartition:
    """Cut clients in two by the cosines of their updates.

    Parameters
    ----------
    updates : ndarray of shape (clients, d)
        Delta_i, of two clients or more. One that is 0 has the cosine 0 with all.
    linkage : {"single", "complete"}
        "single" is the bipartition with the least alpha_cross^max.
    """
    units = directions(updates)
    cosines = units @ units.T
    merges, _ = tree(-cosines, linkage)
    parts = np.array(cut(merges, 2))
    return Bipartition(parts, float(cosines[parts == 0][:, parts == 1].max()))


def directions(updates: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return updates, shape (clients, d), as vectors of length 1; one that is 0 stays 0."""
    wide = updates.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    units: NDArray[np.float64] = wide / np.maximum(lengths, np.finfo(np.float64).tiny)
    return units


class ClusterTree(Clusters):
    """The clusters that there are and those that were cut in two, which newcomers descend.

    Parameters
    ----------
    first : Arrays
        The model of the root, cluster 0.
    block : Block
        What of a model has a direction.

    Attributes
    ----------
    children : list of list of int
        Of every cluster the two that it was cut into; empty where it was not.
    directions : list of ndarray of shape (d,)
        The mean direction in which the members of a cluster went when it was cut off; 0 of the
        root.
    """

    def __init__(self, first: Arrays, block: Block) -> None:
        super().__init__([first])
        self._size = block.size
        self.children: list[list[int]] = [[]]
        self.directions = [np.zeros(block.size)]

    def cut(self, cluster: int, parts: Sequence[Sequence[int]], units: NDArray[Any]) -> list[int]:
        """Cut a cluster in two; return the two clusters. Who is in neither stays where it is.

        Parameters
        ----------
        cluster : int
        parts : sequence of two sequences of int
            The clients of both parts.
        units : ndarray of shape (clients, d)
            Their directions, in the order of the parts.
        """
        made, start = [], 0
        for clients in parts:
            made.append(len(self.models))
            self.of |= dict.fromkeys(clients, made[-1])
            self.models.append(self.models[cluster])
            self.children.append([])
            self.directions.append(units[start : start + len(clients)].mean(axis=0))
            start += len(clients)
        self.children[cluster] = made
        return made

    def descend(self, client: int, update: NDArray[np.floating]) -> None:
        """Move a client one step down the tree: to the child that goes its way."""
        self.of[client] = max(
            self.children[self.of[client]],
            key=lambda child: float(self.directions[child] @ update),
        )

    def is_finite(self) -> bool:
        """Return whether all models and directions are finite."""
        return super().is_finite() and all(map(in_range, self.directions))

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables; of a cluster's children the first, after which comes the other."""
        return {
            **super().state_arrays(),
            "children": np.array(
                [parts[0] if parts else 0 for parts in self.children], dtype=np.int64
            ),
            "directions": np.stack(self.directions),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        super().load_state_arrays(arrays)
        first = arrays["children"].tolist()
        if (len(self.models), self._size) != arrays["directions"].shape or max(first) >= len(first):
            raise ValueError("The saved tree of clusters does not fit its models: it is damaged.")
        self.children = [[child, child + 1] if child else [] for child in first]
        self.directions = [np.array(row) for row in arrays["directions"]]


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
    The paper has everybody in every round. Here the rule is applied to the members that replied, at
    least three and half of the cluster; who did not reply when its cluster was cut is sent the
    model of that time when it is next drawn, and goes to the part whose members went its way. So
    does a client that joins the run, from the root, one cluster a round. See docs/methods/cfl.md.
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
        return ClusteredState(ClusterTree(arrays, self._block))

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Split the clusters that are at rest, and move every model by its members' mean update."""
        clusters: ClusterTree = self.state.clusters
        for cluster, clients in clusters.members(replies).items():
            before = self._block.vector(clusters.models[cluster])
            uploads = [self._block.vector(replies[client].arrays) for client in clients]
            updates = np.stack(uploads) - before
            if clusters.children[cluster]:  # it was not there when the cluster was cut
                for client, update in zip(clients, updates, strict=True):
                    clusters.descend(client, update)
                continue
            theirs = {client: replies[client] for client in clients}
            for part, members in self._split(server_round, cluster, theirs, updates).items():
                clusters.average(part, {c: replies[c] for c in members}, self.weights)

    def _split(
        self,
        server_round: int,
        cluster: int,
        replies: Mapping[int, Reply],
        updates: NDArray[np.floating],
    ) -> dict[int, list[int]]:
        """Return the clusters that a cluster's clients are in now: it, or the two it is cut into.

        Parameters
        ----------
        server_round, cluster : int
        replies : mapping of int to Reply
            Of its members.
        updates : ndarray of shape (clients, d)
            Delta_i, in the same order.
        """
        clusters, clients = self.state.clusters, list(replies)
        mean, largest = norms(updates, mean_weights(replies, self.weights))
        size = list(clusters.of.values()).count(cluster)
        if not (mean < self.eps1 and largest > self.eps2 and server_round > self.warmup_rounds):
            return {cluster: clients}
        if len(clients) < max(3, size / 2):
            return {cluster: clients}
        found = bipartition(updates, self.linkage)
        order = np.argsort(found.parts, kind="stable")
        parts = [[clients[k] for k in np.flatnonzero(found.parts == p)] for p in (0, 1)]
        made = clusters.cut(cluster, parts, directions(updates)[order])
        first, second = map(listing, parts)
        log(INFO, f"round {server_round}: a cluster is split, in clients {first} and {second}")
        return dict(zip(made, parts, strict=True))


def norms(updates: NDArray[np.floating], weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return ||sum w_i Delta_i / sum w_i|| and max ||Delta_i||, of updates of shape (m, d)."""
    wide = updates.astype(np.float64)
    mean = (weights / weights.sum()) @ wide
    return float(np.linalg.norm(mean)), float(np.linalg.norm(wide, axis=1).max())
