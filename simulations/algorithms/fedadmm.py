"""FedADMM in the app: its settings and its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flwr.app import Context
from pydantic import Field
from rich.text import Text
from torch import nn

from clients import FedADMMClient
from fl_admm_strategies import FedADMM
from simulations.algorithms.base import Experiment, TorchAlgorithm
from simulations.data import ClientData
from simulations.report import Report

if TYPE_CHECKING:
    from simulations.settings import Settings


class FedADMMSettings(TorchAlgorithm):
    """The table ``[algorithm]`` of an experiment with FedADMM."""

    models: ClassVar[Mapping[str, str]] = {"global": "one global model"}

    name: Literal["fedadmm"]
    local_epochs: int = Field(default=3, ge=1)
    rho: float = Field(default=0.01, gt=0)
    weights: Literal["uniform", "size"] = "uniform"
    duals: Literal["strategy", "client"] = "strategy"

    @property
    def title(self) -> str:
        """The algorithm's name as the published tables have it."""
        return "FedADMM"

    def strategy(self, settings: Settings, data: Any, **base: Any) -> FedADMM:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        return FedADMM(
            rho=self.rho,
            lr=self.lr,
            local_epochs=self.local_epochs,
            weights=self.weights,
            duals=self.duals,
            **base,
        )

    def torch_client(
        self, context: Context, model: nn.Module, own: ClientData, **local: Any
    ) -> FedADMMClient:
        """Build a client of `model`."""
        return FedADMMClient(context, model, **local)

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Say in two sentences what came out, for somebody who has not read the paper."""
        evaluated = experiment.strategy.evaluate_metrics
        metric = self.metric(experiment.data)
        (score,) = self.scores(experiment.data, evaluated[max(evaluated)]).values()
        text = Text.assemble(
            (f"FedADMM trained one model with {len(experiment.data.clients)} clients", "bold"),
            ", each of which keeps a copy of its own and a dual variable that holds it near the "
            "others'.\n",
            f"Mean {metric.measure} of that model on the clients' own test data: ",
            (metric.text(score.mean, unit=True), "bold"),
            ".",
        )
        return Report(body=(text,))
