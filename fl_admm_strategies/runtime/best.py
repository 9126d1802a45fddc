"""Keeping the models of the best round: a callback for ``start(on_round=...)``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Literal

from flwr.common import log

from .saving.files import replacing
from .stopping import Best
from .strategy import StatefulStrategy

NOTE = "best.json"
"""Which round is the best so far, beside its models."""


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
