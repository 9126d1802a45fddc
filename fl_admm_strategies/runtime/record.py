"""What was measured in a run: every client's metrics, the traffic, Flower's `Result`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from .messages.records import ClientInstruction, Metrics, Reply

SERVER = "server-"
"""Before the names of what `evaluate_fn` returned, beside the clients' metrics."""


class Traffic(NamedTuple):
    """Bytes of arrays that a round of training moved, summed over the clients.

    As if each client had a node of its own: how many share one, and get what all get once, changes
    no number here, so that results of different machines and engines compare.

    Attributes
    ----------
    down : int
        Sent to the clients.
    up : int
        Uploaded by them, in replies that were accepted.
    """

    down: int
    up: int


def _by_client(metrics: Mapping[str, Metrics]) -> dict[int, Metrics]:
    return {int(client): values for client, values in metrics.items()}


class Record:
    """The history of a run.

    Attributes
    ----------
    train_metrics, evaluate_metrics : dict
        Metrics of every client in every round: ``metrics[server_round][client_id][name]``.
    traffic : dict of int to Traffic
        Bytes of the training messages' arrays by round; round 0 is a handshake, where there was
        one. Evaluation is not counted: it is not part of any algorithm.
    result : Result
        Flower's: the model and the aggregated metrics of every round.
    past_rounds : list of int
        The rounds before this process, where the run was resumed.
    """

    def __init__(self) -> None:
        self.reset(ArrayRecord())

    def reset(self, arrays: ArrayRecord) -> None:
        """Start a run from an initial model."""
        self.train_metrics: dict[int, dict[int, Metrics]] = {}
        self.evaluate_metrics: dict[int, dict[int, Metrics]] = {}
        self.traffic: dict[int, Traffic] = {}
        self.result = Result(arrays=arrays)
        self.past_rounds: list[int] = []

    def count_down(self, server_round: int, asked: Mapping[int, ClientInstruction]) -> None:
        """Add the bytes of what was sent."""
        down = sum(instruction.nbytes for instruction in asked.values())
        self._count(server_round, Traffic(down, 0))

    def count_up(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Add the bytes of accepted uploads."""
        up = sum(reply.nbytes for reply in replies.values())
        self._count(server_round, Traffic(0, up))

    def _count(self, server_round: int, more: Traffic) -> None:
        before = self.traffic.get(server_round, Traffic(0, 0))
        self.traffic[server_round] = Traffic(before.down + more.down, before.up + more.up)

    def trained(self, server_round: int, means: Metrics) -> None:
        """Note the aggregated metrics of a round of training."""
        if means:
            self.result.train_metrics_clientapp[server_round] = MetricRecord(dict(means))

    def evaluated(self, server_round: int, means: Metrics) -> None:
        """Note the aggregated metrics of an evaluation."""
        if means:
            self.result.evaluate_metrics_clientapp[server_round] = MetricRecord(dict(means))

    def measured(self, server_round: int) -> Metrics:
        """Return the aggregated metrics of a round as stop rules and callbacks get them."""
        trained, evaluated, _ = self.entry(server_round)["result"]
        train = {f"train-{name}": value for name, value in trained.items()}
        return {**train, **evaluated, **self.central(server_round)}

    def central(self, server_round: int) -> Metrics:
        """Return what `evaluate_fn` measured after a round, by the names that callbacks get."""
        found = self.result.evaluate_metrics_serverapp.get(server_round, MetricRecord())
        return {f"{SERVER}{name}": v for name, v in found.items() if not isinstance(v, list)}

    def entry(self, server_round: int) -> dict[str, Any]:
        """Return what was measured in a round, for JSON."""
        return {
            "round": server_round,
            "traffic": self.traffic.get(server_round),
            "train": self.train_metrics.get(server_round),
            "evaluate": self.evaluate_metrics.get(server_round),
            "result": [dict(means.get(server_round, {})) for means in self._means()],
        }

    def load(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Put back the entries of past rounds."""
        for entry in entries:
            server_round = entry["round"]
            self.past_rounds += [server_round] if server_round > 0 else []
            if entry["traffic"] is not None:
                self.traffic[server_round] = Traffic(*entry["traffic"])
            if (clients := entry["train"]) is not None:
                self.train_metrics[server_round] = _by_client(clients)
            if (clients := entry["evaluate"]) is not None:
                self.evaluate_metrics[server_round] = _by_client(clients)
            for means, values in zip(self._means(), entry["result"], strict=True):
                if values:
                    means[server_round] = MetricRecord(values)

    def _means(self) -> tuple[dict[int, MetricRecord], ...]:
        result = self.result
        return (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        )
