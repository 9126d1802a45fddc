"""The report of a run: the standard one, and what a method with more to say changes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord

from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.runtime.callbacks import StopRule

from ..methods import Federation
from ..problems import Problem
from ..problems.scores import ModelScores
from ..settings.tables import ReportSettings, Settings
from .plots import Picture

NONE = "–"
"""What the tables show for an unknown number."""


@dataclass(frozen=True)
class Finished:
    """A run that has come to its end.

    Attributes
    ----------
    title : str
        The method's name as the published tables have it.
    federation : Federation
        The method over its problem.
    strategy : StatefulStrategy
        It holds the state and all metrics.
    arrays : ArrayRecord
        What it started from.
    scores : ModelScores
        After the last round.
    seconds : float
        Its duration, as in `Result`.
    out : Path
        Its folder, for files of the report's own.
    """

    title: str
    federation: Federation
    strategy: Any
    arrays: ArrayRecord
    scores: ModelScores
    seconds: float
    out: Path

    @property
    def problem(self) -> Problem:
        """What was learned."""
        return self.federation.problem

    @property
    def settings(self) -> Settings:
        """All of the file, with the changes."""
        return self.problem.settings

    def picture(self, file: str, what: str = "") -> Picture:
        """Return a picture of the run, titled by its method and data."""
        title = f"{self.title} on {self.problem.data.name}" + (f": {what}" if what else "")
        return Picture(self.out / file, title)

    def bytes_sent(self, last_round: int) -> int:
        """Return how many bytes of arrays the rounds up to one sent, both ways."""
        traffic = self.strategy.traffic.items()
        return sum(sum(moved) for server_round, moved in traffic if server_round <= last_round)

    def numbers_sent(self, last_round: int) -> int:
        """Return how many numbers the rounds up to one sent, both ways."""
        sent = self.bytes_sent(last_round)
        itemsize = max(array.numpy().dtype.itemsize for array in self.arrays.values())
        return sent // (2 if self.strategy.wire_dtype == "float16" else itemsize)

    def mean(self, kind: str) -> str:
        """Return the metric of a kind of model as a sentence has it."""
        metric, title = self.problem.metric, self.strategy.kinds[kind]
        return metric.text(self.scores.models[title].mean, unit=True)


@dataclass(frozen=True)
class ReportContent:
    """What a method adds to the report of its run. All of it may be empty.

    Attributes
    ----------
    cells : mapping of str to mapping of str to (float or None)
        Further cells of the results table by row and column (a key of `COLUMNS`), as they are to be
        shown: shares in percent. A row with the title of a model is that model's, any other is
        added below; None shows as unknown. Metrics of the clients with the name of a column need
        not be given: their means are there (`column_means`).
    legend : sequence of str
        Lines under the table that explain the cells.
    body : sequence of str
        Paragraphs of Markdown under the table, and as the last the sentences on the outcome, for a
        reader who has not read the paper.
    extra : mapping of str to Any
        Further fields of ``result.json``; see `as_json` for what the values may be. ``marks`` are
        rounds that ``metric.png`` marks, by what happened in them.
    """

    cells: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    legend: Sequence[str] = ()
    body: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class MethodReport:
    """The standard report: a row for every kind of model, and one sentence.

    A method with more to say derives from it and is registered in `REPORTS`.
    """

    problems: ClassVar[type[Problem] | None] = None
    """What it is written for, None for all; on other data the method has the standard report."""
    settings: ClassVar[type[ReportSettings]] = ReportSettings
    """The table ``[report]``."""

    def title(self, strategy: StatefulStrategy) -> str:
        """Return the method's name as the published tables have it."""
        return strategy.title

    def stop_rule(self, strategy: Any, problem: Problem) -> StopRule | None:
        """Return when the run ends early. None: never."""
        return None

    def report(self, run: Finished) -> ReportContent:
        """Say what the metric's table and curves do not; write files of one's own."""
        metric = run.problem.metric
        rounds = len(run.strategy.train_metrics)
        found = [
            f"{metric.text(score.mean, unit=True)} ({title})"
            for title, score in run.scores.models.items()
        ]
        text = (
            f"**{self.title(run.strategy)} trained with {run.problem.num_clients} clients** for "
            f"{rounds:,} rounds. Mean {metric.measure}: **{', '.join(found)}**."
        )
        return ReportContent(body=(text,))
