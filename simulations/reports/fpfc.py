"""FPFC's report: the clusters that it found, and whether they can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.text import Text

from fl_admm_strategies import LambdaPath
from fl_admm_strategies.algorithms.fpfc.diagnostics import FPFCDiagnostics
from fl_admm_strategies.algorithms.fpfc.path import PathTaken
from fl_admm_strategies.maths.clustering import clusters
from fl_admm_strategies.runtime.callbacks import StopRule

from ..methods.measures import bytes_of_number
from ..problems import Problem
from ..problems.scores import rand_index
from . import plots
from .base import Finished, MethodReport, ReportContent


@dataclass(frozen=True)
class ClusteringRow:
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
    return ClusteringRow(nu=float(nu), num=len(np.unique(found)), ari=ari)


def communication_cost(num_clients: int, dim: int, active_per_round: Sequence[int]) -> int:
    """Count the parameters sent in a run, as FPFC's table 1 does.

    The initial model goes to every client once, then in every round one vector goes down to and
    one comes up from each active client: m d + 2 d sum_k |A_k|.

    Parameters
    ----------
    num_clients : int
        Number of clients m.
    dim : int
        Size d of a client's model, with the block that all clients share and that travels with it
        (the lower layers of the image experiments). The paper does not say whether it counts.
    active_per_round : Sequence[int]
        Number of active clients |A_k| of every round.

    Returns
    -------
    int
        Number of parameters.
    """
    return (num_clients + 2 * sum(active_per_round)) * dim


def render_trust(found: FPFCDiagnostics, clustering: Sequence[ClusteringRow]) -> Text:
    """Say whether the found clusters depend on nu, whether lambda holds them, and what is left.

    A cluster G_l that is fused at alpha_l is a stationary point only if
    ||grad f_i(alpha_l)|| <= lambda (|G_l| - 1)/m for all its clients (`fusion_bound`).
    """
    tested = ", ".join(f"{row.num} at ν={row.nu:.3g}" for row in clustering)
    sentences = [f"• Clusters by threshold: {tested}."]
    if len({row.num for row in clustering}) > 1:
        sentences[0] += " They depend on it: train longer or try another λ."
    sizes = np.bincount(found.labels)
    pull = np.zeros(len(sizes))
    np.fmax.at(pull, found.labels, found.gradient_norms)
    groups = sizes > 1
    if not groups.any():
        sentences.append("• Every client is alone. If there are groups, try a larger λ.")
    elif not (held := pull[groups] <= found.fusion_bounds[groups]).all():
        sentences.append(
            f"• λ holds {held.sum()} of {len(held)} clusters at these models. Train longer, or try "
            "a larger λ."
        )
    sentences.append(
        f"• Distance from an exact solution: {found.stationarity:.2g} (each client's gradient "
        f"against its duals) and {found.primal_residual:.2g} (differences against θ). Both go to 0 "
        "in a run that has converged."
    )
    return Text("\n".join(sentences))


def render_path(path: PathTaken, metric: str) -> Text:
    """Say which lambdas of a path were tried, what came of each, and which the metric chose."""
    if path.chosen is None:
        return Text(
            f"The run ended before a λ was chosen; its models are those at λ={path.lam:g}. Give it "
            "more rounds.",
            style="yellow",
        )
    tried = ", ".join(
        f"{path.lams[k]:g} ({path.num_groups[k]}; {path.values[k]:.4g}"
        f"{', taken' if k == path.chosen else ''})"
        for k in np.flatnonzero(path.last_rounds)
    )
    is_last = path.chosen == len(path.lams) - 1
    larger = " That is the largest of the grid: try larger ones." if is_last else ""
    return Text(f"λ tried, with clusters and {metric} on held-out samples: {tried}.{larger}")


class FPFCReport(MethodReport):
    """Clusters at several thresholds beside the true ones, diagnostics, the cost, two plots."""

    fixed: ClassVar[Mapping[str, Any]] = {"report_diagnostics": True}

    def stop_rule(self, strategy: Any, problem: Problem) -> StopRule | None:
        """End a run on a path of lambdas when the chosen one's models are at rest (section 4.3)."""
        if not isinstance(strategy.penalty, LambdaPath):
            return None
        return lambda server_round, metrics: bool(strategy.state.source.is_settled)

    def report(self, run: Finished) -> ReportContent:
        """Report the clusters: how many, which, and whether lambda and nu can be trusted."""
        data, strategy = run.problem.data, run.strategy
        found = strategy.diagnostics()
        # The report is of those that do not attack, by row of the state.
        honest = np.array([client not in run.problem.malicious for client in strategy.client_ids])
        theta_norms = found.theta_norms[np.ix_(honest, honest)]
        labels = np.unique(found.labels[honest], return_inverse=True)[1]
        true = data.true_clusters
        if true is not None and len(true) == len(honest):
            true = true[honest]
        nus = sorted({0.01, 0.1, 0.5, found.nu} if strategy.penalty == "auto" else {0.01, 0.1, 0.5})
        clustering = [clustering_at(nu, theta_norms, true) for nu in nus]
        shared = sum(array.size for array in strategy.state.averaged_arrays.values())
        rows = [(f"ν={row.nu:.3g}", row) for row in clustering]
        # Where the penalty is flat: pairs above do not pull on each other.
        if flat := getattr(strategy.penalty_in_use, "flat_from", 0.0):
            rows.append((f"ν=aλ={flat:.3g}", clustering_at(flat, theta_norms, true)))
        cost = _cost(run, found)
        _draw(run, honest, labels, true)
        at_own_nu = clustering_at(found.nu, theta_norms, true)
        return ReportContent(
            cells={
                **{title: {"cost": cost} for title in strategy.kinds.values()},
                **{f"clusters at {where}": {"num": row.num, "ari": row.ari} for where, row in rows},
            },
            legend=(
                "Clusters at ν: two clients are together where ‖θ_ij‖ ≤ ν.",
                "Cost: parameters sent, both ways"
                + (f", the shared block of {shared:,} included." if shared else "."),
            ),
            body=(
                render_trust(found, clustering),
                *_render_search(run, found),
                *([render_path(found.path, strategy.penalty.monitor)] if found.path else []),
                _summary(run, at_own_nu.num, at_own_nu.ari),
            ),
            files={
                "distances.png": "how far apart the client models are",
                "embedding.png": "the client models in two dimensions",
            },
            extra={
                "clustering": clustering,
                "cost": cost,
                "shared_dim": shared,
                "lam": found.lam,
                "nu": found.nu,
                "search": found.search,
                "path": found.path,
            },
        )


def _summary(run: Finished, num: int, ari: float | None) -> Text:
    """Return two sentences on the outcome, for a reader who has not read the paper."""
    truth = ""
    if ari == 1:
        truth = f", exactly the true one{'' if num == 1 else 's'}"
    elif ari is not None:
        num_true = len(np.unique(run.problem.data.true_clusters))
        truth = f"; there are {num_true} true ones (ARI {ari:.2f}; 1 is a perfect match)"
    malicious = len(run.problem.malicious)
    clients = f"{run.problem.num_clients - malicious}{' honest' if malicious else ''} clients"
    groups = f"{num} group{'' if num == 1 else 's'}"
    return Text.assemble(
        (f"{run.strategy.title} found {groups} among {clients}", "bold green"),
        f"{truth}. It was not told how many there are.\n",
        f"Mean {run.problem.metric.measure}: ",
        (run.mean("personal"), "bold"),
        " with the clients' own models, ",
        (run.mean("global"), "bold"),
        " with one model for all (their mean).",
    )


def _cost(run: Finished, found: FPFCDiagnostics) -> int:
    """Return how many numbers the run sent, both ways."""
    strategy = run.strategy
    if found.path is not None or not strategy.in_rounds:
        # A path sends models again, AsyncFPFC omega_i with zeta_i.
        return _numbers_sent(run, max(strategy.traffic))
    # The search's rounds send several models and are counted by their bytes.
    searched = 0 if found.search is None else found.search.last_round
    active = [len(met) for number, met in strategy.train_metrics.items() if number > searched]
    size = sum(array.size for array in strategy.global_model().values())
    return communication_cost(run.problem.num_clients, size, active) + _numbers_sent(run, searched)


def _numbers_sent(run: Finished, searched: int) -> int:
    """Return how many numbers the first rounds sent, both ways, beside the initial model."""
    sent = sum(sum(run.strategy.traffic[number]) for number in range(1, searched + 1))
    return sent // bytes_of_number(run.strategy, run.arrays)


def _render_search(run: Finished, found: FPFCDiagnostics) -> list[Text]:
    """Say how the groups were found, and what that cost."""
    strategy, search = run.strategy, found.search
    if strategy.penalty != "auto":
        return []
    if search is None:
        return [
            Text(
                "The run ended while the groups were still searched for: all clients count as one "
                "group. Give it more rounds.",
                style="yellow",
            )
        ]
    tried = ", ".join(
        f"{count} ({loss:.3g}{', taken' if k == search.chosen else ''})"
        for k, (count, loss) in enumerate(zip(search.num_groups, search.losses, strict=True))
    )
    loss = "loss on held-out data" if strategy.validation_share else "corrected training loss"
    return [
        Text(
            f"Groups tried in rounds 1 to {search.last_round}, with the mean {loss}: {tried}. "
            f"The search sent {_numbers_sent(run, search.last_round):,} numbers."
        )
    ]


def _draw(
    run: Finished, honest: NDArray[np.bool_], labels: NDArray[Any], true: NDArray[Any] | None
) -> None:
    omega = run.strategy.state.pairs.omega[honest]
    plots.distance_heat_map(
        omega,
        labels,
        np.asarray(run.strategy.client_ids)[honest].tolist(),
        picture=run.picture("distances.png", "distances between the client models"),
    )
    plots.embedding(
        omega,
        labels,
        true,
        picture=run.picture("embedding.png", "the client models in two dimensions"),
    )
