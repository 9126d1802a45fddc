"""Groups that were found, looked at again: what is tried in their place, and what is kept of it.

Not in FPFC's paper: docs/methods/fpfc-notes.md, "The re-check".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grouping import cut, numbered, ward_tree

NEAREST = 3  # groups that a client may join
SPLIT, SPLIT_OF_A_HALF, MERGE = 3.0, 4.0, 2.0  # in standard errors
AGAINST = -1.0  # what a half or a group may say against it
MADS = 5.0

STAY, HALF, UNITED, JOIN = -1, 0, 1, 2
"""What a model stands for: the client's group as it is; the half of it that the client is in; it
and the nearest group as one; and, from `JOIN` on, another group, ``JOIN + label``."""


class Tried(NamedTuple):
    """A model that a client compares: what it stands for, and on which samples it is judged."""

    choice: int
    on_held_out: bool
    model: NDArray[Any]


class Recheck:
    """Splits, merges and joins of present groups, with models to judge them by.

    No client judges a model that it has had a part in: its own is left out of every mean. Only
    where nobody else is left (it is alone in its group, or in its half) it counts on both sides of
    the comparison, and is asked for its held-out samples.

    Parameters
    ----------
    labels : ndarray of int, shape (m,)
        The present groups, 0..L-1.
    models : ndarray of shape (L, d)
        Their models.
    local : ndarray of shape (m, d)
        Where clients came to from their group's model. Its directions make the halves (Ward's
        tree), and its means their models.
    center : ndarray of shape (d,)
    probes : ndarray of shape (m, d)
        Where they came to from one model for all. Its means are the models of groups that are
        united or joined: a group's own model has seen its members, which would speak for staying.
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        models: NDArray[Any],
        local: NDArray[Any],
        center: NDArray[Any],
        probes: NDArray[Any],
    ) -> None:
        self.labels, self._dtype = labels, local.dtype
        local, probes, models = (v.astype(np.float64) for v in (local, probes, models))
        directions, sizes = _unit(local - models[labels]), np.bincount(labels)
        halves = np.zeros_like(labels)
        for group in np.flatnonzero(sizes > 1):
            members = labels == group
            halves[members] = cut(ward_tree(directions[members])[0], 2)
        self.cells = np.array(numbered(2 * labels + halves))
        self.is_alone = sizes[labels] == 1
        self.is_lone_half = np.bincount(self.cells)[self.cells] == 1

        square = (models**2).sum(axis=1)
        distances = square[:, None] + square - 2 * models @ models.T
        np.fill_diagonal(distances, np.inf)
        order = np.argsort(distances, axis=1, kind="stable")
        self.nearest, mates = order[:, : min(NEAREST, len(sizes) - 1)], order[:, 0]
        groups = np.arange(len(sizes))
        is_mutual = (mates[mates] == groups) & (mates != groups)
        self.united = np.where(is_mutual, np.minimum(mates, groups), groups)

        self._of_group = _mean_of_others(local, labels, self.is_lone_half)
        self._of_half = _mean_of_others(local, self.cells, self.is_lone_half)
        self._before = _mean_of_others(probes, labels, self.is_alone)
        self._united = _mean_of_others(probes, self.united[labels], self.is_alone)
        self._sums, self._sizes, self._probes = _sums(probes, labels), sizes, probes
        # Others cost a model each, so only who went as another group does is asked about them.
        went = _unit(probes - center)
        of_others = _unit(self._sums / sizes[:, None] - center)
        likeness = np.take_along_axis(went @ of_others.T, self.nearest[labels], axis=1)
        own = (went * _unit(self._before - center)).sum(axis=1)
        self.doubts = self.is_alone | (likeness.max(axis=1, initial=-np.inf) > own)

    def ballot(self, row: int) -> list[Tried]:
        """Return the models that a client compares, each with the last `STAY` before it."""
        group, alone = self.labels[row], bool(self.is_alone[row])
        found, others = [], []
        if not alone:
            models = {STAY: self._of_group[row], HALF: self._of_half[row]}
            found = [Tried(c, bool(self.is_lone_half[row]), model) for c, model in models.items()]
        if (self.united == self.united[group]).sum() > 1:
            others.append((UNITED, self._united[row]))
        for other in self.nearest[group] if self.doubts[row] else ():
            total = self._sums[other] + alone * self._probes[row]
            others.append((JOIN + int(other), total / (self._sizes[other] + alone)))
        if others:
            others.insert(0, (STAY, self._before[row]))
        found += [Tried(choice, alone, model) for choice, model in others]
        return [tried._replace(model=tried.model.astype(self._dtype)) for tried in found]

    def decide(self, answers: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the groups from now on.

        Parameters
        ----------
        answers : ndarray of shape (2, m, 2 + L)
            By how much a choice lowers the client's loss, and the standard error; NaN: unknown.

        Returns
        -------
        ndarray of int, shape (m,)
            A group that is none of the present ones has a number from L on.
        """
        count, labels, cells = len(self._sizes), self.labels, self.cells
        answers = answers.copy()
        together = ~self.is_lone_half  # a lone half speaks of itself only
        answers[0, together, HALF] = winsorised(answers[0, together, HALF])
        answers[0, :, UNITED] = winsorised(answers[0, :, UNITED])

        changes = np.zeros(count, dtype=np.bool_)
        for pair in np.unique(self.united):
            parts = [labels == group for group in np.flatnonzero(self.united == pair)]
            if len(parts) == 2 and _agree(answers, parts, UNITED, MERGE):
                changes |= self.united == pair
        new = np.where(changes[labels], count + self.united[labels], labels)

        gains = np.where(answers[0] > answers[1], answers[0], 0.0)[:, JOIN:]
        best = gains.argmax(axis=1)
        leaves = (gains.max(axis=1) > 0) & ~changes[labels]
        for group in np.flatnonzero(~changes):
            members = (labels == group) & ~leaves
            halves = [members & (cells == cell) for cell in np.unique(cells[members])]
            is_clear = any(_score(answers, half, HALF) > SPLIT_OF_A_HALF for half in halves)
            if len(halves) == 2 and (is_clear or _agree(answers, halves, HALF, SPLIT)):
                changes[group] = True
                new[labels == group] = 2 * count + cells[labels == group]
        joins = leaves & ~changes[best]
        new[joins] = best[joins]
        return new


def winsorised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values no further than `MADS` median absolute deviations from their median."""
    if np.isnan(values).all():
        return values
    median = np.nanmedian(values)
    reach = MADS * np.nanmedian(np.abs(values - median))
    return np.clip(values, median - reach, median + reach)


def _agree(
    answers: NDArray[np.float64], parts: list[NDArray[np.bool_]], choice: int, least: float
) -> bool:
    """Return whether a choice is clearly better for two parts as one, and bad for neither."""
    return _score(answers, parts[0] | parts[1], choice) > least and all(
        _score(answers, part, choice) >= AGAINST for part in parts
    )


def _score(answers: NDArray[np.float64], rows: NDArray[np.bool_], choice: int) -> float:
    """Return the sum of some clients' gains, in standard errors; 0 where nobody has said."""
    gains, errors = answers[:, rows, choice]
    known = np.isfinite(gains) & np.isfinite(errors)
    scale = float(np.linalg.norm(errors[known]))
    return float(gains[known].sum()) / scale if scale > 0 else 0.0


def _sums(vectors: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    sums = np.zeros((labels.max() + 1, vectors.shape[1]))
    np.add.at(sums, labels, vectors)
    return sums


def _mean_of_others(
    vectors: NDArray[np.float64], labels: NDArray[np.int64], with_own: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return for every client the mean of its group without it, or with it, shape (m, d)."""
    left_out = ~with_own
    counts = np.bincount(labels)[labels] - left_out
    others = _sums(vectors, labels)[labels] - left_out[:, None] * vectors
    means: NDArray[np.float64] = others / counts[:, None]
    return means


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: NDArray[np.float64] = vectors / np.maximum(lengths, np.finfo(float).tiny)
    return units
