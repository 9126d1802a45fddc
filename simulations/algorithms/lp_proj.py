"""Lp-Proj by ADMM in the app: its settings, and its report of what little it sends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flwr.app import Context
from pydantic import Field
from rich.text import Text
from torch import nn

from clients import LpProjADMMClient
from fl_admm_strategies import LpProjADMM
from simulations.algorithms.base import Experiment, TorchAlgorithm
from simulations.data import ClientData
from simulations.report import Report

if TYPE_CHECKING:
    from simulations.settings import Settings


class LpProjADMMSettings(TorchAlgorithm):
    """The table ``[algorithm]`` of an experiment with Lp-Proj by ADMM."""

    models: ClassVar[Mapping[str, str]] = {"personal": "personal model"}

    name: Literal["lp-proj-admm"]
    local_epochs: int = Field(default=1, ge=1)
    lam: float = Field(default=1.0, gt=0)
    rho: float = Field(default=0.1, gt=0)
    dimension: int = Field(default=10, ge=1)
    weights: Literal["uniform", "size"] = "uniform"

    @property
    def title(self) -> str:
        """The algorithm's name."""
        return "ADMM-Lp-Proj-2"

    def strategy(self, settings: Settings, data: Any, **base: Any) -> LpProjADMM:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        return LpProjADMM(
            lam=self.lam,
            rho=self.rho,
            lr=self.lr,
            local_epochs=self.local_epochs,
            dimension=self.dimension,
            weights=self.weights,
            **base,
        )

    def torch_client(
        self, context: Context, model: nn.Module, own: ClientData, **local: Any
    ) -> LpProjADMMClient:
        """Build a client."""
        return LpProjADMMClient(context, model, **local)

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Say how much was sent, and that there is no global model."""
        clients = len(experiment.data.clients)
        evaluated = experiment.strategy.evaluate_metrics
        scores = self.scores(experiment.data, evaluated[max(evaluated)])
        metric = self.metric(experiment.data)
        own = metric.text(scores[self.models["personal"]].mean, unit=True)
        return Report(
            body=(
                Text.assemble(
                    (f"The models of {clients} clients were held together", "bold"),
                    f" in {self.dimension} numbers a client and round, random projections of "
                    "themselves.\n",
                    f"Mean {metric.measure}: ",
                    (own, "bold"),
                    " with the clients' own models; there is no other model.",
                ),
            ),
        )
