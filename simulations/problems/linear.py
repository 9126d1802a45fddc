"""A linear model over a table, with its gradient and curvature in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord
from threadpoolctl import threadpool_limits

from clients import LeastSquares, Logistic
from clients.toolkit.solving.curvature import DataLoss

from ..data import TabularData
from ..settings.tables import Settings
from .base import Metrics, Problem
from .scores import METRICS, Metric, ScoreSummary


class LinearProblem(Problem):
    """Least squares or logistic regression: f(x) = (1/m) sum_i f_i(x), all samples for training."""

    data_type: ClassVar[type] = TabularData
    needs: ClassVar[frozenset[str]] = frozenset({"problem"})
    gives: ClassVar[frozenset[str]] = needs | {"test_problem"}

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Refuse the settings of PyTorch models and their solvers."""
        why = "has a linear model and full gradients"
        cls.refuse_samples(settings, why, model=settings.model)

    @cached_property
    def losses(self) -> list[DataLoss]:
        """Every client's f_i, once a process: clients are made anew for every message."""
        # As with torch's: a sum's bits depend on how many threads share it, and engines differ.
        threadpool_limits(1)
        if self.data.loss == "least-squares":
            return [LeastSquares(*samples) for samples in self.data.clients]
        regulariser = {"mu": self.data.mu, "reg_scaling": self.data.reg_scaling}
        return [Logistic(*samples, **regulariser) for samples in self.data.clients]

    def initial_arrays(self, strategy: Any) -> ArrayRecord:
        """Return x = 0."""
        return ArrayRecord({"x": Array(np.zeros(self.data.num_features))})

    def client_arguments(self, client_id: int) -> dict[str, Any]:
        """Return f_i, which is evaluated as well: there are no samples but the training's."""
        loss = self.losses[client_id]
        return {"problem": loss, "test_problem": loss}

    @property
    def metric(self) -> Metric:
        """The objective."""
        return METRICS["objective"]

    def score_of(self, kind: str, clients: Mapping[int, Metrics]) -> ScoreSummary | None:
        """Return f(x), the mean of the clients' f_i(x)."""
        key = f"{kind}-loss"
        values = [reported[key] for reported in clients.values() if key in reported]
        return ScoreSummary(mean=float(np.mean(values))) if values else None
