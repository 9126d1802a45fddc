"""FedMC-ADMM's report: its factors beside two methods that see all ratings."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field
from rich import box
from rich.table import Table
from rich.text import Text

from ..problems import FactorProblem, Problem
from ..settings import ReportSettings
from .als import alternating_least_squares, rmse_of_factors, rmse_of_mean
from .base import Finished, MethodReport, Report


class FedMCADMMReportSettings(ReportSettings):
    """The table ``[report]``: the centralised alternating least squares to compare with."""

    als_lam: Annotated[float, Field(gt=0)] = 5.0
    """Ridge of the alternating least squares to compare with."""
    als_sweeps: Annotated[int, Field(ge=1)] = 20
    """How often these solve for both blocks of factors."""


class FedMCADMMReport(MethodReport):
    """How much of what one gains who sees all ratings the federation gains."""

    problems: ClassVar[type[Problem] | None] = FactorProblem
    settings: ClassVar[type[ReportSettings]] = FedMCADMMReportSettings

    def report(self, run: Finished) -> Report:
        """Say how far the factors are from those of one who sees all ratings."""
        data, strategy, settings = run.problem.data, run.strategy, run.settings
        assert isinstance(settings.report, FedMCADMMReportSettings)
        rank = settings.model.rank
        train, test = ([getattr(own, part) for own in data.clients] for part in ("train", "test"))
        users, items = alternating_least_squares(
            train,
            rank=rank,
            lam=settings.report.als_lam,
            sweeps=settings.report.als_sweeps,
            seed=settings.seed,
        )
        (score,) = run.scores.models.values()
        federated = score.mean
        central = data.std * rmse_of_factors(test, users, items)
        constant = data.std * rmse_of_mean(train, test)
        (factors,) = strategy.global_model().values()
        losses = [own["loss"] for own in run.clients.values()]
        objective = math.fsum(losses) / len(losses) + strategy.regularizer.value(factors)
        levels = {
            "alternating least squares with all ratings in one place, same rank": central,
            "the mean training rating, always": constant,
        }
        table = Table(box=box.SIMPLE, title="Test RMSE, in stars")
        table.add_column("method")
        table.add_column("RMSE", justify="right")
        for method, value in {f"{strategy.title}, rank {rank}": federated, **levels}.items():
            table.add_row(method, f"{value:.4f}")
        share = (constant - federated) / (constant - central)
        verdict = Text.assemble(
            (
                f"{strategy.title} predicts a rating to within {federated:.3f} stars (RMSE)",
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
            levels=levels,
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
