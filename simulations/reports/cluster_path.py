"""What came of a path of lambdas: a table, and which of them was chosen."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from rich.console import RenderableType
from rich.text import Text

from fl_admm_strategies.algorithms.fpfc.path import PathTaken
from fl_admm_strategies.runtime.record import Traffic

from ..problems.scores import rand_index
from .table import small_table


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
            else f"{rand_index(true_clusters, labels):.2f}"
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
