"""How the clusters that a run found are judged: Num, ARI, the cost, and whether lambda holds them.

These are the figures of FPFC (Yu et al., arXiv:2211.04218, section 6 and table 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from rich.text import Text

from fl_admm_strategies.algorithms.fpfc.diagnostics import FPFCDiagnostics
from fl_admm_strategies.algorithms.fpfc.path import PathTaken
from fl_admm_strategies.maths.clustering import clusters

from ..problems.scores import rand_index


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
