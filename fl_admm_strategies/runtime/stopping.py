"""A ready rule for ``start(stop=...)``, and the models of the best round for ``on_round=...``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Literal

from flwr.common import log

from ..maths.checks import check_choice, check_count, check_not_negative
from .record import SERVER
from .saving.files import replacing
from .strategy import StatefulStrategy

NOTE = "best.json"
"""Which round is the best so far, beside its models."""

_TRAIN = "train-"  # before the names of metrics of the training
_PREFIXES = (_TRAIN, SERVER)


class Best:
    """The best value of a metric so far.

    Parameters
    ----------
    owner : str
        Who looks for it, for an error.
    metric, mode, min_delta
        As in `EarlyStopping`.

    Attributes
    ----------
    value : float
        NaN before the first.
    server_round : int
        Its round; 0 before the first.
    """

    def __init__(
        self, owner: str, metric: str, mode: Literal["min", "max"], min_delta: float = 0.0
    ) -> None:
        check_choice("mode", mode, ("min", "max"))
        check_not_negative("min_delta", min_delta)
        self.owner, self.metric, self.mode, self.min_delta = owner, metric, mode, min_delta
        self.value, self.server_round = math.nan, 0

    def improves(self, server_round: int, metrics: Mapping[str, float]) -> bool | None:
        """Return whether a round is better than all before it; None where the metric is missing.

        The first with the metric is. One that is no number is kept as no best.

        Raises
        ------
        ValueError
            If the metric is not among those of the first training, or evaluation.
        """
        if (value := metrics.get(self.metric)) is None:
            known = [name for name in metrics if _prefix(name) == _prefix(self.metric)]
            if known and not self.server_round:
                raise ValueError(
                    f"{self.owner} has metric={self.metric!r}, and the metrics are "
                    f"{', '.join(metrics)}. Name one of these."
                )
            return None
        sign = 1 if self.mode == "min" else -1
        if not self.server_round or sign * value < sign * self.value - self.min_delta:
            if math.isfinite(value):
                self.value, self.server_round = value, server_round
            return True
        return False


def _prefix(name: str) -> str:
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")


class EarlyStopping:
    """Stop when a metric has not improved for some evaluations in a row.

    Parameters
    ----------
    metric : str
        A name among the round's metrics, e.g. "loss", "train-loss", or "server-accuracy" of
        `evaluate_fn`. A round without it does not count.
    patience : int (default: 10)
        Evaluations without an improvement after which the run ends.
    mode : {"min", "max"} (default: "min")
        Whether less or more is better.
    min_delta : float (default: 0.0)
        By how much at least, to count as an improvement.

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
        self.patience = patience
        self._best = Best("EarlyStopping", metric, mode, min_delta)
        self._waited = 0

    def __call__(self, server_round: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the run is to end.

        Raises
        ------
        ValueError
            If the metric is not among those of the first training, or evaluation.
        """
        if (improves := self._best.improves(server_round, metrics)) is None:
            return False
        self._waited = 0 if improves else self._waited + 1
        return self._waited >= self.patience


class KeepBest:
    """Save the models of every round that is better than all rounds before it.

    Parameters
    ----------
    strategy : StatefulStrategy
        The strategy of the run.
    folder : str or path
        A folder for the models, to be read by `load_models`. ``best.json`` in it has the round and
        the value. A resumed run goes on from that round.
    metric : str
        One of the metrics that `stop` gets. No single client can choose the best round by it.
    mode : {"min", "max"} (default: "min")
        Whether less or more is better.

    Examples
    --------
    >>> keep = KeepBest(strategy, "runs/best", "loss")
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), 100, on_round=keep)
    """

    def __init__(
        self,
        strategy: StatefulStrategy,
        folder: str | os.PathLike[str],
        metric: str,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self._strategy, self._folder = strategy, Path(folder)
        self._best = Best("KeepBest", metric, mode)
        self._has_read_note = False

    def __call__(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Save the models of a complete round if it is the best so far.

        Raises
        ------
        ValueError
            If the metric is not among the round's, or no model is on the server.
        """
        best, note = self._best, self._folder / NOTE
        if not self._has_read_note and note.exists():
            saved = json.loads(note.read_text(encoding="utf-8"))
            if saved["round"] < server_round and saved["metric"] == best.metric:
                best.server_round, best.value = saved["round"], saved["value"]
        self._has_read_note = True
        held = self._strategy.run.for_decisions(server_round, metrics)
        if not best.improves(server_round, held):
            return
        models = self._strategy.models()
        if not models.named():
            raise ValueError(f"KeepBest finds no model on the server: {models.absent}")
        models.save(self._folder)
        text = json.dumps({"round": server_round, "metric": best.metric, "value": best.value})
        with replacing(note) as part:
            part.write_text(text, encoding="utf-8")
        log(
            INFO,
            f"round {server_round} has the best {best.metric} so far, {best.value:.4g}; its "
            f"models are in {self._folder}",
        )
