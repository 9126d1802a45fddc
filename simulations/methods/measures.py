"""What is measured at the end of a run, the same way of every method and every baseline.

Clusters found, how evenly the clients are served, and what had been sent when a target was reached.
All of it is over the honest clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fl_admm_strategies.runtime.record import Traffic

from ..problems import Problem
from ..problems.scores import Metric, ModelScores, fairness, rand_index
from ..settings.tables import Fairness, ReportSettings

Cells = dict[str, float | None]


_MEANING: dict[Fairness, str] = {
    "variance": "Var: variance of the metric over the clients, of shares of 1.",
    "loss-variance": "Loss var: variance of the clients' test losses.",
    "cosine": "Cos: cosine of the angle between the clients' values and equal ones.",
    "entropy": "Entropy: of the clients' shares of the sum; the log of their number at most.",
    "jain": "Jain: (sum x)² / (m sum x²), 1 where all clients have the same.",
}


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


def cost_to(
    target: float,
    metric: Metric,
    means: Mapping[int, float],
    traffic: Mapping[int, Traffic],
    itemsize: int,
) -> Cells:
    """Return what it took until the mean of a metric was as good as a target.

    Parameters
    ----------
    target : float
        As the table shows the metric: an accuracy in percent.
    metric : Metric
    means : mapping of int to float
        The mean over the clients after every round that was evaluated.
    traffic : mapping of int to Traffic
        Of every round, both ways, a handshake among them.
    itemsize : int
        Bytes of a number.

    Returns
    -------
    dict of str to (float or None)
        ``target-rounds``, ``target-cost`` (numbers sent) and ``target-mb``; None if never.
    """
    sign = 1 if metric.higher_is_better else -1
    good = [r for r, mean in means.items() if sign * metric.scale * mean >= sign * target]
    if not good:
        return dict.fromkeys(("target-rounds", "target-cost", "target-mb"))
    sent = sum(sum(moved) for server_round, moved in traffic.items() if server_round <= min(good))
    return {"target-rounds": min(good), "target-cost": sent // itemsize, "target-mb": sent / 1e6}


def bytes_of_number(strategy: Any, arrays: ArrayRecord) -> int:
    """Return how many bytes a number takes as a strategy sends it, of models like `arrays`.

    With float16 what clients start from travels in full precision, and counts twice by this.
    """
    if getattr(strategy, "wire_dtype", None) == "float16":
        return 2
    return max(array.numpy().dtype.itemsize for array in arrays.values())


def finished(
    problem: Problem, strategy: Any, rounds: Mapping[int, ModelScores], arrays: ArrayRecord
) -> ModelScores:
    """Return the scores after the last round, with what is measured at the end of a run beside.

    Parameters
    ----------
    problem : Problem
        Its settings say what is measured.
    strategy : StatefulStrategy
        After its run.
    rounds : mapping of int to ModelScores
        The scores by round.
    arrays : ArrayRecord
        What the run started from.
    """
    report, last = problem.settings.report, rounds[max(rounds)]
    clients = strategy.evaluate_metrics[max(rounds)].values()
    itemsize = bytes_of_number(strategy, arrays)
    cells = {title: dict(row) for title, row in last.cells.items()}
    titles = [title for title in strategy.kinds.values() if title in last.models]
    for kind, title in strategy.kinds.items():
        if title not in last.models:
            continue
        row: Cells = cells.setdefault(title, {})
        row |= _fairness_cells(report.fairness, kind, problem.metric, clients)
        if report.target is not None:
            means = {r: s.models[title].mean for r, s in rounds.items() if title in s.models}
            row |= cost_to(report.target, problem.metric, means, strategy.traffic, itemsize)
    clustered = strategy.kinds.get("cluster")
    if found := clustering(problem, strategy):
        cells[clustered if clustered in titles else titles[0]] |= found
    return replace(last, cells={title: row for title, row in cells.items() if row})


def legend(report: ReportSettings) -> list[str]:
    """Say under the table what the measures of `report` are."""
    lines = [_MEANING[name] for name in report.fairness]
    if report.target is not None:
        lines.append(
            f"Target: after how many rounds the mean was as good as {report.target:g}, where "
            "evaluated; numbers and megabytes sent by then, both ways."
        )
    return lines


def _fairness_cells(
    names: Iterable[Fairness], kind: str, metric: Metric, clients: Iterable[Mapping[str, float]]
) -> Cells:
    found: Cells = {}
    for name in names:
        key = f"{kind}-loss" if name == "loss-variance" else f"{kind}-{metric.key}"
        values = [reported[key] for reported in clients if key in reported]
        if values:
            found[name] = fairness(values)["variance" if name == "loss-variance" else name]
    return found
