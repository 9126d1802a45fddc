"""Keeping the model of the best round: ``start(keep_best=(metric, mode))``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from logging import INFO
from pathlib import Path
from typing import Literal

from flwr.common import log

from .models import Models
from .run import Run
from .saving.files import replacing
from .stopping import Best

FOLDER = "best"
"""Of the best round's models, in the folder of the checkpoints."""
NOTE = "best.json"
"""Which round that is, beside them."""

KeepBestBy = tuple[str, Literal["min", "max"]]
"""A metric's name, and whether less or more of it is better."""


class KeepBest:
    """Saves the models of a round that is better than all before it.

    A resumed run goes on from the best of the rounds before, which are in its history.

    Parameters
    ----------
    by : tuple or None
        None: nothing is kept.
    run : Run
    models : callable
        Returns the models as they are now.
    checkpoint_dir : str or path, or None

    Raises
    ------
    ValueError
        If there is no folder to keep them in, or `by` is no metric and mode.
    """

    def __init__(
        self,
        by: KeepBestBy | None,
        run: Run,
        models: Callable[[], Models],
        checkpoint_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._run, self._models = run, models
        self._best: Best | None = None
        if by is None:
            return
        if not isinstance(by, tuple | list) or len(by) != 2:
            raise ValueError(
                f'keep_best is {by!r}, expected a metric and a mode, such as ("accuracy", "max").'
            )
        if checkpoint_dir is None:
            raise ValueError(
                "keep_best needs a folder to keep the best round's models in. Give a "
                "checkpoint_dir as well."
            )
        self._best = Best("keep_best", *by)
        self._folder = Path(checkpoint_dir) / FOLDER

    def catch_up(self) -> None:
        """Before the first round, look at those before a resumption.

        Raises
        ------
        ValueError
            If no model is on the server.
        """
        if self._best is None:
            return
        models = self._models()
        if not models.named():
            raise ValueError(f"keep_best is given, but no model is here to keep: {models.absent}")
        for server_round in self._run.record.past_rounds:
            self._best.improves(server_round, self._measured(server_round))
        if 0 < self._best.server_round == self._run.last_round:
            self._save()  # which a killed run may not have come to

    def look(self, server_round: int) -> None:
        """Keep the models of a complete round if it is the best so far."""
        if self._best and self._best.improves(server_round, self._measured(server_round)):
            self._save()

    def _measured(self, server_round: int) -> dict[str, float]:
        return self._run.for_decisions(server_round, self._run.record.measured(server_round))

    def _save(self) -> None:
        assert self._best is not None
        best = self._best
        self._models().save(self._folder)
        note = {"round": best.server_round, "metric": best.metric, "value": best.value}
        content = json.dumps(note).encode()
        with replacing(self._folder / NOTE, len(content)) as part:
            part.write_bytes(content)
        log(
            INFO,
            f"round {best.server_round} has the best {best.metric} so far, {best.value:.4g}; its "
            f"model is in {self._folder}",
        )
