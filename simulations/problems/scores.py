"""What is measured of the models: the metric that heads the results, and the columns beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Metric:
    """What heads the results: a number per client and model, or one of the whole federation.

    Attributes
    ----------
    key : str
        Its name in the clients' metrics, ``KIND-KEY``, in ``result.json`` and published rows.
    header : str
        Of the table's column.
    measure : str
        What it is, in the middle of a sentence, e.g. "test accuracy".
    legend : str
        What the header stands for, under the table.
    axis : str
        Name and unit at the plot's axis.
    percent : bool
        A share of 1 that is shown in percent; published values are in percent then.
    higher_is_better : bool
        Which end is the best.
    digits : int
        Decimals in the table.
    """

    key: str
    header: str
    measure: str
    legend: str
    axis: str
    percent: bool = False
    higher_is_better: bool = False
    digits: int = 2

    @property
    def scale(self) -> int:
        """The factor between a value and what is shown."""
        return 100 if self.percent else 1

    def text(self, value: float, *, unit: bool = False) -> str:
        """Write a value as the table and the sentences have it."""
        if not math.isfinite(value):
            return "NaN"
        if self.percent:
            return f"{100 * value:.{self.digits}f}{' %' if unit else ''}"
        return f"{value:.3g}" if abs(value) >= 1000 else f"{value:.{self.digits}f}"


METRICS = {
    metric.key: metric
    for metric in (
        Metric(
            key="accuracy",
            header="Acc %",
            measure="test accuracy",
            legend="Acc: test accuracy, mean over clients.",
            axis="mean test accuracy of the clients (%)",
            percent=True,
            higher_is_better=True,
        ),
        Metric(
            key="rmse",
            header="RMSE",
            measure="test error (RMSE)",
            legend="RMSE: test error in the target's unit, mean over clients.",
            axis="mean test RMSE",
        ),
        Metric(
            key="ndcg",
            header="NDCG",
            measure="NDCG at 10",
            legend="NDCG: of the 10 best of all items that a user has not rated, where test "
            "ratings of 4 stars or more are relevant; mean over the users of all clients.",
            axis="NDCG at 10",
            higher_is_better=True,
            digits=4,
        ),
        Metric(
            key="objective",
            header="Objective",
            measure="objective",
            legend="Objective: the function that is minimised, on the training data.",
            axis="objective",
            digits=4,
        ),
    )
}
"""The metrics there are; `dataclasses.replace` makes a variant, e.g. with more digits."""


@dataclasses.dataclass(frozen=True)
class ScoreSummary:
    """A metric over the clients, one value each.

    Attributes
    ----------
    mean : float
        Unweighted mean over the clients, as FPFC's tables have it; or the one value of a metric
        that belongs to the whole federation.
    std : float or None
        Standard deviation over the clients, of this run; published ones are over random seeds.
    worst : float or None
        Mean over the worst tenth of the clients, rounded up to whole clients.
    best : float or None
        Mean over the best tenth of the clients, rounded up to whole clients.
    """

    mean: float
    std: float | None = None
    worst: float | None = None
    best: float | None = None


@dataclasses.dataclass(frozen=True)
class ModelScores:
    """How a method's models do after one round, by kind of model.

    Attributes
    ----------
    models : mapping of str to ScoreSummary
        The metric of every kind, by its title.
    cells : mapping of str to mapping of str to (float or None)
        Further columns of its row: a key of `COLUMNS`, shares in percent.
    """

    models: Mapping[str, ScoreSummary]
    cells: Mapping[str, Mapping[str, float | None]] = dataclasses.field(default_factory=dict)


class Column(NamedTuple):
    """A column of the results table beside the metric."""

    header: str
    digits: int | None
    """Decimals; None writes a count in full."""
    percent: bool = False
    """A share of 1 that is shown in percent; published values are in percent then."""


# In the order of the table.
COLUMNS = {
    "num": Column("Num", 2),
    "ari": Column("ARI", 2),
    "f1": Column("F1 %", 2, percent=True),
    "auc": Column("AUC %", 2, percent=True),
    "loss-variance": Column("Loss\nvar", 4),
    "cr": Column("CR", 1),
    "time": Column("Time s", 2),
    "cost": Column("Cost", None),
}


def score(values: ArrayLike, metric: Metric) -> ScoreSummary:
    """Summarise one value per client.

    Parameters
    ----------
    values : array_like of shape (m,)
        The metric of each client. A value that is not finite counts as a worst one, and makes the
        mean not finite.
    metric : Metric
        Says which end is the worst: low accuracy, high error.

    Returns
    -------
    ScoreSummary
        Mean and spread over the clients, and the means of the worst and the best tenth.
    """
    array = np.asarray(values, dtype=np.float64)
    sign = -1.0 if metric.higher_is_better else 1.0
    # An infinite accuracy is no good news: everything that is not finite sorts last, as NaN does.
    finite = np.where(np.isfinite(array), array, np.nan)
    from_best = sign * np.sort(sign * finite)
    tenth = math.ceil(len(array) / 10)
    return ScoreSummary(
        mean=float(finite.mean()),
        std=float(finite.std()),
        worst=float(from_best[-tenth:].mean()),
        best=float(from_best[:tenth].mean()),
    )


def rand_index(truth: ArrayLike, found: ArrayLike) -> float:
    """Return the adjusted Rand index of two groupings: 1 for the same one, 0 for chance."""
    from sklearn.metrics import adjusted_rand_score  # here: takes seconds

    return float(adjusted_rand_score(truth, found))


def column_means(clients: Iterable[Mapping[str, float]], kind: str) -> dict[str, float]:
    """Return the mean over the clients of every metric ``KIND-COLUMN``, as the table shows it.

    Parameters
    ----------
    clients : iterable of mapping of str to float
        What every client reported; a metric counts where all of them have it.
    kind : str
        The kind of model.
    """
    reports = list(clients)
    return {
        key: float(np.mean([reported[f"{kind}-{key}"] for reported in reports]))
        * (100 if column.percent else 1)
        for key, column in COLUMNS.items()
        if reports and all(f"{kind}-{key}" in reported for reported in reports)
    }
