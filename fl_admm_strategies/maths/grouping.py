"""Groups of clients: hierarchical clustering, and what FPFC without a lambda makes of it.

The latter is not in FPFC's paper: docs/methods/fpfc.md, "Without a lambda", has the rule and its
evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Labels = tuple[int, ...]
"""The group of every client, numbered from 0 in the order of the groups' first clients."""

Linkage = Literal["single", "complete", "average", "weighted"]
"""What the distance of two groups is; see `tree`."""

CELL = 4.0
"""The most that a cell counts in a comparison, in standard errors."""
LOSS, MINORITY = 3.0, 0.1
"""A finer grouping is out if cells of more than this share of its clients lose so clearly."""
MOVES = 10
MAD_TO_SD = 1.4826
_NOT_FINITE = 1e100  # a loss worse than any, whose square is finite

_Distances = NDArray[np.float64]
_Rule = Callable[[_Distances, _Distances, float, float, float, _Distances], Any]
"""Returns a merged group's distances: of those of its parts, theirs, and the sizes of all."""


def numbered(labels: ArrayLike) -> Labels:
    """Return labels with the groups numbered in the order of their first clients."""
    rank: dict[int, int] = {}
    return tuple(rank.setdefault(int(label), len(rank)) for label in np.asarray(labels))


def ward_tree(points: NDArray[np.floating]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return Ward's tree of points, as `scipy.cluster.hierarchy.linkage` does.

    The distance of two groups is ``sqrt(2 |A| |B| / (|A| + |B|)) ||mean A - mean B||``: half its
    square is what their merging adds to the sum of squared distances from the groups' means. The
    two nearest are merged, again and again.

    Parameters
    ----------
    points : ndarray of shape (m, d)

    Returns
    -------
    merges, heights
        As of `tree`.
    """
    wide = points.astype(np.float64)
    gram = wide @ wide.T
    norms = np.diag(gram)
    square = np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)
    merges, heights = _merged(square, _ward)
    return merges, np.maximum.accumulate(np.sqrt(heights))


def tree(
    distances: NDArray[np.float64], linkage: Linkage
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the hierarchical clustering of clients with these distances, as scipy's `linkage`.

    Parameters
    ----------
    distances : ndarray of shape (m, m)
        Symmetric; the diagonal is not read.
    linkage : {"single", "complete", "average", "weighted"}
        The distance of two groups: the smallest of their pairs, the largest, their mean (UPGMA), or
        the mean of the distances of the two parts that a group was merged of (WPGMA).

    Returns
    -------
    merges : ndarray of int, shape (m - 1, 2)
        The two groups of every merge. 0..m-1 are the clients, m + t what merge t made.
    heights : ndarray of shape (m - 1,)
        Their distances, ascending.
    """
    return _merged(distances.astype(np.float64), _LINKAGES[linkage])


def _ward(a: _Distances, b: _Distances, a_b: float, n_a: float, n_b: float, n: _Distances) -> Any:
    new = (n_a + n) * a + (n_b + n) * b - n * a_b
    return new / (n_a + n_b + n)


_LINKAGES: dict[str, _Rule] = {
    "single": lambda a, b, a_b, n_a, n_b, n: np.minimum(a, b),
    "complete": lambda a, b, a_b, n_a, n_b, n: np.maximum(a, b),
    "average": lambda a, b, a_b, n_a, n_b, n: (n_a * a + n_b * b) / (n_a + n_b),
    "weighted": lambda a, b, a_b, n_a, n_b, n: (a + b) / 2,
}


def _merged(
    distances: NDArray[np.float64], rule: _Rule
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Merge the two nearest, again and again, by Lance and Williams' update; overwrites."""
    m = len(distances)
    # A group lives in the row of one of its members.
    np.fill_diagonal(distances, np.inf)
    size, name = np.ones(m), np.arange(m)
    merges, heights = np.empty((m - 1, 2), dtype=np.intp), np.empty(m - 1)
    for step in range(m - 1):
        a, b = sorted(divmod(int(distances.argmin()), m))
        merges[step] = sorted((name[a], name[b]))
        heights[step] = distances[a, b]
        new = rule(distances[a], distances[b], distances[a, b], size[a], size[b], size)
        distances[a] = distances[:, a] = new
        distances[b] = distances[:, b] = np.inf
        distances[a, a] = np.inf
        size[a] += size[b]
        name[a] = m + step
    return merges, heights


def cut(merges: NDArray[np.intp], num_groups: int) -> Labels:
    """Return the groups that a tree's merges leave when the last ``num_groups - 1`` are undone."""
    m = len(merges) + 1
    members = {point: [point] for point in range(m)}
    for step, (a, b) in enumerate(merges[: m - num_groups].tolist()):
        members[m + step] = members.pop(a) + members.pop(b)
    labels = np.empty(m, dtype=np.intp)
    for label, group in enumerate(members.values()):
        labels[group] = label
    return numbered(labels)


def settled(points: NDArray[np.floating], labels: Labels) -> Labels:
    """Return groups in which no point would lie better in another one.

    By Hartigan's rule: a point leaves a group of n for one of n' where n/(n - 1) of its squared
    distance to the mean of its own is more than n'/(n' + 1) of that to the other's, which is what
    the sum of squares about the means would gain; so large groups have no advantage. All points
    move at once, `MOVES` times at most. One that is alone stays.

    Hartigan, Wong, "Algorithm AS 136", Applied Statistics 28 (1979).

    Parameters
    ----------
    points : ndarray of shape (m, d)
    labels : Labels
    """
    wide, found = points.astype(np.float64), numbered(labels)
    for _ in range(MOVES):
        means, sizes, own = group_means(wide, found), np.bincount(found), np.array(found)
        square = (wide**2).sum(axis=1)[:, None] - 2 * wide @ means.T + (means**2).sum(axis=1)
        is_own = np.arange(len(sizes)) == own[:, None]
        square *= np.where(is_own, sizes / np.maximum(sizes - 1, 1), sizes / (sizes + 1))
        moved = numbered(np.where(sizes[own] > 1, square.argmin(axis=1), own))
        if moved == found:
            break
        found = moved
    return found


def candidate_groups(updates: NDArray[np.floating], cuts: int) -> list[Labels]:
    """Return groupings that are worth a trial, the coarsest first, each once.

    "One group" and "each client alone", and the cuts of Ward's tree of the updates' directions
    ``u_i/||u_i||`` at the largest relative jumps of its merges' heights: where the groups that are
    merged next are much further apart than the last ones were. Of these only cuts into m/2 groups
    or fewer: where hardly any clients are together, "alone" says the same, and the few pairs would
    decide the comparison of the losses. Clients that the tree has misplaced are moved (`settled`).

    Parameters
    ----------
    updates : ndarray of shape (m, d)
        How far every client went from a common model on its own.
    cuts : int
        The number of jumps.
    """
    m = len(updates)
    lengths = np.linalg.norm(updates.astype(np.float64), axis=1)
    directions = updates / np.maximum(lengths, np.finfo(float).tiny)[:, None]
    merges, heights = ward_tree(directions)
    floor = max(1e-12 * heights.max(initial=0.0), np.finfo(float).tiny)
    jumps = heights[1:] / np.maximum(heights[:-1], floor)
    counts = np.arange(m - 1, 1, -1)  # of the groups below every jump
    largest = [t for t in np.argsort(-jumps, kind="stable") if counts[t] <= m / 2][:cuts]
    parts = [settled(directions, cut(merges, int(counts[t]))) for t in largest]
    found = {*parts, (0,) * m, tuple(range(m))}
    return sorted(found, key=lambda labels: (max(labels), labels))


@dataclass(frozen=True)
class Comparison:
    """Groupings compared by the losses of their models on held-out data.

    Attributes
    ----------
    chosen : int
        The grouping with the fewest groups among those to which no finer one is preferred.
    means : ndarray of shape (K,)
        Mean loss of each over the clients whose loss is finite; NaN where there is none.
    against : ndarray of shape (K,)
        By how many standard errors the clients prefer a finer grouping, at most; 0 where none is.
    """

    chosen: int
    means: NDArray[np.float64]
    against: NDArray[np.float64]


def compare(
    losses: NDArray[np.float64],
    errors: NDArray[np.float64],
    labels: NDArray[np.int64],
    standard_errors: float,
    training: NDArray[np.float64] | None = None,
) -> Comparison:
    """Choose the fewest groups such that no finer grouping is clearly preferred.

    The one-standard-error rule of CART, with the cells' votes of `preference`. A client whose loss
    is not finite counts as one that prefers every other grouping.

    Parameters
    ----------
    losses : ndarray of shape (clients, K)
        Of every client at its group's model, under every grouping.
    errors : ndarray of shape (clients, K, K)
        The standard errors of the differences of two of them; NaN where the client does not know.
    labels : ndarray of shape (clients, K)
        Of every client, the group that it is in.
    standard_errors : float
    training : ndarray of shape (clients, K), optional
        The losses on what the clients have trained on; NaN where the client does not say.
    """
    finite = np.isfinite(losses)
    sums, counts = losses.sum(axis=0, where=finite), finite.sum(axis=0)
    means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    known = np.where(finite, losses, _NOT_FINITE)
    num_groups = [len(np.unique(column)) for column in labels.T]
    typical = np.median(known, axis=0) if len(known) else np.zeros(len(means))
    order = sorted(range(len(means)), key=lambda k: (num_groups[k], typical[k]))
    against = np.zeros(len(means))
    for place, k in enumerate(order):
        for finer in order[place + 1 :]:
            difference = known[:, k] - known[:, finer]
            fits = None if training is None else training[:, k] - training[:, finer]
            vote = preference(difference, errors[:, k, finer], labels[:, k], labels[:, finer], fits)
            against[k] = max(against[k], vote)
    chosen = next(k for k in order if against[k] <= standard_errors)
    return Comparison(chosen, means, against)


def preference(
    differences: NDArray[np.float64],
    errors: NDArray[np.float64],
    coarse: NDArray[np.int64],
    fine: NDArray[np.int64],
    training: NDArray[np.float64] | None = None,
) -> float:
    """Return by how many standard errors clients prefer a finer grouping, cell by cell.

    Cells are the groups of the finer one that are not groups of the other: a group that is one
    client of a thousand votes as one cell, where its part in the mean over the clients is nothing.
    A client's difference is divided by its own sampling error and the scatter within the cells.
    In a cell of n it then counts at most ``CELL / sqrt(n)``, so that one false report cannot
    decide, and a cell is their sum over sqrt(n), at most `CELL`. With z_C ~ N(0, 1) for clients
    without a preference, the result, the sum over the cells over the root of their number, is
    N(0, 1) as well. It is 0 where more than a tenth of the clients are in cells that clearly lose,
    or all cells are single clients and the mean loss, winsorised, rises: many may gain a little by
    setting apart a few that lose much. A cell that loses even on its own training samples does not
    object: its model is not what its clients have trained, as with malicious ones.

    Parameters
    ----------
    differences, errors : ndarray of shape (m,)
        Loss under the coarse grouping less that under the fine one, and its standard error; where
        that is unknown, NaN, it is how far apart the clients are.
    coarse, fine : ndarray of shape (m,)
        The groups.
    training : ndarray of shape (m,), optional
        As `differences`, of the losses on what the clients have trained on; NaN where unknown.
    """
    cells = [fine == label for label in np.unique(fine)]
    changed = []
    for cell in cells:
        before = coarse == coarse[cell][0]
        if not np.array_equal(before, cell):
            changed.append(cell)
    if not changed:
        return 0.0
    rest, there = differences.copy(), np.any(changed, axis=0)
    for cell in changed:
        rest[cell] -= np.median(differences[cell])
    scatter = MAD_TO_SD * float(np.median(np.abs(rest[there])))
    apart = np.abs(differences[there] - np.median(differences[there]))
    own = np.where(np.isfinite(errors), errors, MAD_TO_SD * np.median(apart))
    scales = np.maximum(np.hypot(own, scatter), np.finfo(float).tiny)
    votes = []
    for cell in changed:
        most = CELL / np.sqrt(cell.sum())
        in_errors = np.clip(differences[cell], -most * scales[cell], most * scales[cell])
        votes.append((in_errors / scales[cell]).sum() / np.sqrt(cell.sum()))
    sizes, found = np.array([cell.sum() for cell in changed]), np.array(votes)
    worse = np.zeros(len(fine), bool) if training is None else training < 0
    believed = np.array([worse[cell].mean() <= 0.5 for cell in changed])
    objecting = (found < -LOSS) & believed
    if sizes[objecting].sum() > MINORITY * sizes.sum():
        return 0.0
    if sizes.max() == 1 and winsorised(differences[there]).mean() < 0:
        return 0.0
    return float(found.sum() / np.sqrt(len(found)))


def winsorised(values: NDArray[np.float64], mads: float = 5.0) -> NDArray[np.float64]:
    """Return values, shape (n,), none further from their median than so many MADs; NaN stays."""
    if np.isnan(values).all():
        return values
    median = np.nanmedian(values)
    reach = mads * MAD_TO_SD * np.nanmedian(np.abs(values - median))
    clipped: NDArray[np.float64] = np.clip(values, median - reach, median + reach)
    return clipped


def group_means(vectors: NDArray[Any], labels: Labels) -> NDArray[Any]:
    """Return the mean of every group's vectors, shape (L, d)."""
    group_of = np.array(labels)
    return np.stack([vectors[group_of == label].mean(axis=0) for label in range(max(labels) + 1)])


def smallest_distance(models: NDArray[np.floating]) -> float:
    """Return b = min ||alpha_l - alpha_l'|| over pairs of models, shape (L, d); NaN for one."""
    if len(models) < 2:
        return float("nan")
    wide = models.astype(np.float64)
    # Row by row: L may be the number of clients, and d large.
    return min(
        float(np.linalg.norm(wide[k + 1 :] - wide[k], axis=1).min()) for k in range(len(wide) - 1)
    )


def holding_lambda(labels: Labels, gradient_norms: NDArray[np.float64]) -> float:
    """Return the least lambda that can hold every group together: `fusion_bound`, turned round.

    That is max_i m ||grad f_i(alpha_l)||/(|G_l| - 1), over the clients i that are not alone; 0
    where all are, and where no gradient norm is known (NaN). The norms are winsorised, since
    clients report them, and one false report is not to set lambda.
    """
    sizes = np.bincount(labels)[list(labels)]
    known = (sizes > 1) & np.isfinite(gradient_norms)
    needed = len(labels) * winsorised(gradient_norms[known]) / (sizes[known] - 1)
    return float(needed.max(initial=0.0))
