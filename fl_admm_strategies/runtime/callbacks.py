"""The user's functions that a run calls: `evaluate_fn`, `stop` and `on_round`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log

from .run import Run

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
StopRule = Callable[[int, Mapping[str, float]], bool]
OnRound = Callable[[int, Mapping[str, float]], object]


@dataclass(frozen=True)
class Callbacks:
    """Calls them; where one raises, its round is saved before the run ends.

    Parameters
    ----------
    run : Run
    model : callable
        Returns the global model.
    evaluate_fn, stop, on_round : callable, optional
        As in `StatefulStrategy.start`.
    """

    run: Run
    model: Callable[[], ArrayRecord]
    evaluate_fn: EvaluateFn | None
    stop: StopRule | None
    on_round: OnRound | Sequence[OnRound] | None

    def catch_up(self) -> bool:
        """Do what is left of the round that a run begins after; return whether the run is to stop.

        That is the initial evaluation, or in a resumed run all that the last one did not come to.
        """
        run = self.run
        self.evaluate(run.last_round)
        if run.resume.has_unreported:
            self.report(run.last_round, run.record.measured(run.last_round))
        run.close_round(run.last_round, last=run.resume.has_unreported)
        stopping = False
        for server_round in run.record.past_rounds:
            stopping = self.is_over(server_round, run.record.measured(server_round))
        return stopping

    def evaluate(self, server_round: int) -> None:
        """Evaluate the global model on the server, unless that is done already.

        Raises
        ------
        TypeError
            If `evaluate_fn` returns something else than a `MetricRecord` or None.
        """
        central = self.run.record.result.evaluate_metrics_serverapp
        if self.evaluate_fn is None or server_round in central:
            return
        with saving_if_it_raises(self.run, "evaluate_fn", server_round):
            metrics = self.evaluate_fn(server_round, self.model())
            if not isinstance(metrics, MetricRecord | None):
                raise TypeError(
                    f"evaluate_fn returned a {type(metrics).__name__} in round {server_round}, "
                    "expected a flwr.app.MetricRecord or None. Return MetricRecord({...})."
                )
        if metrics is not None:
            central[server_round] = metrics

    def is_over(self, server_round: int, metrics: Mapping[str, float]) -> bool:
        """Ask the stop rule."""
        if self.stop is None:
            return False
        held = self.run.for_decisions(server_round, metrics)
        with saving_if_it_raises(self.run, "stop", server_round):
            return self.stop(server_round, held)

    def report(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Say that a round is complete."""
        callbacks = [self.on_round] if callable(self.on_round) else self.on_round or ()
        for callback in callbacks:
            with saving_if_it_raises(self.run, "on_round", server_round):
                callback(server_round, metrics)


@contextmanager
def saving_if_it_raises(run: Run, name: str, server_round: int) -> Iterator[None]:
    """Save the run's last round, should the user's function `name` raise in it."""
    try:
        yield
    except Exception as error:
        if run.save_unreported(server_round):
            log(
                ERROR,
                f"round {server_round}: {name} raised {type(error).__name__}; the round is saved, "
                "and resume=True goes on from it",
            )
        raise
