"""FPFC's report: the clusters that it found, and whether they can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from rich.text import Text

from fl_admm_strategies.algorithms.fpfc import FPFCDiagnostics

from . import plots
from .base import NONE, Finished, MethodReport, Report
from .clusters import ClusteringRow, clustering_scores, communication_cost, diagnostics_table


class FPFCReport(MethodReport):
    """Clusters at several thresholds beside the true ones, diagnostics, the cost, two plots."""

    fixed: ClassVar[Mapping[str, Any]] = {"report_diagnostics": True}

    def report(self, run: Finished) -> Report:
        """Report the clusters: how many, which, and whether lambda and nu can be trusted."""
        data, strategy = run.problem.data, run.strategy
        found = strategy.diagnostics()
        clustering = clustering_scores(found.theta_norms, data.true_clusters)
        shared = sum(array.size for array in strategy.state.averaged_arrays.values())
        cost = communication_cost(
            run.problem.num_clients,
            sum(array.size for array in strategy.global_model().values()) - shared,
            [len(replies) for replies in strategy.train_metrics.values()],
            shared,
        )
        _draw(run, found.labels)
        unknown = f" ({NONE}: truth unknown)." if clustering[0].ari is None else "."
        at_own_nu = clustering_scores(found.theta_norms, data.true_clusters, (strategy.nu,))
        return Report(
            cells={
                **{title: {"cost": cost} for title in strategy.kinds.values()},
                **{
                    f"clusters at ν={row.nu:g}": {"num": row.num, "ari": row.ari}
                    for row in clustering
                },
            },
            note=f"{cost:,} parameters sent"
            + (f", shared block of {shared:,} included" if shared else ""),
            legend=(
                "Num: clusters found, two clients together where ‖θ_ij‖ ≤ ν. "
                f"ARI: 1 = the true clusters, 0 = chance{unknown}",
                "Cost: parameters sent, both ways.",
            ),
            body=(
                diagnostics_table(
                    found.labels,
                    found.theta_norms,
                    found.gradient_norms,
                    lam=strategy.penalty.lam,
                    stationarity=found.stationarity,
                    consensus=found.primal_residual,
                    apart=_apart(strategy.penalty, found),
                    clustering=clustering,
                ),
                _summary(run, at_own_nu),
            ),
            files={
                "distances.png": "how far apart the client models are",
                "embedding.png": "the client models in two dimensions",
            },
            extra={"clustering": clustering, "cost": cost, "shared_dim": shared},
        )


def _apart(penalty: Any, found: FPFCDiagnostics) -> bool:
    """Return whether no two clusters pull on each other: the penalty is flat at their distance."""
    between = found.theta_norms[found.labels[:, None] != found.labels[None, :]]
    return not between.size or not penalty.derivative(between.min())


def _draw(run: Finished, labels: Any) -> None:
    omega = run.strategy.state.pairs.omega
    plots.distance_heat_map(
        omega, labels, picture=run.picture("distances.png", "distances between the client models")
    )
    plots.embedding(
        omega,
        labels,
        run.problem.data.true_clusters,
        picture=run.picture("embedding.png", "the client models in two dimensions"),
    )


def _summary(run: Finished, clustering: Sequence[ClusteringRow]) -> Text:
    """Say in two sentences what came out, for somebody who has not read the paper."""
    data = run.problem.data
    (row,) = clustering
    groups = f"{row.num} group{'' if row.num == 1 else 's'}"
    truth = ""
    if row.ari == 1:
        truth = ", exactly the true ones"
    elif row.ari is not None:
        num_true = len(np.unique(data.true_clusters))
        truth = f"; there are {num_true} true ones (ARI {row.ari:.2f}; 1 is a perfect match)"
    return Text.assemble(
        (
            f"{run.strategy.title} found {groups} among {run.problem.num_clients} clients",
            "bold green",
        ),
        f"{truth}. It was not told how many there are.\n",
        f"Mean {run.problem.metric.measure}: ",
        (run.mean("personal"), "bold"),
        " with the clients' own models, ",
        (run.mean("global"), "bold"),
        " with one model for all (their mean).",
    )
