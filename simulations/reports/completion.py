"""The report of recommenders: beside methods that see all ratings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from rich.table import Table
from rich.text import Text

from clients import Ratings
from clients.toolkit.solving.factors import predicted
from fl_admm_strategies.algorithms.fedease import ease_weights
from fl_admm_strategies.algorithms.shared.completion import ranking_means

from ..data.federated import generator
from ..problems import FactorProblem, Problem
from ..problems.factors import RANK_AT, RELEVANT
from ..settings.tables import ReportSettings
from . import yardsticks
from .base import NONE, Finished, MethodReport, Report
from .table import small_table
from .yardsticks import Matrix

_MOST_ITEMS = 5000  # of which EASE is computed: an inverse of that size takes half a minute


class CompletionReportSettings(ReportSettings):
    """The table ``[report]``: what to compare with that sees all ratings."""

    als_lam: Annotated[float, Field(gt=0)] = 5.0
    """Ridge of the alternating least squares to compare with."""
    als_sweeps: Annotated[int, Field(ge=1)] = 20
    """How often these solve for both blocks of factors."""
    item_mean_prior: Annotated[float, Field(ge=0)] = 10.0
    """Ratings of the mean that an item is given beside its own where its mean predicts."""
    implicit_lam: Annotated[float, Field(gt=0)] = 20.0
    """Ridge of the least squares that rank, which take every rating for an interaction."""
    ease_lam: Annotated[float, Field(gt=0)] = 400.0
    """Ridge of EASE."""


class CompletionReport(MethodReport):
    """How much of what one gains who sees all ratings the federation gains."""

    problems: ClassVar[type[Problem] | None] = FactorProblem
    settings: ClassVar[type[ReportSettings]] = CompletionReportSettings

    def report(self, run: Finished) -> Report:
        """Say how far the run is from one who sees all ratings."""
        data, strategy, settings = run.problem.data, run.strategy, run.settings
        assert isinstance(settings.report, CompletionReportSettings)
        everyone = yardsticks.joined([client.train for client in data.clients])
        tested = yardsticks.joined([client.test for client in data.clients])
        rank, ridge = settings.model.rank, settings.report.als_lam
        users, items = yardsticks.alternating_least_squares(
            everyone,
            generator(settings.seed, "als").random((data.num_items, rank)),
            lam=ridge,
            sweeps=settings.report.als_sweeps,
        )
        with_biases = {
            k: yardsticks.least_squares(
                everyone,
                generator(settings.seed, "biases").normal(0, 0.1, (data.num_items, k))
                * (np.arange(k) < k - 1),
                lam=ridge,
                sweeps=settings.report.als_sweeps,
            )
            for k in sorted({1, rank})
        }
        ranked = self._ranked(run, everyone, (users, items), with_biases)
        found = {
            "ranking": ranked,
            "num_users": data.num_users,
            "num_items": data.num_items,
            "train_ratings": len(everyone),
            "test_ratings": len(tested),
        }
        if run.problem.metric.key == "ndcg":
            return _of_ranking(run, ranked, found)
        by_item, mean = yardsticks.item_means(everyone, settings.report.item_mean_prior)
        (score,) = run.scores.models.values()
        federated, place = score.mean, (tested.users, tested.items)
        products = np.einsum("kr,kr->k", users[tested.users], items[tested.items])
        central, item_mean, constant = (
            data.std * yardsticks.rmse(tested, predictions)
            for predictions in (products, by_item[tested.items], mean)
        )
        biased = {
            k: data.std * yardsticks.rmse(tested, predicted(of_users, of_items, *place, centre))
            for k, (of_users, of_items, centre) in with_biases.items()
        }
        (factors,) = strategy.global_model().values()
        losses = [client["loss"] for client in run.clients.values()]
        of_items = strategy.regularizer.value(factors) / (len(losses) if strategy.is_summed else 1)
        objective = math.fsum(losses) / len(losses) + of_items
        nonzeros, entries = (
            math.fsum(client[name] for client in run.clients.values())
            for name in ("user-nonzeros", "user-entries")
        )
        nnz_users, nnz_items = nonzeros / entries, np.count_nonzero(factors) / factors.size
        levels = {
            "alternating least squares with all ratings in one place, same rank": central,
            "the item's mean rating, drawn to that of all": item_mean,
            "the mean training rating, always": constant,
        }
        table = small_table("Test RMSE, in stars", "Method", "RMSE")
        for method, value in {f"{strategy.title}, rank {rank}": federated, **levels}.items():
            table.add_row(method, f"{value:.4f}")
        for method, value in {
            "mean and biases of users and items, all ratings in one place": biased[1],
            f"the same with {rank - 1} factors": biased[rank],
        }.items():
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
            f"with all ratings in one place; biases of users and items alone come to "
            f"{biased[1]:.3f}.",
        )
        return Report(
            note=f"objective Φ {objective:.6g}; not zero: {nnz_users:.0%} of U, "
            f"{nnz_items:.0%} of V",
            body=(table, _ranking_table(ranked), verdict),
            levels=levels,
            extra=found
            | {
                "objective": objective,
                "als_rmse": central,
                "item_mean_rmse": item_mean,
                "biases_rmse": biased[1],
                "als_biases_rmse": biased[rank],
                "mean_rmse": constant,
                "scaled_rmse": federated / data.std,
                "nnz_users": nnz_users,
                "nnz_items": nnz_items,
            },
        )

    def _ranked(
        self,
        run: Finished,
        train: Ratings,
        factors: tuple[Matrix, Matrix],
        with_biases: Mapping[int, tuple[Matrix, Matrix, float]],
    ) -> dict[str, dict[str, float]]:
        """Return how well items are ranked by the run and by yardsticks with all data."""
        data, settings = run.problem.data, run.settings
        assert isinstance(settings.report, CompletionReportSettings)
        rank, relevant = settings.model.rank, (RELEVANT - data.mean) / data.std
        parts = [(client.train, client.test) for client in data.clients]

        def means(scores: Callable[[slice, Ratings], Matrix]) -> dict[str, float]:
            return yardsticks.ranking(scores, parts, relevant).means()

        def by(users: Matrix, items: Matrix) -> dict[str, float]:
            return means(lambda rows, _: users[rows] @ items.T)

        found: dict[str, dict[str, float]] = {
            run.strategy.title: dict(ranking_means(run.clients)),
            "popularity: how many rated the item": means(lambda *_: yardsticks.counts(train)),
            "ALS, same rank": by(*factors),
        }
        for k, (users, items, _) in with_biases.items():
            partner = np.hstack([users[:, :-1], np.ones((len(users), 1))])  # of the items' biases
            found["biases of the items" if k == 1 else f"the same with {k - 1} factors"] = by(
                partner, items
            )
        ones = replace(train, values=np.ones(len(train)))
        first = generator(settings.seed, "implicit").normal(0, 0.1, (data.num_items, rank))
        users, items, _ = yardsticks.least_squares(
            ones, first, lam=settings.report.implicit_lam, sweeps=8, feedback="implicit"
        )
        found["implicit ALS, same rank"] = by(users, items)
        if data.num_items <= _MOST_ITEMS:
            weights = ease_weights(yardsticks.pair_counts(train), settings.report.ease_lam)
            found["EASE"] = means(lambda _, own: np.asarray(own.pattern(weights.dtype) @ weights))
        return found


def _of_ranking(
    run: Finished, ranked: dict[str, dict[str, float]], found: dict[str, Any]
) -> Report:
    """Return the report of a run that ranking heads."""
    title = run.strategy.title
    levels = {name: means["ndcg"] for name, means in ranked.items() if name != title}
    best = max(levels, key=lambda name: levels[name])
    verdict = Text.assemble(
        (f"{title} ranks with an NDCG of {ranked[title]['ndcg']:.3f}", "bold green"),
        f" at {RANK_AT} for {found['num_users']:,} users and {found['num_items']:,} items at "
        f"{run.problem.num_clients} clients. With all ratings in one place {best} comes to "
        f"{levels[best]:.3f}.",
    )
    return Report(body=(_ranking_table(ranked), verdict), levels=levels, extra=found)


def _ranking_table(ranked: dict[str, dict[str, float]]) -> Table:
    """Return the table of the ranking metrics."""
    table = small_table(
        f"Ranking of all items, at {RANK_AT}; relevant: {RELEVANT:g} stars and more",
        "Method",
        "HR",
        "precision",
        "recall",
        "NDCG",
        "coverage",
    )
    for method, means in ranked.items():
        names = ("hr", "precision", "recall", "ndcg", "coverage")
        table.add_row(method, *(f"{means[n]:.3f}" if n in means else NONE for n in names))
    return table
