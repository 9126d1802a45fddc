"""The report of matrix completion: factors beside methods that see all ratings."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from rich.text import Text

from ..data.federated import generator
from ..problems import FactorProblem, Problem
from ..settings.tables import ReportSettings
from .base import Finished, MethodReport, Report
from .table import small_table
from .yardsticks import alternating_least_squares, item_means, rmse_of_factors, rmse_of_items


class CompletionReportSettings(ReportSettings):
    """The table ``[report]``: what to compare with that sees all ratings."""

    als_lam: Annotated[float, Field(gt=0)] = 5.0
    """Ridge of the alternating least squares to compare with."""
    als_sweeps: Annotated[int, Field(ge=1)] = 20
    """How often these solve for both blocks of factors."""
    popularity_prior: Annotated[float, Field(ge=0)] = 10.0
    """Ratings of the mean that an item is given beside its own where popularity predicts."""


class CompletionReport(MethodReport):
    """How much of what one gains who sees all ratings the federation gains."""

    problems: ClassVar[type[Problem] | None] = FactorProblem
    settings: ClassVar[type[ReportSettings]] = CompletionReportSettings

    def report(self, run: Finished) -> Report:
        """Say how far the factors are from those of one who sees all ratings."""
        data, strategy, settings = run.problem.data, run.strategy, run.settings
        assert isinstance(settings.report, CompletionReportSettings)
        rank = settings.model.rank
        train = [client.train for client in data.clients]
        test = [client.test for client in data.clients]
        users, items = alternating_least_squares(
            train,
            generator(settings.seed, "als").random((data.num_items, rank)),
            lam=settings.report.als_lam,
            sweeps=settings.report.als_sweeps,
        )
        popular, mean = item_means(train, settings.report.popularity_prior)
        (score,) = run.scores.models.values()
        federated = score.mean
        central = data.std * rmse_of_factors(test, users, items)
        popularity = data.std * rmse_of_items(test, popular)
        constant = data.std * rmse_of_items(test, np.full_like(popular, mean))
        (factors,) = strategy.global_model().values()
        losses = [client["loss"] for client in run.clients.values()]
        objective = math.fsum(losses) / len(losses) + strategy.regularizer.value(factors)
        nonzeros, entries = (
            math.fsum(client[name] for client in run.clients.values())
            for name in ("user-nonzeros", "user-entries")
        )
        nnz_users, nnz_items = nonzeros / entries, np.count_nonzero(factors) / factors.size
        levels = {
            "alternating least squares with all ratings in one place, same rank": central,
            "popularity: the item's mean rating, drawn to that of all": popularity,
            "the mean training rating, always": constant,
        }
        table = small_table("Test RMSE, in stars", "Method", "RMSE")
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
            note=f"objective Φ {objective:.6g}; not zero: {nnz_users:.0%} of U, "
            f"{nnz_items:.0%} of V",
            body=(table, verdict),
            levels=levels,
            extra={
                "objective": objective,
                "als_rmse": central,
                "popularity_rmse": popularity,
                "mean_rmse": constant,
                "scaled_rmse": federated / data.std,
                "nnz_users": nnz_users,
                "nnz_items": nnz_items,
                "num_users": data.num_users,
                "num_items": data.num_items,
                "train_ratings": sum(map(len, train)),
                "test_ratings": sum(map(len, test)),
            },
        )
