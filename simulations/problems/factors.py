"""Ratings: predict those that are missing, by factors of users and items, or rank the items."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from flwr.app import ArrayRecord
from pydantic import Field

from fl_admm_strategies import FedEASE, initial_item_factors, initial_item_weights
from fl_admm_strategies.algorithms.shared.completion import pooled

from ..data import RatingsData
from ..settings.section import Section
from ..settings.tables import Settings
from .base import Metrics, Problem
from .scores import METRICS, Metric, ModelScores, ScoreSummary

RANK_AT = 10
"""Length of the lists that are ranked."""
RELEVANT = 4.0
"""Stars from which a test rating is relevant to them."""
_METRICS = {
    "ndcg": METRICS["ndcg"],
    "rmse": dataclasses.replace(
        METRICS["rmse"],
        digits=4,  # that tell methods of completion apart
        legend="RMSE: root of the mean squared error over all clients' test ratings together, in "
        "stars; nothing is clipped or rounded.",
        axis="test RMSE (stars)",
    ),
}


class FactorModelSettings(Section):
    """The table ``[model]`` of ratings."""

    name: Literal["factors"]
    """A rating is the product of a user's and an item's factors; there is no other model."""
    rank: Annotated[int, Field(ge=1)]
    """r, numbers for every user and every item; FedEASE has none."""
    headline: Literal["rmse", "ndcg"] = "rmse"
    """What heads the results: the error of predicted stars, or how well items are ranked, which is
    all that FedEASE and ``feedback = "implicit"`` do."""


class FactorProblem(Problem):
    """Predict the ratings that are missing, M = U V, or what a user would like."""

    data_type: ClassVar[type] = RatingsData
    model_table: ClassVar[type[Section]] = FactorModelSettings
    needs: ClassVar[frozenset[str]] = frozenset({"train", "mean", "std"})
    gives: ClassVar[frozenset[str]] = needs | {"test", "rank_at", "relevant"}

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Refuse an experiment without a rank, and the settings of other solvers."""
        if settings.model is None:
            raise ValueError(
                f"[model] is missing: data set {settings.data.name!r} is completed by factors, "
                'name = "factors" and rank = 5, say.'
            )
        tables = {settings.algorithm.name: settings.algorithm, **settings.baselines.methods()}
        for name, table in tables.items():
            ranks = table.builds is FedEASE or getattr(table, "feedback", "") == "implicit"
            if ranks and settings.model.headline == "rmse":
                raise ValueError(
                    f"{name!r} predicts no stars, and their error heads the results here. Give "
                    "model.headline = 'ndcg', which is for all methods."
                )
        cls.refuse_samples(settings, "has ratings, not samples")

    def initial_arrays(self, strategy: Any) -> ArrayRecord:
        """Return V^0, on the scale of the strategy's U_i^0, or FedEASE's B^0."""
        if isinstance(strategy, FedEASE):
            return initial_item_weights(self.data.num_items)
        return initial_item_factors(
            self.settings.model.rank,
            self.data.num_items,
            seed=self.settings.seed,
            scale=strategy.init_scale,
        )

    def client_arguments(self, client_id: int) -> dict[str, Any]:
        """Return the ratings of the client's users, and what turns them into stars."""
        data, client = self.data, self.data.clients[client_id]
        return {
            "train": client.train,
            "test": client.test,
            "mean": data.mean,
            "std": data.std,
            "rank_at": min(RANK_AT, data.num_items),
            "relevant": RELEVANT,
        }

    @property
    def metric(self) -> Metric:
        """The RMSE, or the NDCG."""
        return _METRICS[self.settings.model.headline]

    def scores(self, kinds: Mapping[str, str], clients: Mapping[int, Metrics]) -> ModelScores:
        """Pool the clients: each test rating, or each user, counts alike, as in the papers.

        The one model there is, users' and items' factors together, is the main kind.
        """
        value = pooled(clients, {})[self.settings.model.headline]
        return ModelScores({next(iter(kinds.values())): ScoreSummary(mean=value)})
