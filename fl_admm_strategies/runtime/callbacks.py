"""The user's functions that a run calls: `evaluate_fn`, `stop` and `on_round`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, MetricRecord

from .run import Run

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
StopRule = Callable[[int, Mapping[str, float]], bool]
OnRound = Callable[[int, Mapping[str, float]], object]


@dataclass(frozen=True)
class Callbacks:
    """Calls them.

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

        That is the initial evaluation. A resumed run reports its last round again, since the one
        before may have ended in between.
        """
        run = self.run
        self.evaluate(run.last_round)
        run.close_round(run.last_round)
        if run.last_round > 0:
            self.report(run.last_round, run.record.measured(run.last_round))
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
        return self.stop(server_round, self.run.for_decisions(server_round, metrics))

    def report(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Say that a round is complete."""
        callbacks = [self.on_round] if callable(self.on_round) else self.on_round or ()
        for callback in callbacks:
            callback(server_round, metrics)
