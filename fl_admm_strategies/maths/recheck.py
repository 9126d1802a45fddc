"""Groups that were found, looked at again: what is tried in their place, and what is kept of it.

Not in FPFC's paper: docs/methods/fpfc-notes.md, "The re-check".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .grouping import cut, numbered, ward_tree, winsorised

NEAREST = 3  # groups that a client may join
SPLIT, SPLIT_OF_A_HALF, MERGE = 3.0, 4.0, 2.0  # in standard errors
CONFIRMED = 0.2  # in a client's standard errors, on average: what a split gains on held-out samples
AGAINST = -1.0  # what a half or a group may say against it
GAINS = 2.0  # in standard errors: below it a half does not clearly gain by a split
MATTERS = 0.03
"""The share of its loss that half of a group must gain by a split where the other half does not
clearly gain. What a client of few samples uploads is noise to those of many: all of them are a
little better without it, which is clear and no reason, and what it loses or gains itself is noise.
(Nor does a half gain where its median loses: a false answer counts by its sign alone.)"""
AT_ALL = 0.005
"""The share where both halves clearly gain. Those of a large group of clients with many samples
gain so little, too, however clear it is, as they are not of the same samples."""
LEAVE, LEAVE_ALONE = 1.5, 3.0  # for another group; where the client is alone in its own
VAGUE = 10.0  # times the median, of an even number the smaller one
_TINY = np.finfo(float).tiny

STAY, HALF, UNITED, HELD_OUT, JOIN = -1, 0, 1, 2, 3
"""What a model stands for: the client's group as it is; the half of it that the client is in; it
and the nearest group as one; and, from `JOIN` on, another group, ``JOIN + label``. `HELD_OUT` is
the half again, by the samples that the client has held out. Clients with similar samples by chance
are in one half, and the more clients a group has, the clearer is what they gain by that."""

Vectors = Mapping[int, NDArray[Any]]


class Recheck:
    """Splits, merges and joins of present groups, with models to judge them by.

    No client judges a model that it has had a part in: its own is left out of every mean. Only
    where the client is alone in its group, or in its half, its model counts on both sides of the
    comparison, and is judged by its held-out samples.

    Parameters
    ----------
    labels : ndarray of int, shape (m,)
        The present groups, 0..L-1, of the clients in the order of `local`.
    models : ndarray of shape (L, d)
        Their models.
    local : mapping of int to ndarray of shape (d,)
        By client, where it came to from its group's model. The directions make the halves (Ward's
        tree), and the means their models.
    center : ndarray of shape (d,)
    probes : mapping of int to ndarray of shape (d,)
        Where they came to from this one model for all. Its means are the models of groups that are
        united or joined: a group's own model has seen its members, which would speak for staying.
    examples : ndarray of shape (m,)
        By which clients count in every mean, as in the models that groups train: in plain means
        those of a few samples are noise that a client of many takes for another kind.

    Attributes
    ----------
    is_alone, is_lone : ndarray of bool, shape (m,)
        Whether a client is alone in its group; in its half.
    """

    def __init__(
        self,
        labels: NDArray[np.int64],
        models: NDArray[Any],
        local: Vectors,
        center: NDArray[Any],
        probes: Vectors,
        examples: NDArray[np.float64],
    ) -> None:
        self.labels, self._row = labels, {client: row for row, client in enumerate(local)}
        self._center, self._examples = center, np.maximum(examples, 1.0)
        self._local, self._probes = (
            np.stack([by[client] for client in local]).astype(np.float64) for by in (local, probes)
        )
        directions, self._sizes = _unit(self._local - models[labels]), np.bincount(labels)
        halves = np.zeros_like(labels)
        for group in np.flatnonzero(self._sizes > 1):
            members = labels == group
            halves[members] = cut(ward_tree(directions[members])[0], 2)
        self.cells = np.array(numbered(2 * labels + halves))
        self.is_alone = self._sizes[labels] == 1
        self.is_lone = np.bincount(self.cells)[self.cells] == 1

        self._sums = np.zeros(models.shape)
        np.add.at(self._sums, labels, self._examples[:, None] * self._probes)
        self._totals = np.bincount(labels, self._examples)
        # Cosines: distances of models grow with the noise of those that few clients made.
        went = _unit(self._sums / self._totals[:, None] - center)
        likeness = went @ went.T
        np.fill_diagonal(likeness, -np.inf)
        order = np.argsort(-likeness, axis=1, kind="stable")
        self._near = order[:, : min(NEAREST, len(order) - 1)]
        mates, groups = order[:, 0], np.arange(len(order))
        self.united = np.where(mates[mates] == groups, np.minimum(mates, groups), groups)

    def ballot(self, client: int) -> list[tuple[int, NDArray[Any]]]:
        """Return the models that a client compares, each with the last `STAY` before it."""
        row = self._row[client]
        group, probe, own = self.labels[row], self._probes[row], self._examples[row]
        size = self._sizes[group]

        def without(total: NDArray[Any], count: float) -> NDArray[Any]:
            return total / count if size == 1 else (total - own * probe) / (count - own)

        found: list[tuple[int, NDArray[Any]]] = []
        if size > 1:
            for choice, parts in ((STAY, self.labels), (HALF, self.cells)):
                members = parts == parts[row]
                members[row] = self.is_lone[row]
                model = np.average(self._local[members], axis=0, weights=self._examples[members])
                found.append((choice, model))
        stay, others = without(self._sums[group], self._totals[group]), []
        united = self.united == self.united[group]
        if united.sum() > 1:
            both = self._sums[united].sum(axis=0)
            others.append((UNITED, without(both, self._totals[united].sum())))
        for other in self._near[group]:
            total, count = self._sums[other], self._totals[other]
            # A model costs bytes: only a client that went as another group did is asked about it.
            if size == 1 or self._likeness(probe, total / count) > self._likeness(probe, stay):
                model = (total + own * probe) / (count + own) if size == 1 else total / count
                others.append((JOIN + int(other), model))
        return found + ([(STAY, stay), *others] if others else [])

    def _likeness(self, probe: NDArray[np.float64], model: NDArray[np.float64]) -> float:
        """Return the cosine of two directions from the center."""
        return float(_unit(probe - self._center) @ _unit(model - self._center))

    def decide(
        self, answers: NDArray[np.float64], losses: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return the groups from now on.

        Parameters
        ----------
        answers : ndarray of shape (2, m, 3 + L)
            By how much a choice lowers the client's loss, and the standard error; NaN: unknown.
        losses : ndarray of shape (m,)
            The client's loss by its group as it is; NaN: unknown.

        Returns
        -------
        ndarray of int, shape (m,)
            A group that is none of the present ones has a number from L on.
        """
        count, labels, cells = len(self._sizes), self.labels, self.cells
        gained = np.where(np.isfinite(answers[1, :, HALF]), answers[0, :, HALF], np.nan)
        said, answers = answers, answers.copy()
        # One client is not to decide for others; a lone half, which knows little, only objects.
        heard = ~self.is_lone
        objects = self.is_lone & (np.bincount(labels, heard, count)[labels] > 0)
        answers[0, objects, HALF] = np.minimum(answers[0, objects, HALF], 0.0)
        answers[:, objects, HELD_OUT] = np.nan
        for choice, among in ((HALF, labels), (HELD_OUT, labels), (UNITED, self.united[labels])):
            for group in np.unique(among):
                _silence_vague(answers[:, :, choice], among == group)
                rows = (among == group) & ~(self.is_lone & (choice != UNITED))
                gains, errors = answers[:, rows, choice]
                if np.isfinite(gains + errors).any():
                    least = np.nanmedian(errors) / 2
                    answers[:, rows, choice] = winsorised(gains), np.maximum(errors, least)
        said = np.where(np.isfinite(answers), said, np.nan)

        changes = np.zeros(count, dtype=np.bool_)
        for pair in np.unique(self.united):
            parts = [labels == group for group in np.flatnonzero(self.united == pair)]
            if len(parts) == 2 and _agree(answers, parts, UNITED, MERGE):
                changes |= self.united == pair
        new = np.where(changes[labels], count + self.united[labels], labels)

        clearly = np.where(self.is_alone, LEAVE_ALONE, LEAVE)[:, None] * answers[1]
        gains = np.where(answers[0] > clearly, answers[0], 0.0)[:, JOIN:]
        best = gains.argmax(axis=1)
        leaves = (gains.max(axis=1) > 0) & ~changes[labels]
        for group in np.flatnonzero(~changes):
            members = labels == group
            halves = [members & (cells == cell) for cell in np.unique(cells[members])]
            is_clear = any(_score(answers, half, HALF) > SPLIT_OF_A_HALF for half in halves)
            if len(halves) == 2 and (is_clear or _agree(answers, halves, HALF, SPLIT)):
                known = np.isfinite(answers[:, members, HELD_OUT]).all(axis=0)
                least = CONFIRMED * np.sqrt(known.sum())
                if known.any() and _score(answers, members, HELD_OUT) <= least:
                    continue
                gain = [
                    half
                    for half in halves
                    if _middle(gained[half]) > 0 and _score(said, half, HALF) > GAINS
                ]
                worth = gained - (AT_ALL if len(gain) == 2 else MATTERS) * np.abs(losses)
                if all(_middle(worth[half]) <= 0 for half in gain):
                    continue
                changes[group] = True
                new[members] = 2 * count + cells[members]
                leaves &= ~members | self.is_lone  # the others would leave what spoils the group
        joins = leaves & ~changes[best]
        new[joins] = best[joins]
        return new


def _middle(values: NDArray[np.float64]) -> float:
    """Return the median of those that are finite; 0 where none is."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else 0.0


def _silence_vague(answers: NDArray[np.float64], rows: NDArray[np.bool_]) -> None:
    """Drop the answers of some clients with an error of `VAGUE` times the others'.

    In the sum of all a large error could veto anything.
    """
    known = rows & np.isfinite(answers[1])
    if known.any():
        middle = np.quantile(answers[1, known], 0.5, method="lower")
        answers[:, known & (answers[1] > VAGUE * max(middle, _TINY))] = np.nan


def _agree(
    answers: NDArray[np.float64], parts: list[NDArray[np.bool_]], choice: int, least: float
) -> bool:
    """Return whether a choice is clearly better for two parts as one, and bad for neither."""
    return _score(answers, parts[0] | parts[1], choice) > least and all(
        _score(answers, part, choice) >= AGAINST for part in parts
    )


def _score(answers: NDArray[np.float64], rows: NDArray[np.bool_], choice: int) -> float:
    """Return the sum of some clients' gains, in standard errors; 0 without an answer."""
    gains, errors = answers[:, rows, choice]
    known = np.isfinite(gains) & np.isfinite(errors)
    scale = float(np.linalg.norm(errors[known]))
    return float(gains[known].sum()) / scale if scale > 0 else 0.0


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    units: NDArray[np.float64] = vectors / np.maximum(lengths, _TINY)
    return units
