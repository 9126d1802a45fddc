"""AsyncFPFC's report: FPFC's, and the metric over the time of the clock, beside FPFC's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from fl_admm_strategies import FPFC
from fl_admm_strategies.runtime.common.settings import parameters_of

from ..methods import run_here
from ..problems.scores import ModelScores
from ..settings.tables import ReportSettings
from . import plots
from .base import Finished, ReportContent
from .fpfc import FPFCReport


class AsyncFPFCReportSettings(ReportSettings):
    """The table ``[report]``: what to run beside it."""

    active: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Clients in a round of FPFC, a run for each number on the same clock, for a picture like the
    paper's Figure 8."""


Scores = list[tuple[float | str, float]]
"""Seconds since the start of a run, and the main metric, as it is shown."""


class AsyncFPFCReport(FPFCReport):
    """FPFC's report, a picture of the metric over time, staleness by client."""

    settings: ClassVar[type[ReportSettings]] = AsyncFPFCReportSettings

    def report(self, run: Finished) -> ReportContent:
        """Report what FPFC's does, how stale replies were, and what waiting for them costs."""
        base, strategy = super().report(run), run.strategy
        runs, clock = {strategy.title: _own(run)}, strategy.clock[strategy.last_round]
        settings: AsyncFPFCReportSettings = run.settings.report  # type: ignore[assignment]
        if strategy.delay is not None and settings.active:
            runs |= dict(_beside(run, count, clock) for count in settings.active)
            plots.curves(
                runs,
                ylabel=run.problem.metric.axis,
                xlabel="seconds of the simulated clock",
                picture=run.picture("time.png", "with and without waiting"),
                compared=[title for title in runs if title != strategy.title],
            )
        staleness = strategy.staleness
        age = (
            f"Staleness: {sum(staleness.values()) / len(staleness):.1f} replies on average, "
            f"{max(staleness.values())} at most. {clock:,.1f} seconds of the clock."
        )
        *body, summary = base.body
        measured = {"seconds_of_the_clock": clock, "staleness": staleness, "by_the_clock": runs}
        extra = {**base.extra, **measured}
        return replace(base, body=(*body, age, summary), extra=extra)


def _main_metric(run: Finished, scores: ModelScores) -> float:
    title = next(iter(run.strategy.kinds.values()))
    return run.problem.metric.scale * scores.models[title].mean


def _own(run: Finished) -> Scores:
    strategy = run.strategy
    return [
        (strategy.clock[number], _main_metric(run, run.problem.scores(strategy.kinds, clients)))
        for number, clients in strategy.evaluate_metrics.items()
    ]


def _beside(run: Finished, active: int, clock: float) -> tuple[str, Scores]:
    """Run FPFC with so many clients a round for as long as the run took by the clock.

    A round takes as long as its slowest participant, by the same delays.
    """
    problem, strategy = run.problem, run.strategy
    known, delay = parameters_of(FPFC), strategy.delay
    settings = {name: value for name, value in strategy.settings().items() if name in known}
    settings |= {"fraction_train": active / problem.num_clients, "min_train_nodes": active}
    fpfc, now = FPFC(**settings), {0: 0.0}

    def is_over(server_round: int, metrics: Mapping[str, float]) -> bool:
        taken = fpfc.train_metrics.get(server_round, {})
        seconds = [delay(server_round, c) if callable(delay) else delay for c in taken]
        now[server_round] = now[server_round - 1] + max(seconds, default=0.0)
        return now[server_round] >= clock

    every = max(1, run.settings.training.evaluate_every // problem.num_clients)
    options = {"num_rounds": strategy.last_round, "evaluate_every": every, "stop": is_over}
    history = run_here(run.federation, fpfc, run.arrays, **options)
    return f"{history.title}, {active} a round", [
        (now[number], _main_metric(run, scores)) for number, scores in history.rounds.items()
    ]
