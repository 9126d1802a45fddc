"""What the methods share that train one model for every cluster of clients: IFCA, CFL, PACFL.

They differ in how a client comes into its cluster. Its members train the cluster's model as FedAvg
trains its one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from ...maths.blocks import Arrays, any_length, check_saved, prefixed, spec_of
from ...maths.checks import Count, in_range
from ...maths.clienttable import ByClient, Row
from ...maths.grouping import numbered
from ...maths.schedules import StepSize
from ...runtime.algorithm import OnClient
from ...runtime.messages.records import ClientInstruction, Reply, to_array_record
from ...runtime.messages.schema import Instruction, Instructions
from .base import Weights, participants_mean
from .models import OneMessageStrategy

MODELS = "models/"
"""Before the names of the models' arrays in a saved state."""


@dataclass(frozen=True)
class ClusterInstruction(Instruction):
    """What a client gets: the model of its cluster."""

    model: Arrays
    lr: float
    local_epochs: int


class Clusters(ByClient):
    """The clusters' models, and which cluster every client is in.

    Parameters
    ----------
    models : sequence of Arrays
        Those at the start. A client comes into the first cluster, until the method moves it.

    Attributes
    ----------
    models : list of Arrays
    of : dict of int to int
        The cluster of every client of the run.
    pending : dict of int to int
        That of clients that are joining, where the method knows it before they train.
    """

    self_checked: ClassVar[bool] = True

    def __init__(self, models: Sequence[Arrays]) -> None:
        self.models = list(models)
        self.of: dict[int, int] = {}
        self.pending: dict[int, int] = {}

    def model_of(self, client: int) -> Arrays:
        """Return the model of a client's cluster; the first where it has none yet."""
        return self.models[self.of.get(client, self.pending.get(client, 0))]

    def split(self, replies: Mapping[int, Reply]) -> dict[int, dict[int, Reply]]:
        """Return the replies of each cluster's clients, by cluster."""
        found: dict[int, dict[int, Reply]] = {}
        for client, reply in replies.items():
            found.setdefault(self.of[client], {})[client] = reply
        return dict(sorted(found.items()))

    def average(self, cluster: int, replies: Mapping[int, Reply], weights: Weights) -> None:
        """Set a cluster's model to the mean of some uploads."""
        self.models[cluster] = participants_mean(self.models[cluster], replies, weights)

    # ------------------------------------------------------------------------------------------
    # Clients that come and go; saving
    # ------------------------------------------------------------------------------------------

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Take clients into the first cluster."""
        self.of |= dict.fromkeys(rows, 0)

    def add_pending(self, rows: Mapping[int, Row]) -> None:
        """Nothing: a client that joins has no cluster before its first upload."""

    def remove(self, clients: Iterable[int], server_round: int = 0) -> None:
        """Let clients go; their cluster keeps its model."""
        for client in clients:
            self.of.pop(client, None)

    def is_finite(self) -> bool:
        """Return whether all models are finite."""
        return all(in_range(array) for model in self.models for array in model.values())

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all variables; the models of one name in one array, a row each."""
        names = self.models[0]
        models = {name: np.stack([model[name] for model in self.models]) for name in names}
        return {
            "ids": np.array(list(self.of), dtype=np.uint64),
            "of": np.array(list(self.of.values()), dtype=np.int64),
            **prefixed(MODELS, models),
        }

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned, for any number of clusters.

        Raises
        ------
        ValueError
            If an array is missing, or is not of this model.
        """
        check_saved(arrays, any_length(spec_of(self.state_arrays())))
        self.of = dict(zip(arrays["ids"].tolist(), arrays["of"].tolist(), strict=True))
        names = list(self.models[0])
        rows = zip(*(arrays[MODELS + name] for name in names), strict=True)
        self.models = [dict(zip(names, map(np.array, row), strict=True)) for row in rows]


@dataclass
class ClusteredState:
    """The clusters."""

    clusters: Clusters


class ClusteredStrategy(OneMessageStrategy):
    """Base of the methods with one model for every cluster.

    Parameters
    ----------
    lr : float or callable (default: 0.1)
        The clients' step size; a callable, such as `StepDecay`, gets the round (from 1).
    local_epochs : int (default: 1)
        Local epochs: full-gradient steps with GD, passes over the data with SGD.
    **base
        The parameters of `StatefulStrategy`.
    """

    kinds: ClassVar = {"cluster": "cluster model"}
    message_type: ClassVar[type[Instruction]] = ClusterInstruction

    lr: StepSize = 0.1
    local_epochs: Count = 1

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return the model of a client's cluster."""
        return {"model": self.state.clusters.model_of(client_id)}

    def evaluate_instructions(self, server_round: int, client_ids: Sequence[int]) -> Instructions:
        """Send every client the model of its cluster."""
        model_of = self.state.clusters.model_of
        return {client: ClientInstruction({"cluster": model_of(client)}) for client in client_ids}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return the model of a client's cluster."""
        model = self.state.clusters.models[self._cluster_of()[client_id]]
        return {name: array.copy() for name, array in model.items()}

    def clusters(self) -> NDArray[np.int64]:
        """Return the cluster of every client, in the order of `client_ids`.

        Clusters are numbered by their first client.

        Returns
        -------
        ndarray of shape (m,)
        """
        self._need_state()
        return np.array(numbered(list(self._cluster_of().values())), dtype=np.int64)

    def cluster_arrays(self) -> list[ArrayRecord]:
        """Return the model of every cluster that has a client, by its number in `clusters`."""
        self._need_state()
        complete, models = self.run.layout.complete, self.state.clusters.models
        used = dict.fromkeys(self._cluster_of().values())
        return [to_array_record(complete(models[cluster])) for cluster in used]

    def _cluster_of(self) -> dict[int, int]:
        """Return the cluster of every client, in the order of their ids."""
        of = self.state.clusters.of
        return {client: of[client] for client in self.membership.ids}
