"""Groupings of clients under trial, with a model for every group.

Not in FPFC's paper: docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .grouping import Labels, group_means


class Candidates:
    """K groupings of the same clients, the coarsest first, with a model for every group.

    Parameters
    ----------
    clients : sequence of int
    groupings : sequence of Labels
        Of these clients; the first is "one group", the last "everybody alone".
    vectors : ndarray of shape (m, d)
        Of every client; a group sets out from its members' mean.

    Attributes
    ----------
    labels : dict of int to ndarray of shape (K,)
        The group of every client in every grouping.
    models : list of ndarray of shape (L_k, d)
        The groups' models.
    """

    def __init__(
        self,
        clients: Sequence[int] = (),
        groupings: Sequence[Labels] = (),
        vectors: NDArray[Any] | None = None,
    ) -> None:
        columns = np.array(groupings, dtype=np.int64).T
        self.labels: dict[int, NDArray[np.int64]] = dict(zip(clients, columns, strict=True))
        self.models: list[NDArray[Any]] = (
            [] if vectors is None else [group_means(vectors, labels) for labels in groupings]
        )

    def __len__(self) -> int:
        return len(self.models)

    def models_of(self, client: int) -> list[NDArray[Any]]:
        """Return the models of a client's groups, one for each grouping."""
        return [
            models[label] for models, label in zip(self.models, self.labels[client], strict=True)
        ]

    def refit(self, trained: Mapping[int, NDArray[Any]]) -> None:
        """Set every group's model to the mean of what its clients made of it, all alike as in (1).

        A group of which nobody replied keeps its model.

        Parameters
        ----------
        trained : mapping of int to ndarray of shape (K, d)
            By client.
        """
        for k, models in enumerate(self.models):
            members = defaultdict(list)
            for client, trained_models in trained.items():
                members[self.labels[client][k]].append(trained_models[k])
            for label, vectors in members.items():
                models[label] = np.mean(vectors, axis=0)

    def voters(self, clients: Sequence[int], most: int) -> list[int]:
        """Return some of these clients, which speak for all: in turn one of every group.

        So a group that is one client of a thousand is heard. Groups are those of the finest
        grouping that has no more than the clients that are wanted.

        Parameters
        ----------
        clients : sequence of int
            In the order in which those of a group come in turn.
        most : int
        """
        groups = np.stack([self.labels[client] for client in clients])
        finest = [k for k, labels in enumerate(groups.T) if len(np.unique(labels)) <= most][-1]
        taken: Counter[int] = Counter()
        turns = {}
        for client, label in zip(clients, groups[:, finest].tolist(), strict=True):
            turns[client] = taken[label]
            taken[label] += 1
        return sorted(clients, key=turns.__getitem__)[:most]

    def keep(self, kept: Sequence[int]) -> None:
        """Go on with these groupings only."""
        self.labels = {client: labels[kept] for client, labels in self.labels.items()}
        self.models = [self.models[k] for k in kept]
