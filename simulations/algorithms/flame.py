"""FLAME in the app: its settings, and its report of personal, global and hybrid models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from flwr.app import Context
from pydantic import Field
from rich import box
from rich.table import Table
from rich.text import Text
from torch import nn

from clients import FLAMEClient
from fl_admm_strategies import FLAME
from fl_admm_strategies.runtime.strategy import Metrics
from simulations.algorithms.base import Experiment, TorchAlgorithm
from simulations.data import ClientData, full_batch
from simulations.report import NONE, Report

if TYPE_CHECKING:
    from simulations.settings import Settings


class FLAMESettings(TorchAlgorithm):
    """The table ``[algorithm]`` of an experiment with FLAME."""

    models: ClassVar[Mapping[str, str]] = {
        "personal": "personal model",
        "global": "one global model",
        "hm-val": "hybrid, chosen on validation data",
        "hm-oracle": "hybrid, chosen on the test data",
    }

    name: Literal["flame"]
    local_epochs: int = Field(default=1, ge=1)
    lam: float = Field(default=1.0, gt=0)
    rho: float = Field(default=0.1, gt=0)
    anchor: Literal["w_i", "w"] = "w_i"
    theta_step: Literal["fixed", "accuracy"] = "fixed"
    tolerance: float = Field(default=1.0, gt=0)
    tolerance_decay: float = Field(default=0.9, gt=0, le=1)
    max_steps: int = Field(default=1000, ge=1)
    weights: Literal["uniform", "size"] = "uniform"
    duals: Literal["strategy", "client"] = "strategy"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of the theta-step's SGD; not in the paper, but in the authors' code."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Likewise."""

    @property
    def title(self) -> str:
        """The algorithm's name; the paper's rows add -PM, -GM and -HM for the kind of model."""
        return "FLAME"

    def strategy(self, settings: Settings, data: Any, **base: Any) -> FLAME:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        return FLAME(
            lam=self.lam,
            rho=self.rho,
            lr=self.lr,
            local_epochs=self.local_epochs,
            anchor=self.anchor,
            theta_step=self.theta_step,
            tolerance=self.tolerance,
            tolerance_decay=self.tolerance_decay,
            max_steps=self.max_steps,
            weights=self.weights,
            duals=self.duals,
            **base,
        )

    def torch_client(
        self, context: Context, model: nn.Module, own: ClientData, **local: Any
    ) -> FLAMEClient:
        """Build a client, with the validation data that its data set holds out, if any."""
        return FLAMEClient(
            context,
            model,
            validation_loader=None if own.validation is None else full_batch(*own.validation),
            optimizer_fn=partial(
                torch.optim.SGD, momentum=self.momentum, weight_decay=self.weight_decay
            ),
            **local,
        )

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Report how fair each kind of model is, and which one the clients prefer."""
        evaluated = experiment.strategy.evaluate_metrics
        clients = evaluated[max(evaluated)]
        fairness = {
            title: _fairness([own[f"{kind}-loss"] for own in clients.values()])
            for kind, title in self.models.items()
            if all(f"{kind}-loss" in own for own in clients.values())
        }
        table = Table(box=box.SIMPLE, title="Fairness: the test loss of the clients")
        for header in ("model", "mean", "variance", "sample variance"):
            table.add_column(header, justify="left" if header == "model" else "right")
        for title, values in fairness.items():
            row = [values["mean"], values["variance"], values["sample_variance"]]
            table.add_row(title, *(NONE if v is None else f"{v:.4g}" for v in row))
        return Report(
            legend=(
                "Hybrid: each client takes the better of its personal and the global model. Chosen "
                "on the test data, as in the paper's table, it is too good to be true.",
                f"a = λ/m is {self.lam / len(experiment.data.clients):g} and ρ is {self.rho:g}; at "
                "ρ = a the server averages the personal models.",
            ),
            body=(table, self._summary(experiment, clients)),
            extra={"fairness": fairness},
        )

    def _summary(self, experiment: Experiment, clients: Mapping[int, Metrics]) -> Text:
        """Say in two sentences what came out, for somebody who has not read the paper."""
        metric = self.metric(experiment.data)
        scores = self.scores(experiment.data, clients)
        texts = {
            kind: metric.text(scores[title].mean, unit=True)
            for kind, title in self.models.items()
            if title in scores
        }
        by = "val" if "hm-val" in texts else "oracle"
        personal = sum(own[f"hm-{by}-personal"] for own in clients.values())
        where = "validation" if by == "val" else "test"
        return Text.assemble(
            (f"FLAME trained one model for each of {len(experiment.data.clients)} clients", "bold"),
            " and one for all of them.\n",
            f"Mean {metric.measure}: ",
            (texts["personal"], "bold"),
            " with the clients' own models, ",
            (texts["global"], "bold"),
            f" with the one for all. On their {where} data {personal:.0f} of {len(clients)} "
            "clients do better with their own; ",
            (texts[f"hm-{by}"], "bold"),
            " if everybody takes the one that does better there.",
        )


def _fairness(losses: list[float]) -> dict[str, float | None]:
    """Return mean and variances of the clients' test losses (per-sample means, specs 4.3)."""
    return {
        "mean": float(np.mean(losses)),
        "variance": float(np.var(losses)),
        "sample_variance": float(np.var(losses, ddof=1)) if len(losses) > 1 else None,
    }
