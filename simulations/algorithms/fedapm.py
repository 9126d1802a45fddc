"""FedAPM in the app: its settings, and its report of the clients' own models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from flwr.app import Context
from pydantic import Field
from rich.text import Text
from torch import nn

from clients import FedAPMClient
from clients.toolkit.torch_client import MetricFn
from fl_admm_strategies import FedAPM
from simulations.algorithms.base import Experiment, TorchAlgorithm
from simulations.data import ClientData, FederatedData
from simulations.metrics import auc, weighted_f1
from simulations.models import initialise
from simulations.report import Report

if TYPE_CHECKING:
    from simulations.settings import Settings


class FedAPMSettings(TorchAlgorithm):
    """The table ``[algorithm]`` of an experiment with FedAPM."""

    models: ClassVar[Mapping[str, str]] = {
        "personal": "personal model",
        "global": "own part with the shared one",
    }

    name: Literal["fedapm"]
    personal: str
    """Regular expression over the model's arrays: what every client keeps for itself."""
    local_epochs: int = Field(default=3, ge=1)
    personal_epochs: int = Field(default=3, ge=1)
    rho: float = Field(default=0.01, gt=0)
    sigma: float = Field(default=0.01, ge=0)
    u_start: Literal["local", "server"] = "local"
    tolerance: float | None = Field(default=None, gt=0)
    tolerance_decay: float = Field(default=0.9, gt=0, le=1)
    max_steps: int = Field(default=1000, ge=1)
    duals: Literal["strategy", "client"] = "strategy"
    l2: float = Field(default=0.0, ge=0)
    """lambda of lambda/2 ||(v, u)||^2 in every f_i; the authors' code has .01 (specs 4.1)."""

    @property
    def title(self) -> str:
        """The algorithm's name as the paper's tables have it."""
        return "FedAPM"

    def strategy(self, settings: Settings, data: Any, **base: Any) -> FedAPM:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        return FedAPM(
            self.personal,
            rho=self.rho,
            sigma=self.sigma,
            lr=self.lr,
            local_epochs=self.local_epochs,
            personal_epochs=self.personal_epochs,
            u_start=self.u_start,
            tolerance=self.tolerance,
            tolerance_decay=self.tolerance_decay,
            max_steps=self.max_steps,
            duals=self.duals,
            **base,
        )

    def client(self, context: Context, settings: Settings, data: Any) -> FedAPMClient:
        """Build a client whose v_i starts where everybody's does (specs 6.1, 11)."""
        assert settings.model is not None  # `check` has seen to it
        client = cast(FedAPMClient, super().client(context, settings, data))
        initialise(client.model, settings.seed, settings.model.init)
        return client

    def torch_client(
        self, context: Context, model: nn.Module, own: ClientData, **local: Any
    ) -> FedAPMClient:
        """Build a client of `model`."""
        # The step scales the gradient of f_i by alpha_i = 1/m; so it does that of its l2 term.
        decay = self.l2 / int(context.node_config["num-partitions"])
        return FedAPMClient(
            context, model, optimizer_fn=partial(torch.optim.SGD, weight_decay=decay), **local
        )

    def test_metrics(self, data: FederatedData) -> dict[str, MetricFn]:
        """Return what the paper's tables have: accuracy, F1 and AUC of a classification."""
        metrics = super().test_metrics(data)
        if data.task == "classification":
            metrics |= {"f1": weighted_f1, "auc": auc}
        return metrics

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Say what stayed with the clients, and in two sentences what came out."""
        strategy = cast(FedAPM, experiment.strategy)
        spec = experiment.arrays.to_numpy_ndarrays()
        sizes = dict(zip(experiment.arrays, (array.size for array in spec), strict=True))
        shared = sum(sizes[name] for name in strategy.reply_spec())
        total = sum(sizes.values())
        evaluated = strategy.evaluate_metrics
        metric = self.metric(experiment.data)
        scores = self.scores(experiment.data, evaluated[max(evaluated)])
        texts = {
            kind: metric.text(scores[title].mean, unit=True) for kind, title in self.models.items()
        }
        legend = ["Personal model: a client's own part with its own copy of the shared one."]
        extra: dict[str, Any] = {"shared": shared, "personal": total - shared}
        if (gap := strategy.round_metrics().get("gap")) is not None:
            legend.append(
                f"Gap: {gap:.4g}, the mean distance of the participants' copies from the shared "
                "part that they got, in the last round."
            )
            extra["gap"] = gap
        text = Text.assemble(
            (
                f"FedAPM trained a model for each of {len(experiment.data.clients)} clients: "
                f"{shared:,} of its {total:,} parameters they share",
                "bold",
            ),
            ", the others never leave their client.\n",
            f"Mean {metric.measure}: ",
            (texts["personal"], "bold"),
            " with a client's own copy of the shared part, ",
            (texts["global"], "bold"),
            " with the shared part itself.",
        )
        return Report(legend=tuple(legend), body=(text,), extra=extra)
