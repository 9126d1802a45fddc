"""What helps to judge a run of `FPFC`, and to choose lambda and nu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...maths.clustering import fusion_bound
from ...runtime.messages.records import Metrics
from .messages import CLUSTER_GRADIENT, STATIONARITY
from .path import PathTaken
from .search import FoundGroups
from .source import FPFCState


@dataclass(frozen=True)
class FPFCDiagnostics:
    """What helps to judge a run and to choose lambda; see `FPFC.diagnostics`.

    Attributes
    ----------
    stationarity : float
        r1 = max_i ||grad f_i(omega_i) + (1/m) sum_j v_ij||, over the clients that reported it; NaN
        without `report_diagnostics`.
    primal_residual : float
        r2 = max_ij ||omega_i - omega_j - theta_ij||.
    labels : ndarray of shape (m,)
        Found cluster of every client, at the strategy's nu.
    gradient_norms : ndarray of shape (m,)
        ||grad f_i(alpha_l)|| of every client at its cluster's model; NaN where it did not report.
    fusion_bounds : ndarray of shape (L,)
        lambda (|G_l| - 1) / m, with "auto" by the lambda of the pairs inside a group.
        A cluster can be exactly fused only where no client's gradient norm
        is above it; otherwise lambda is too small for it (docs/methods/fpfc-notes.md, P4).
    theta_norms : ndarray of shape (m, m)
        ||theta_ij||: a nu in a wide gap of them separates the clusters.
    lam : float
        lambda in use, the slope of g at 0; 0 as long as it is searched for. Where rho follows from
        the local steps, the given lambda times sqrt(rho).
    nu : float
        nu in use.
    search : FoundGroups or None
        What the search for the groups found; None before, and with a penalty of one's own.
    path : PathTaken or None
        What came of a `LambdaPath`; None with any other penalty.
    """

    stationarity: float
    primal_residual: float
    labels: NDArray[np.int64]
    gradient_norms: NDArray[np.float64]
    fusion_bounds: NDArray[np.float64]
    theta_norms: NDArray[np.float64]
    lam: float
    nu: float
    search: FoundGroups | None = None
    path: PathTaken | None = None


def diagnose(state: FPFCState, metrics: Mapping[int, Metrics]) -> FPFCDiagnostics:
    """Return the diagnostics of a state; `metrics` are those of the last evaluation by client."""
    source, labels = state.source, state.source.labels()
    stationarity = [m[STATIONARITY] for m in metrics.values() if STATIONARITY in m]
    gradient_norms = [metrics.get(c, {}).get(CLUSTER_GRADIENT) for c in state.clients.ids]
    return FPFCDiagnostics(
        stationarity=max(stationarity, default=np.nan),
        primal_residual=state.pairs.primal_residual(),
        labels=labels,
        gradient_norms=np.array(gradient_norms, dtype=np.float64),
        fusion_bounds=fusion_bound(labels, source.lam_inside),
        theta_norms=state.pairs.theta_norms(),
        lam=source.penalty.lam,
        nu=source.nu,
        **source.report(),
    )
