"""FedMC-ADMM in the app: its settings, and its report beside two methods that see all ratings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from flwr.app import ArrayRecord, Context
from pydantic import Field
from rich import box
from rich.table import Table
from rich.text import Text

from clients import FedMCADMMClient
from fl_admm_strategies import FedMCADMM, L1Norm, SquaredL2, initial_item_factors
from fl_admm_strategies.maths.regularizers import Regularizer
from simulations.algorithms.base import Algorithm, Experiment
from simulations.als import alternating_least_squares, rmse_of_factors, rmse_of_mean
from simulations.data import RatingsData
from simulations.report import METRICS, Metric, Report, Score

if TYPE_CHECKING:
    from simulations.settings import Settings

_METRIC = dataclasses.replace(
    METRICS["rmse"],
    digits=4,
    legend="RMSE: root of the mean squared error over all clients' test ratings together, in "
    "stars; nothing is clipped or rounded.",
    axis="test RMSE (stars)",
)
_FACTORS = "federated factors"


class FedMCADMMSettings(Algorithm):
    """The table ``[algorithm]`` of an experiment with FedMC-ADMM."""

    data_type: ClassVar[type] = RatingsData
    models: ClassVar[Mapping[str, str]] = {"global": _FACTORS}

    name: Literal["fedmc-admm"]
    rank: int = Field(ge=1)
    beta: float = Field(default=1.0, gt=0)
    inner_steps: int = Field(default=10, ge=1)
    init_scale: float = Field(default=1.0, gt=0)
    regularizer: Literal["l2", "l1"] = "l2"
    lam: float = Field(default=1e-6, ge=0)
    """lambda, of the users' factors."""
    gamma: float = Field(default=1e-6, ge=0)
    """gamma, of the items' factors."""
    y0: Literal["zero", "handshake"] = "zero"
    duals: Literal["strategy", "client"] = "strategy"
    als_lam: float = Field(default=5.0, gt=0)
    """Ridge of the centralised alternating least squares that is reported beside."""
    als_sweeps: int = Field(default=20, ge=1)

    @property
    def title(self) -> str:
        """The algorithm's name as the paper has it."""
        return "FedMC-ADMM"

    def _norm(self, weight: float) -> Regularizer:
        return SquaredL2(weight) if self.regularizer == "l2" else L1Norm(weight)

    def strategy(self, settings: Settings, data: Any, **base: Any) -> FedMCADMM:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        return FedMCADMM(
            self._norm(self.gamma),
            beta=self.beta,
            inner_steps=self.inner_steps,
            init_scale=self.init_scale,
            y0=self.y0,
            duals=self.duals,
            **base,
        )

    def initial_arrays(self, settings: Settings, data: Any) -> ArrayRecord:
        """Return V^0."""
        return initial_item_factors(
            self.rank, data.num_items, seed=settings.seed, scale=self.init_scale
        )

    def client(self, context: Context, settings: Settings, data: Any) -> FedMCADMMClient:
        """Build a client over its users' ratings."""
        own = data.clients[int(context.node_config["partition-id"])]
        return FedMCADMMClient(
            context,
            own.train,
            self._norm(self.lam),
            test=own.test,
            mean=data.mean,
            std=data.std,
        )

    def metric(self, data: Any) -> Metric:
        """Return the RMSE, with the digits that tell methods of completion apart."""
        return _METRIC

    def scores(self, data: Any, clients: Mapping[int, Mapping[str, float]]) -> dict[str, Score]:
        """Pool the test ratings of all clients: each counts alike, as in the paper."""
        total = math.fsum(own["squared-error"] for own in clients.values())
        count = math.fsum(own["test-ratings"] for own in clients.values())
        return {_FACTORS: Score(mean=math.sqrt(total / count))}

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Say how far the factors are from those of one who sees all ratings."""
        data, strategy = cast(RatingsData, experiment.data), cast(FedMCADMM, experiment.strategy)
        train, test = ([getattr(own, part) for own in data.clients] for part in ("train", "test"))
        users, items = alternating_least_squares(
            train,
            rank=self.rank,
            lam=self.als_lam,
            sweeps=self.als_sweeps,
            seed=experiment.settings.seed,
        )
        last = strategy.evaluate_metrics[max(strategy.evaluate_metrics)]
        federated = self.scores(data, last)[_FACTORS].mean
        central = data.std * rmse_of_factors(test, users, items)
        constant = data.std * rmse_of_mean(train, test)
        (factors,) = strategy.global_model().values()
        penalty = strategy.regularizer.value(factors)
        objective = math.fsum(own["loss"] for own in last.values()) / len(last) + penalty
        table = Table(box=box.SIMPLE, title="Test RMSE, in stars")
        table.add_column("method")
        table.add_column("RMSE", justify="right")
        for method, value in (
            (f"{self.title}, rank {self.rank}", federated),
            ("alternating least squares with all ratings in one place, same rank", central),
            ("the mean training rating, always", constant),
        ):
            table.add_row(method, f"{value:.4f}")
        share = (constant - federated) / (constant - central)
        verdict = Text.assemble(
            (
                f"{self.title} predicts a rating to within {federated:.3f} stars (RMSE)",
                "bold green",
            ),
            f" for {data.num_users:,} users and {data.num_items:,} items at "
            f"{len(data.clients)} clients, none of which sent a rating or its users' factors."
            f"\nThat is {share:.0%} of what alternating least squares gains over the mean rating "
            "with all ratings in one place.",
        )
        return Report(
            note=f"objective Φ {objective:.6g}",
            body=(table, verdict),
            extra={
                "objective": objective,
                "als_rmse": central,
                "mean_rmse": constant,
                "scaled_rmse": federated / data.std,
                "num_users": data.num_users,
                "num_items": data.num_items,
                "train_ratings": sum(map(len, train)),
                "test_ratings": sum(map(len, test)),
            },
        )
