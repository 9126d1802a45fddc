"""How the clusters that a run found are judged: Num, ARI, the cost, and whether lambda holds them.

These are the figures of FPFC (Yu et al., arXiv:2211.04218, section 6 and table 1). Everything here
takes plain numbers and arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fl_admm_strategies.algorithms.fpfc.path import PathTaken
from fl_admm_strategies.maths.clustering import clusters, fusion_bound

from ..problems.scores import rand_index
from .table import small_table

Verdict = Literal["holds", "open", "too small"]
_WORDS: dict[Verdict, str] = {"holds": "holds", "open": "open", "too small": "λ too small"}

# More clusters than this scroll the part that matters off the screen.
_MOST_CLUSTER_ROWS = 12


@dataclasses.dataclass(frozen=True)
class ClusteringRow:
    """The clusters found at one threshold.

    Attributes
    ----------
    nu : float
        Threshold nu: two clients belong together where ||theta_ij|| <= ν.
    num : int
        Number of clusters found, the papers' Num.
    ari : float or None
        Adjusted Rand index against the true clusters; None where these are not known.
    """

    nu: float
    num: int
    ari: float | None


@dataclasses.dataclass(frozen=True)
class ClusterCondition:
    """Whether lambda is large enough to hold a found cluster at one common model.

    Attributes
    ----------
    size : int
        Number of clients |G_l|.
    largest_gradient : float
        max_i ||grad f_i(alpha_l)|| over the clients of the cluster, alpha_l being the cluster's
        model.
    allowed : float
        lambda (|G_l| - 1)/m, the most that the other members can hold against.
    lam_needed : float
        The smallest lambda that would do at these gradients; NaN for a client alone.
    verdict : {"holds", "open", "too small"}
        "holds" where ``largest_gradient <= allowed``; a client alone has nothing to hold. "open"
        where the state of the run explains what is above, "too small" lambda otherwise.
    """

    size: int
    largest_gradient: float
    allowed: float
    lam_needed: float
    verdict: Verdict


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


def cluster_conditions(
    labels: ArrayLike, gradient_norms: ArrayLike, lam: float, slack: float = 0.0
) -> list[ClusterCondition]:
    """Check, for every found cluster, whether lambda can hold it together.

    A cluster G_l that is fused at alpha_l, with all other clusters beyond a lambda, is a stationary
    point only if ||grad f_i(alpha_l)|| <= lambda (|G_l| - 1)/m for all its clients
    (`fusion_bound`).

    Parameters
    ----------
    labels : array_like of int, shape (m,)
        Found cluster of each client, 0..L-1.
    gradient_norms : array_like of shape (m,)
        ||grad f_i(alpha_l)|| of each client at the model of its found cluster.
    lam : float
        Regularisation lambda of the run.
    slack : float
        What a gradient may be above the bound for reasons of the run's state: how far the models
        are from a stationary point; infinity where clusters still pull on each other.

    Returns
    -------
    list of ClusterCondition
        Largest cluster first, ties in the order of the labels.
    """
    bounds = fusion_bound(labels, lam)
    found, norms = np.asarray(labels), np.asarray(gradient_norms, dtype=np.float64)
    checks = []
    for label, allowed in enumerate(bounds):
        members = norms[found == label]
        others, largest = len(members) - 1, float(members.max())
        above = largest - float(allowed) if others else 0.0
        verdict: Verdict = "holds" if above <= 0 else "open" if above <= slack else "too small"
        checks.append(
            ClusterCondition(
                size=len(members),
                largest_gradient=largest,
                allowed=float(allowed),
                lam_needed=largest * len(found) / others if others else math.nan,
                verdict=verdict,
            )
        )
    # Stable, and `clusters` labels by first client: the pictures number the clusters alike.
    return sorted(checks, key=lambda check: -check.size)


def diagnostics_table(
    labels: ArrayLike,
    gradient_norms: ArrayLike,
    *,
    lam: float,
    stationarity: float,
    consensus: float,
    apart: bool,
    clustering: Sequence[ClusteringRow],
) -> Group:
    """Lay out whether the clusters of an FPFC run can be trusted, and say it in plain sentences.

    Parameters
    ----------
    labels : array_like of int, shape (m,)
        Found cluster of each client, 0..L-1.
    gradient_norms : array_like of shape (m,)
        ||grad f_i(alpha_l)|| of each client at the model of its found cluster.
    lam : float
        Regularisation lambda of the run.
    stationarity : float
        KKT residual max_i ||grad f_i(omega_i) + (1/m) sum_j v_ij||.
    consensus : float
        KKT residual max_ij ||omega_i - omega_j - theta_ij||.
    apart : bool
        Whether the clusters are so far from each other that they do not pull on each other.
    clustering : Sequence[ClusteringRow]
        Clusters found at several thresholds.

    Returns
    -------
    rich.console.Group
        A table and the sentences; fits a terminal of 80 columns.
    """
    slack = stationarity if apart else math.inf
    checks = cluster_conditions(labels, gradient_norms, lam, slack)
    return Group(
        _conditions_table(checks),
        Text("\n".join(_sentences(checks, lam, stationarity, consensus, clustering))),
    )


def _conditions_table(checks: Sequence[ClusterCondition]) -> Table:
    headers = ("Clients", "Pull, max\n‖∇f_i(α)‖", "Hold\nλ(|G|-1)/m", "λ\nneeded")
    table = small_table("Is λ large enough for each found cluster?", "Cluster", *headers)
    table.add_column("Verdict")
    groups = [check for check in checks if check.size > 1]
    for k, check in enumerate(groups[:_MOST_CLUSTER_ROWS]):
        numbers = (check.largest_gradient, check.allowed, check.lam_needed)
        verdict = Text(
            _WORDS[check.verdict], style="green" if check.verdict == "holds" else "yellow"
        )
        table.add_row(str(k + 1), str(check.size), *(f"{n:.3g}" for n in numbers), verdict)
    if rest := groups[_MOST_CLUSTER_ROWS:]:
        counts = Counter(_WORDS[check.verdict] for check in rest if check.verdict != "holds")
        words = ", ".join(f"{word} for {count} of them" for word, count in counts.items())
        clients = sum(check.size for check in rest)
        table.add_row(f"{len(rest)} more", str(clients), "", "", "", words or "holds for all")
    if alone := len(checks) - len(groups):
        table.add_row("alone", str(alone), "", "", "", Text("nothing to hold", style="dim"))
    return table


def _sentences(
    checks: Sequence[ClusterCondition],
    lam: float,
    stationarity: float,
    consensus: float,
    clustering: Sequence[ClusteringRow],
) -> list[str]:
    counts = sorted({row.num for row in clustering})
    tested = ", ".join(f"{row.num} at ν={row.nu:.3g}" for row in clustering)
    sentences = []
    if len(counts) == 1:
        sentences.append(f"• The number of clusters does not depend on the threshold: {tested}.")
    elif counts:
        sentences.append(
            f"• The number of clusters depends on the threshold ({tested}): the groups are not "
            "clearly apart, or not yet together. Train longer or try another λ."
        )
    if any(check.verdict == "open" for check in checks):
        sentences.append(
            "• Open: the run is too far from an exact solution to say. Train longer; if the "
            "clusters stay so close that they pull on each other, λ is too large."
        )
    if all(check.size == 1 for check in checks):
        sentences.append(
            f"• Every client is alone: at λ={lam:.3g} no two models were fused. If "
            "there are groups, try a larger λ."
        )
    sentences.append(
        f"• Distance from an exact solution: {stationarity:.2g} (each client's gradient against "
        f"its duals) and {consensus:.2g} (differences against θ). Both go to 0 in a run that has "
        "converged; while they are large the clusters may still change."
    )
    return sentences


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
