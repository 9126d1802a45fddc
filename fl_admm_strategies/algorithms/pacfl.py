"""PACFL: clusters by the angles between the clients' data, found once before training.

    A_ij = the smallest principal angle between span U_i and span U_j

U_i are the first p left singular vectors of client i's data. Hierarchical clustering of A puts
clients together that are nearer than a threshold; FedAvg runs inside every cluster.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles Between Client Data Subspaces",
AAAI 2023, arXiv:2209.10526; see docs/methods/pacfl.md. The client is `clients.PACFLClient`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Spec, prefixed
from ..maths.checks import Count, Positive
from ..maths.clienttable import Row
from ..maths.grouping import Labels, Linkage, cut, tree
from ..maths.subspaces import Basis, Measure, proximity
from ..runtime.algorithm import Handshake
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.clustered import ClusteredState, ClusteredStrategy, Clusters

BASIS = "basis"
"""The array of a client's directions, in its reply to the handshake and in its row."""
BASES = "bases/"
"""Before the clients' ids, as names of their directions in a saved state."""


@dataclass(frozen=True)
class PACFLQuestion(Instruction):
    """The handshake: it asks for the first directions of a client's data, of each class or all."""

    nothing: Arrays
    num_vectors: int
    per_class: bool


class DataClusters(Clusters):
    """Clusters of clients with similar data.

    Parameters
    ----------
    first : Arrays
        The model that every cluster starts from; it stays that of cluster 0, which has no client.
    group : callable
        Returns the groups of clients, by their bases.

    Attributes
    ----------
    bases : dict of int to ndarray of shape (features, vectors)
        U_i of every client.
    """

    def __init__(self, first: Arrays, group: Callable[[Sequence[Basis]], Labels]) -> None:
        super().__init__([first])
        self._group = group
        self.bases: dict[int, Basis] = {}

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Form the clusters of the initial clients, or find those of new ones one by one.

        A client that is in a cluster stays there.
        """
        given: dict[int, Basis] = {c: np.asarray(row[BASIS]) for c, row in rows.items() if row}
        if given and not self.bases:
            labels = self._group(list(given.values()))
            self.of |= {client: 1 + label for client, label in zip(given, labels, strict=True)}
            self.models += self.models * len(set(labels))
            self.bases = given
            return
        for client, basis in given.items():
            self.of[client] = self.nearest(basis) or len(self.models)
            if self.of[client] == len(self.models):
                self.models.append(self.models[0])
            self.bases[client] = basis

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Find the clusters of clients that are joining."""
        self.pending = {c: self.nearest(np.asarray(row[BASIS])) for c, row in rows.items()}

    def nearest(self, basis: Basis) -> int:
        """Return the cluster of most clients that are in a new client's group; 0 if none are."""
        known = list(self.bases)
        *labels, group = self._group([*self.bases.values(), basis])
        mates = sorted(self.of[c] for c, label in zip(known, labels, strict=True) if label == group)
        return Counter(mates).most_common(1)[0][0] if mates else 0

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Let clients go."""
        super().remove(clients)
        self.bases = {client: basis for client, basis in self.bases.items() if client in self.of}

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables."""
        bases = {str(client): basis for client, basis in self.bases.items()}
        return super().state_arrays() | prefixed(BASES, bases)

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        super().load_state_arrays(arrays)
        self.bases = {client: np.array(arrays[f"{BASES}{client}"]) for client in self.of}


def complaint(client: int, basis: Basis, features: int) -> str | None:
    """Return why a basis is none of the space of the clients' inputs; None if it is one."""
    if len(basis) == features and basis.size:
        return None
    return (
        f"The directions of client {client}'s data have shape {basis.shape}, expected "
        f"({features}, vectors). All clients must have inputs of one shape."
    )


class PACFL(ClusteredStrategy):
    """Federated learning in clusters of clients with similar data (PACFL).

    Parameters
    ----------
    threshold : float
        beta, in degrees: the two nearest groups are merged while they are no further apart.
    num_vectors : int (default: 3)
        p, directions of a client's data, or of each of its classes.
    measure : {"smallest", "sum", "entrywise", "entrywise-signed"} (default: "smallest")
        The distance of two clients: the smallest principal angle of their data; the sum of the
        angles between their k-th directions; or the smallest angle between any two directions,
        without or with regard to their signs. The last is the authors' code.
    per_class : bool (default: False)
        Whether directions are those of each class that a client has, as in the authors' code, or of
        all its data. Targets must be classes then.
    linkage : {"average", "weighted", "single", "complete"} (default: "average")
        The distance of two groups. "weighted" is what the authors' code has for "average".
    **base
        The parameters of `ClusteredStrategy`.

    Notes
    -----
    What leaves a client beside its model: p directions in the space of its inputs, which are
    weighted sums of its samples. See docs/methods/pacfl.md.

    A cluster's model is the mean over its participants, weighted by their examples. Clusters are
    fixed. A client that joins in mid-run is grouped with all others anew and comes into the cluster
    of most of its group, or into one of its own, which starts from the initial model.
    """

    method: ClassVar = "PACFL"
    paper: ClassVar = "Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, AAAI 2023"
    upload = Upload("statistic")  # directions of the data, before round 1

    threshold: Positive = field(kw_only=False)
    num_vectors: Count = 3
    measure: Measure = "smallest"
    per_class: bool = False
    linkage: Linkage = "average"

    def init_state(self, arrays: Arrays) -> ClusteredState:
        """Start with the initial model; the clusters come with the clients' directions."""
        return ClusteredState(DataClusters(arrays, self._groups))

    def _groups(self, bases: Sequence[Basis]) -> Labels:
        merges, heights = tree(proximity(bases, self.measure), self.linkage)
        return cut(merges, len(bases) - int((heights <= self.threshold).sum()))

    def handshake(self, client_ids: Sequence[int]) -> Handshake[PACFLQuestion]:
        """Ask for the directions of the clients' inputs."""
        question = PACFLQuestion({}, self.num_vectors, self.per_class)
        spec: Spec = {BASIS: ((-1, -1), np.dtype(np.float64))}
        return Handshake(dict.fromkeys(client_ids, question), spec, self._other_spaces)

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the client's basis; raise ValueError if a new client has other inputs."""
        if reply is None:
            return {}
        basis = reply.arrays[BASIS]
        for known in self.state.clusters.bases.values():
            if reason := complaint(client_id, basis, len(known)):
                raise ValueError(reason)
        return {BASIS: basis}

    def _other_spaces(self, replies: Mapping[int, Reply]) -> dict[int, str]:
        """Return which directions are not in the space of most clients' inputs, and why."""
        bases = {client: reply.arrays[BASIS] for client, reply in replies.items()}
        ((features, _),) = Counter(map(len, bases.values())).most_common(1)
        found = {client: complaint(client, basis, features) for client, basis in bases.items()}
        return {client: reason for client, reason in found.items() if reason}

    def angles(self) -> NDArray[np.float64]:
        """Return A_ij in degrees, in the order of `client_ids`: what `threshold` is chosen by.

        Returns
        -------
        ndarray of shape (m, m)
        """
        self._need_state()
        bases = self.state.clusters.bases
        return proximity([bases[client] for client in self.client_ids], self.measure)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set every cluster's model to the mean of its participants', weighted by n_i."""
        clusters: DataClusters = self.state.clusters
        for cluster, own in clusters.split(replies).items():
            clusters.average(cluster, own, "size")
