"""Groupings of clients under trial: a model for every group, and clients that change groups.

Not in FPFC's paper: docs/methods/fpfc.md, "Without a lambda".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grouping import Labels, group_means, numbered

OPTIONS = 8
"""Groups of a grouping that a client chooses among, its present one and the nearest: a bound on
what is sent where there are many groups."""


class _Choice(NamedTuple):
    """Of every grouping that is open to change, what does not depend on the client."""

    nearest: list[NDArray[np.intp]]
    """Of every group, shape (L_k, OPTIONS or fewer)."""
    sums: list[NDArray[np.float64]]
    """Of the members' uploads, shape (L_k, d), and how many they are."""
    counts: list[NDArray[np.int64]]


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
    uploads : dict of int to ndarray of shape (K, d)
        What clients made of their groups' models last, as long as they choose among groups.
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
        self.uploads: dict[int, NDArray[Any]] = {}
        self._cached: _Choice | None = None

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

    @property
    def open_to_change(self) -> range:
        """The groupings in which clients may change groups: all but "one" and "alone"."""
        return range(1, len(self.models) - 1)

    def options(self, client: int) -> list[tuple[int, int]]:
        """Return the groups that a client chooses among, as pairs of grouping and group.

        In every grouping its own comes first, then the `OPTIONS` - 1 whose models are nearest to
        that of its own.
        """
        labels = self.labels[client]
        return [
            (k, int(label))
            for k, nearest in zip(self.open_to_change, self._choice.nearest, strict=True)
            for label in nearest[labels[k]]
        ]

    def models_without(self, client: int) -> list[NDArray[Any]]:
        """Return the models of its `options`, none of which the client has had a part in.

        That of its own group is the mean of the others' uploads: its own upload would speak for
        staying. Where nobody else has one, it is the group's model as it is.
        """
        labels, found = self.labels[client], []
        for k, label in self.options(client):
            model: NDArray[Any] = self.models[k][label]
            sums, counts = self._choice.sums[k - 1], self._choice.counts[k - 1]
            if label == labels[k] and client in self.uploads and counts[label] > 1:
                others = sums[label] - self.uploads[client][k]
                model = (others / (counts[label] - 1)).astype(model.dtype)
            found.append(model)
        return found

    @property
    def _choice(self) -> _Choice:
        if self._cached is None:
            tables = _Choice([], [], [])
            for k in self.open_to_change:
                models = self.models[k].astype(np.float64)
                sums, counts = np.zeros_like(models), np.zeros(len(models), dtype=np.int64)
                for client, upload in self.uploads.items():
                    sums[self.labels[client][k]] += upload[k]
                    counts[self.labels[client][k]] += 1
                square = (models**2).sum(axis=1)
                distances = square[:, None] + square - 2 * models @ models.T
                np.fill_diagonal(distances, -np.inf)
                tables.nearest.append(np.argsort(distances, axis=1, kind="stable")[:, :OPTIONS])
                tables.sums.append(sums)
                tables.counts.append(counts)
            self._cached = tables
        return self._cached

    def join(
        self, losses: Mapping[int, NDArray[np.float64]], vectors: Mapping[int, NDArray[Any]]
    ) -> int:
        """Move every client to the group whose model has the least loss, and begin anew.

        Groupings that have become the same are one from then on. All models are set back to their
        members' mean: the new members chose the model that had come furthest, and its lead over
        those of other groupings would count as theirs.

        Parameters
        ----------
        losses : mapping of int to ndarray
            By client, at the models of its `options`; of equal ones the first counts. NaN is never
            the least, and a client with nothing else stays.
        vectors : mapping of int to ndarray of shape (d,)
            Those that the groups set out from, by client.

        Returns
        -------
        int
            The number of clients that changed in one grouping at least.
        """
        chosen = {}
        for client, of_options in losses.items():
            options = np.array(self.options(client))
            labels = self.labels[client].copy()
            for k in self.open_to_change:
                here = options[:, 0] == k
                if not np.isnan(of_options[here]).all():
                    labels[k] = options[here][np.nanargmin(of_options[here]), 1]
            chosen[client] = labels
        moved = sum(not np.array_equal(new, self.labels[c]) for c, new in chosen.items())
        self.labels |= chosen
        first: dict[Labels, int] = {}
        for k, column in enumerate(zip(*self.labels.values(), strict=True)):
            first.setdefault(numbered(column), k)
        kept = list(first.values())
        self.labels = {client: old[kept] for client, old in self.labels.items()}
        self.models = [self.models[k] for k in kept]
        self.refit({c: np.broadcast_to(v, (len(self), *v.shape)) for c, v in vectors.items()})
        self.uploads, self._cached = {}, None
        return moved

    def remove(self, client: int) -> None:
        """Forget a client; a group that loses its last one keeps its model."""
        self.labels.pop(client, None)
        self.uploads.pop(client, None)
        self._cached = None
