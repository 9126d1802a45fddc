"""What came of a path of lambdas: a table, and the picture of which clients fused where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import RenderableType
from rich.text import Text

from fl_admm_strategies.algorithms.fpfc.path import PathTaken
from fl_admm_strategies.runtime.record import Traffic

from .plots import COLOURS, GREY, Picture, explain
from .table import small_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 40  # with more clients, their numbers would overlap


def render_path(
    path: PathTaken, metric: str, traffic: Mapping[int, Traffic], true_clusters: ArrayLike | None
) -> list[RenderableType]:
    """Return the table of a path, a row a lambda, and the sentence that says which was chosen.

    Parameters
    ----------
    path : PathTaken
    metric : str
        What was measured.
    traffic : mapping of int to Traffic
        By round.
    true_clusters : array_like of int, shape (m,), or None
    """
    from sklearn.metrics import adjusted_rand_score  # here: takes seconds

    headers = ("Rounds", f"Validation\n{metric}", "Clusters", "ARI", "Sent\nMB")
    table = small_table("The path of λ", "λ", *headers)
    ended, begin = np.flatnonzero(path.last_rounds), 0
    for stage in ended:
        last, labels = int(path.last_rounds[stage]), path.labels[:, stage]
        sent = sum(sum(traffic[r]) for r in range(begin + 1, last + 1) if r in traffic)
        here = labels >= 0
        ari = (
            "–"
            if true_clusters is None or not here.all() or len(labels) != np.size(true_clusters)
            else f"{adjusted_rand_score(true_clusters, labels):.2f}"
        )
        table.add_row(
            f"{path.lams[stage]:g}" + (" *" if stage == path.chosen else ""),
            f"{begin + 1}-{last}",
            f"{path.values[stage]:.4g}",
            str(path.num_groups[stage]),
            ari,
            f"{sent / 1e6:.3g}",
        )
        begin = last
    total = sum(sum(moved) for moved in traffic.values()) / 1e6
    if path.chosen is None:
        sentence = Text(
            f"The run ended before a λ was chosen; its models are those at λ={path.lam:g}. Give it "
            "more rounds.",
            style="yellow",
        )
    else:
        is_last = path.chosen == len(path.lams) - 1
        at_the_end = "It is the largest of the grid: try larger ones. " if is_last else ""
        sentence = Text(
            f"* chosen by the {metric} on held-out samples. {at_the_end}All in all {total:.3g} MB "
            "were sent."
        )
    return [table, sentence]


def draw_cluster_path(
    path: PathTaken, metric: str, true_clusters: ArrayLike | None, *, picture: Picture
) -> None:
    """Draw over lambda how many clusters there are, the validation metric, and who fused with whom.

    In the lowest part a line is a client or a cluster, at the mean place of its clients and as wide
    as they are many. The places of the lambdas are evenly spaced.

    Parameters
    ----------
    path : PathTaken
        With one stage that has ended, or more.
    metric : str
        What was measured.
    true_clusters : array_like of int, shape (m,), or None
        They give the lines their colours; a line of clients of several is grey.
    picture : Picture
    """
    ended = np.flatnonzero(path.last_rounds)
    names = [f"{path.lams[stage]:g}" for stage in ended]
    x = np.arange(len(ended))
    figure, panels = picture.axes((8.0, 8.0), 3, 1, sharex=True, height_ratios=(1, 1, 3))
    counts, values, tree = panels
    for axes, ylabel, y in (
        (counts, "clusters", path.num_groups[ended]),
        (values, f"validation\n{metric}", path.values[ended]),
    ):
        axes.plot(x, y, color=COLOURS[0], marker="o", linewidth=1.8)
        axes.set_ylabel(ylabel)
        axes.margins(y=0.15)
    counts.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    _draw_tree(tree, path.labels[:, ended], true_clusters)
    tree.set_xticks([-1, *x], ["alone", *names])
    tree.set_xlabel("λ")
    tree.grid(visible=False)
    if path.chosen is not None:
        place = int(np.flatnonzero(ended == path.chosen)[0])
        for axes in panels:
            axes.axvline(place, color=GREY, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
        explain(counts, f"Dashed: λ={path.lams[path.chosen]:g}, chosen by the validation {metric}.")
    picture.save(figure)


def _draw_tree(axes: Axes, labels: NDArray[np.int64], true_clusters: ArrayLike | None) -> None:
    """Draw the clusters of every stage, joined with those of the next that have their clients."""
    m, stages = labels.shape
    true = None if true_clusters is None or np.size(true_clusters) != m else true_clusters
    kinds = np.zeros(m, dtype=int) if true is None else np.unique(true, return_inverse=True)[1]
    # Who is together at a larger lambda is side by side.
    order = np.lexsort((*np.vstack([np.arange(m), labels.T]),))
    place = np.empty(m)
    place[order] = np.arange(m)

    def middles(stage: int) -> NDArray[np.float64]:
        found = labels[:, stage]
        return np.array([place[found == label].mean() for label in found])

    at = [place, *(middles(stage) for stage in range(stages))]
    for stage in range(stages):
        left, right = at[stage], at[stage + 1]
        for ends in {(float(a), float(b)) for a, b in zip(left, right, strict=True)}:
            members = np.flatnonzero((left == ends[0]) & (right == ends[1]))
            found = set(kinds[members].tolist())
            colour = COLOURS[found.pop() % len(COLOURS)] if len(found) == 1 else GREY
            width = 1.0 + 4.0 * len(members) / m
            axes.plot((stage - 1, stage), ends, color=colour, linewidth=width, alpha=0.85)
    if m <= _MOST_NAMES:
        axes.set_yticks(np.arange(m), [str(client) for client in order], fontsize=8)
        axes.set_ylabel("client")
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{m} clients")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(-1.0, stages - 0.8)
    if true is not None and len(np.unique(kinds)) > 1:
        explain(axes, "Colours: true clusters. Grey: clients of several true clusters in one line.")
