"""FPFC's report: the clusters that it found, beside the true ones, and what they cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from rich.filesize import decimal

from fl_admm_strategies import LambdaPath
from fl_admm_strategies.algorithms.fpfc.diagnostics import FPFCDiagnostics
from fl_admm_strategies.maths.clustering import clusters
from fl_admm_strategies.runtime.callbacks import StopRule

from ..problems import Problem
from ..problems.scores import rand_index
from . import plots
from .base import Finished, MethodReport, ReportContent


class ClusteringRow(NamedTuple):
    """The clusters found at one threshold.

    Attributes
    ----------
    nu : float
        Threshold nu: two clients belong together where ||theta_ij|| <= nu.
    num : int
        Number of clusters found, the papers' Num.
    ari : float or None
        Adjusted Rand index against the true clusters; None where these are not known.
    """

    nu: float
    num: int
    ari: float | None


def clustering_at(
    nu: float, theta_norms: ArrayLike, true_clusters: ArrayLike | None
) -> ClusteringRow:
    """Count the clusters at a threshold and compare them with the true ones.

    Parameters
    ----------
    nu : float
        Threshold nu. The result is not always insensitive to it, so report several.
    theta_norms : array_like of shape (m, m)
        Norms ||theta_ij|| of the pairwise differences.
    true_clusters : array_like of int, shape (m,), or None
        True cluster of each client, where it is known.
    """
    found = clusters(np.asarray(theta_norms, dtype=np.float64), nu)
    ari = None if true_clusters is None else rand_index(true_clusters, found)
    return ClusteringRow(nu, len(np.unique(found)), ari)


class FPFCReport(MethodReport):
    """Clusters at several thresholds beside the true ones, the cost, two plots."""

    def stop_rule(self, strategy: Any, problem: Problem) -> StopRule | None:
        """End a run on a path of lambdas when the chosen one's models have converged (4.3)."""
        if not isinstance(strategy.penalty, LambdaPath):
            return None
        return lambda server_round, metrics: bool(strategy.state.source.is_settled)

    def report(self, run: Finished) -> ReportContent:
        """Report the clusters: how many, which, and how they were found."""
        strategy = run.strategy
        found = strategy.diagnostics()
        # The report is of the honest clients, by row of the state.
        honest = np.array([client not in run.problem.malicious for client in strategy.client_ids])
        theta_norms = found.theta_norms[np.ix_(honest, honest)]
        labels = np.unique(found.labels[honest], return_inverse=True)[1]
        true = run.problem.data.true_clusters
        if true is not None and len(true) == len(honest):
            true = true[honest]
        own = {found.nu} if strategy.penalty == "auto" else set()
        rows = [clustering_at(nu, theta_norms, true) for nu in sorted({0.01, 0.1, 0.5, *own})]
        named = {f"clusters at ν={row.nu:.3g}": row for row in rows}
        omega = strategy.state.pairs.omega[honest]
        numbers = np.asarray(strategy.client_ids)[honest].tolist()
        heat_map = run.picture("distances.png", "distances between the client models")
        plots.distance_heat_map(omega, labels, numbers, picture=heat_map)
        plane = run.picture("embedding.png", "the client models in two dimensions")
        plots.embedding(omega, labels, true, picture=plane)
        cost = run.numbers_sent(max(strategy.traffic))
        search = found.search
        return ReportContent(
            cells={
                **{title: {"cost": cost} for title in strategy.kinds.values()},
                **{title: {"num": row.num, "ari": row.ari} for title, row in named.items()},
            },
            legend=(
                "Clusters at ν: two clients are together where ‖θ_ij‖ ≤ ν.",
                "Cost: parameters sent, both ways.",
            ),
            body=(
                *_how_found(run, found),
                _summary(run, clustering_at(found.nu, theta_norms, true)),
            ),
            extra={
                "clustering": [row._asdict() for row in rows],
                "cost": cost,
                "lam": found.lam,
                "nu": found.nu,
                "search": search,
                "path": found.path,
                "marks": {} if search is None else {"groups found": search.last_round},
            },
        )


def _how_found(run: Finished, found: FPFCDiagnostics) -> list[str]:
    """Say which groups or lambdas were tried, what came of each, and which was taken."""
    strategy, search, path = run.strategy, found.search, found.path
    if path is not None and path.chosen < 0:
        return [
            f"**The run ended before a λ was chosen**; its models are those at λ={found.lam:g}. "
            "Give it more rounds."
        ]
    if path is not None:
        tried = ", ".join(
            f"{strategy.penalty.lams[k]:g} ({path.num_groups[k]}; {path.values[k]:.4g}"
            f"{', taken' if k == path.chosen else ''})"
            for k in np.flatnonzero(path.last_rounds)
        )
        monitor = strategy.penalty.monitor
        return [f"λ tried, with clusters and {monitor} on held-out samples: {tried}."]
    if strategy.penalty != "auto":
        return []
    if search is None:
        return [
            "**The run ended while the groups were still searched for**: all clients count as one "
            "group. Give it more rounds."
        ]
    tried = ", ".join(
        f"{count} ({loss:.3g}{', taken' if k == search.chosen else ''})"
        for k, (count, loss) in enumerate(zip(search.num_groups, search.losses, strict=True))
    )
    sent, in_all = run.bytes_sent(search.last_round), run.bytes_sent(max(strategy.traffic))
    return [
        f"Groups tried in rounds 1 to {search.last_round}, with the mean loss on held-out data: "
        f"{tried}. The search sent {decimal(sent)}, {sent / in_all:.0%} of the run's bytes."
    ]


def _summary(run: Finished, at: ClusteringRow) -> str:
    """Return two sentences on the outcome, for a reader who has not read the paper."""
    truth = ""
    if at.ari == 1:
        truth = f", exactly the true one{'' if at.num == 1 else 's'}"
    elif at.ari is not None:
        num_true = len(np.unique(run.problem.data.true_clusters))
        truth = f"; there are {num_true} true ones (ARI {at.ari:.2f}; 1 is a perfect match)"
    malicious = len(run.problem.malicious)
    clients = f"{run.problem.num_clients - malicious}{' honest' if malicious else ''} clients"
    return (
        f"**{run.strategy.title} found {at.num} group{'' if at.num == 1 else 's'} among {clients}**"
        f"{truth}. It was not told how many there are.\n\n"
        f"Mean {run.problem.metric.measure}: **{run.mean('personal')}** with the clients' own "
        f"models, **{run.mean('global')}** with one model for all (their mean)."
    )
