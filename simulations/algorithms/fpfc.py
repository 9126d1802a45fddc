"""FPFC in the app: its settings, and its report of the clusters it found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from flwr.app import Context
from pydantic import Field
from rich.text import Text
from torch import nn

from clients import FPFCClient
from fl_admm_strategies import FPFC, L1, MCP, SmoothedSCAD
from fl_admm_strategies.maths.penalties import Penalty
from simulations import plots
from simulations.algorithms.base import Experiment, TorchAlgorithm
from simulations.clusters import (
    ClusteringRow,
    clustering_scores,
    communication_cost,
    diagnostics_table,
)
from simulations.data import ClientData, FederatedData
from simulations.report import NONE, Report

if TYPE_CHECKING:
    from simulations.settings import Settings


class FPFCSettings(TorchAlgorithm):
    """The table ``[algorithm]`` of an experiment with FPFC."""

    models: ClassVar[Mapping[str, str]] = {
        "personal": "personal model",
        "cluster": "cluster model",
        "global": "one global model",
    }

    name: Literal["fpfc"]
    penalty: Literal["scad", "l1", "mcp"] = "scad"
    lam: float
    a: float = 3.7
    xi: float = 1e-4
    gamma: float = 3.0
    rho: float = 1.0
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    lr_decay_every: int = Field(default=1, ge=1)
    clustered: str | None = None
    nu: float = 0.1

    @property
    def title(self) -> str:
        """The algorithm's name as the paper's tables have it."""
        return {"scad": "FPFC", "l1": "FPFC-l1", "mcp": "FPFC-MCP"}[self.penalty]

    def strategy(self, settings: Settings, data: Any, **base: Any) -> FPFC:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        penalty: Penalty
        if self.penalty == "scad":
            penalty = SmoothedSCAD(self.lam, a=self.a, xi=self.xi)
        elif self.penalty == "l1":
            penalty = L1(self.lam)
        else:
            penalty = MCP(self.lam, gamma=self.gamma)

        def decayed(server_round: int) -> float:
            # Rounds count from 1 here and from 0 in the paper (specs 6.2 A15).
            return self.lr * self.lr_decay ** math.floor((server_round - 1) / self.lr_decay_every)

        return FPFC(
            penalty,
            rho=self.rho,
            lr=self.lr if self.lr_decay == 1.0 else decayed,
            local_epochs=self.local_epochs,
            clustered=self.clustered,
            nu=self.nu,
            **base,
        )

    def torch_client(
        self, context: Context, model: nn.Module, own: ClientData, **local: Any
    ) -> FPFCClient:
        """Build a client."""
        return FPFCClient(context, model, **local)

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Report the clusters: how many, which, and whether λ and ν can be trusted."""
        data, strategy = experiment.data, cast(FPFC, experiment.strategy)
        found = strategy.diagnostics()
        clustering = clustering_scores(found.theta_norms, data.true_clusters)
        # Without strategy.global_arrays' copy: only sizes are asked for.
        shared = sum(array.size for array in strategy.state.shared.values())
        cost = communication_cost(
            len(data.clients),
            sum(array.size for array in strategy.global_model().values()) - shared,
            [len(replies) for replies in strategy.train_metrics.values()],
            shared,
        )
        self._draw(experiment, found.labels, out)
        unknown = f" ({NONE}: truth unknown)." if clustering[0].ari is None else "."
        return Report(
            cells={
                **{title: {"cost": cost} for title in self.models.values()},
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
                    lam=self.lam,
                    stationarity=found.stationarity,
                    consensus=found.primal_residual,
                    clustering=clustering,
                ),
                self._summary(
                    experiment, clustering_scores(found.theta_norms, data.true_clusters, (self.nu,))
                ),
            ),
            files={
                "distances.png": "how far apart the client models are",
                "embedding.png": "the client models in two dimensions",
            },
            extra={"clustering": clustering, "cost": cost, "shared_dim": shared},
        )

    def _draw(self, experiment: Experiment, labels: Any, out: Path) -> None:
        omega = cast(FPFC, experiment.strategy).state.pairs.omega
        plots.distance_heat_map(
            omega, labels, path=out / "distances.png", title="Distances between the client models"
        )
        plots.embedding(
            omega,
            labels,
            experiment.data.true_clusters,
            path=out / "embedding.png",
            title="The client models in two dimensions",
            seed=experiment.settings.seed,
        )

    def _summary(self, experiment: Experiment, clustering: Sequence[ClusteringRow]) -> Text:
        """Say in two sentences what came out, for somebody who has not read the paper."""
        data: FederatedData = experiment.data
        (row,) = clustering
        groups = f"{row.num} group{'' if row.num == 1 else 's'}"
        truth = ""
        if row.ari == 1:
            truth = ", exactly the true ones"
        elif row.ari is not None:
            assert data.true_clusters is not None  # it has a score
            num_true = len(np.unique(data.true_clusters))
            truth = f"; there are {num_true} true ones (ARI {row.ari:.2f}; 1 is a perfect match)"
        evaluated = experiment.strategy.evaluate_metrics
        scores = self.scores(data, evaluated[max(evaluated)])
        metric = self.metric(data)
        own, one = (
            metric.text(scores[self.models[kind]].mean, unit=True)
            for kind in ("personal", "global")
        )
        return Text.assemble(
            (f"{self.title} found {groups} among {len(data.clients)} clients", "bold green"),
            f"{truth}. It was not told how many there are.\n",
            f"Mean {metric.measure}: ",
            (own, "bold"),
            " with the clients' own models, ",
            (one, "bold"),
            " with one model for all (their mean).",
        )
