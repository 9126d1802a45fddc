"""A ready rule for ``start(stop=...)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ..maths.checks import check_choice, check_count, check_not_negative

_TRAIN = "train-"  # before the names of metrics of the training


class EarlyStopping:
    """Stop when a metric has not improved for some evaluations in a row.

    Parameters
    ----------
    metric : str
        A name among the round's aggregated metrics, e.g. "loss" or "train-loss". A round without it
        does not count.
    patience : int (default: 10)
        Evaluations without an improvement after which the run ends.
    mode : {"min", "max"} (default: "min")
        Whether less or more is better.
    min_delta : float (default: 0.0)
        By how much at least, to count as an improvement.

    Attributes
    ----------
    best : float
        The best value so far; NaN before the first.
    best_round : int
        Its round; 0 before the first.

    Notes
    -----
    The rule is for one run. One that is resumed is told of the rounds before, so that it goes on
    counting. A value that is no number is no improvement.

    Examples
    --------
    >>> stop = EarlyStopping("loss", patience=20)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=500, stop=stop)
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int = 10,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        check_count("patience", patience, least=1)
        check_choice("mode", mode, ("min", "max"))
        check_not_negative("min_delta", min_delta)
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best, self.best_round = math.nan, 0
        self._waited = 0

    def __call__(self, server_round: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the run is to end.

        Raises
        ------
        ValueError
            If the metric is not among those of the first training, or evaluation.
        """
        if (value := metrics.get(self.metric)) is None:
            of_training = self.metric.startswith(_TRAIN)
            known = [name for name in metrics if name.startswith(_TRAIN) == of_training]
            if known and not self.best_round:
                raise ValueError(
                    f"EarlyStopping has metric={self.metric!r}, and the metrics are "
                    f"{', '.join(metrics)}. Name one of these."
                )
            return False
        sign = 1 if self.mode == "min" else -1
        if not self.best_round or sign * value < sign * self.best - self.min_delta:
            self._waited = 0
            if math.isfinite(value):
                self.best, self.best_round = value, server_round
            return False
        self._waited += 1
        return self._waited >= self.patience
