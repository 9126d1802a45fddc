"""What is measured at the end of a run, the same way of every method and every baseline.

Clusters found, and how evenly the clients are served, over the honest clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..problems import Problem
from ..problems.scores import ModelScores, rand_index

Cells = dict[str, float | None]


def clustering(problem: Problem, strategy: Any) -> Cells:
    """Return the number of clusters and their ARI, of a method that has clusters."""
    labels = getattr(strategy, "clusters", lambda: None)()
    if labels is None:
        return {}
    honest = [place for place, c in enumerate(strategy.client_ids) if c not in problem.malicious]
    of_honest = np.asarray(labels)[honest]
    found: Cells = {"num": len(np.unique(of_honest))}
    truth = getattr(problem.data, "true_clusters", None)
    if truth is not None:
        ids = [strategy.client_ids[place] for place in honest]
        found["ari"] = rand_index(np.asarray(truth)[ids], of_honest)
    return found


def finished(
    problem: Problem, strategy: Any, last: ModelScores, clients: Mapping[int, Mapping[str, float]]
) -> ModelScores:
    """Return the scores after the last round, with what is measured at the end of a run beside.

    Parameters
    ----------
    problem : Problem
        Its settings say what is measured.
    strategy : StatefulStrategy
        After its run.
    last : ModelScores
        The scores after the last round.
    clients : mapping of int to mapping of str to float
        What every client reported then.
    """
    cells = {title: dict(row) for title, row in last.cells.items()}
    titles = {kind: title for kind, title in strategy.kinds.items() if title in last.models}
    if problem.settings.report.loss_variance:
        for kind, title in titles.items():
            losses = [own[f"{kind}-loss"] for own in clients.values() if f"{kind}-loss" in own]
            if losses:
                cells.setdefault(title, {})["loss-variance"] = float(np.var(losses))
    if found := clustering(problem, strategy):
        title = titles.get("cluster", next(iter(titles.values())))
        cells[title] = cells.get(title, {}) | found
    return replace(last, cells=cells)
