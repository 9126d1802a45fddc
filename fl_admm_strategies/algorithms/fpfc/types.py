"""What `FPFC` keeps, sends and reports, as dataclasses; the method itself is in `fpfc`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ...maths.clienttable import ClientTable
from ...maths.clustering import NormDistribution
from ...maths.pairs import PairwiseStore
from ...maths.penalties import Penalty, penalty_from_text, penalty_to_text
from ...runtime.common.settings import as_text
from ...runtime.messages.schema import Instruction
from .path import PathProgress, PathTaken
from .search import FoundGroups, GroupSearch

KINDS = {
    "personal": "personal model",
    "cluster": "cluster model",
    "global": "one global model",
}
"""The models that a run has, and newcomers after it."""


class SetPenalty:
    """The penalty that a run was given, and the one that was set in its place since, if any.

    Parameters
    ----------
    given : Penalty, LambdaPath or "auto"

    Attributes
    ----------
    current : Penalty or None
        None: that which was given.
    """

    self_checked: ClassVar[bool] = True

    def __init__(self, given: Any) -> None:
        self.given = given
        self.current: Penalty | None = None

    def state_arrays(self) -> dict[str, NDArray[np.uint8]]:
        """Return both as plain arrays."""
        current = "" if self.current is None else penalty_to_text(self.current)
        texts = {"given": as_text(self.given) or "", "current": current}
        return {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what was set in a run that was given the same; another was given on purpose.

        Raises
        ------
        ValueError
            If an array is missing or no penalty.
        """
        own = self.state_arrays()
        if missing := sorted(own.keys() - arrays.keys()):
            raise ValueError(f"The saved penalty lacks {missing}. Was the checkpoint cut short?")
        if np.array_equal(arrays["given"], own["given"]) and arrays["current"].size:
            text = arrays["current"].tobytes().decode(errors="replace")
            self.current = penalty_from_text(text)


@dataclass
class FPFCState:
    """The server's variables.

    Attributes
    ----------
    penalty : SetPenalty
        The penalty, where it was set in the course of the run.
    pairs : PairwiseStore
        The client models omega, shape (m, d), and theta_ij, v_ij of every pair.
    averaged_arrays : Arrays
        phi, the arrays that are averaged and not clustered, by name.
    clients : ClientTable
        Rows ``num_examples``: n_i as last reported, 0 before a client's first upload; and
        ``buffers``, where the model has some: see `OwnBuffers`.
    """

    penalty: SetPenalty
    pairs: PairwiseStore
    averaged_arrays: Arrays
    clients: ClientTable


@dataclass
class FPFCSearchState(FPFCState):
    """The server's variables where lambda is found in the run.

    Attributes
    ----------
    search : GroupSearch
        How far the search is, and what it found.
    """

    search: GroupSearch


@dataclass
class FPFCPathState(FPFCState):
    """The server's variables where the run goes along a path of lambdas.

    Attributes
    ----------
    path : PathProgress
        How far it has come. `clients` has for every client the metric as last reported and, at
        every lambda, its cluster.
    """

    path: PathProgress


@dataclass(frozen=True)
class FPFCInstruction(Instruction):
    """What a client gets: zeta_i and phi; omega_i where it may not hold it.

    In the search for groups: how many models to train or measure (`candidates`), the first of them
    in the anchor, the blocks of the others in `more`; the share of its samples that the client
    holds out, chosen by a seed of its own; the `folds` of one that holds none out; and whether it
    is `choosing` among groups, and so measures on the samples that it trains on. On a path of
    lambdas: what it is to `monitor` on those held out.
    With `others_fixed` only the clustered block is trained.
    """

    anchor: Arrays
    start: Arrays | None
    lr: float
    local_epochs: int
    rho: float
    clustered: list[str]
    more: Arrays | None = None
    candidates: int | None = None
    held_out: float | None = None
    held_out_seed: int | None = None
    folds: int | None = None
    choosing: bool | None = None
    monitor: str | None = None
    others_fixed: bool | None = None


@dataclass(frozen=True)
class FPFCEvaluation(Instruction):
    """The models to evaluate; (1/m) sum_j v_ij, where the client is to report its gradients."""

    personal: Arrays
    cluster: Arrays
    global_: Arrays
    mean_dual: Arrays | None
    clustered: list[str]


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
        lambda (|G_l| - 1) / m: a cluster can be exactly fused only where no client's gradient norm
        is above it; otherwise lambda is too small for that cluster (docs/methods/fpfc.md, P4).
    theta_norms : ndarray of shape (m, m)
        ||theta_ij||.
    norm_distribution : NormDistribution or None
        Quantiles of ||theta_ij|| over the pairs: a nu in a wide gap separates the clusters. None
        where one client is alone.
    clusters_at : dict of float to int
        Number of clusters at several nu.
    lam : float
        lambda in use; 0 as long as it is searched for.
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
    norm_distribution: NormDistribution | None
    clusters_at: dict[float, int]
    lam: float
    nu: float
    search: FoundGroups | None
    path: PathTaken | None
