"""What was measured in a run: every client's metrics, the traffic, Flower's `Result`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log
from flwr.serverapp.strategy import Result

from .messages.records import ClientInstruction, Metrics, Reply
from .saving.history import History

MOST_IN_MEMORY = 500_000
"""Numbers of the clients' metrics that are held in memory, some 50 MB."""


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


class ClientMetrics(Mapping[int, dict[int, Metrics]]):
    """Metrics of every client in every round: ``metrics[server_round][client_id][name]``.

    The last rounds are in memory, those before are read from the run's history when they are asked
    for.

    Parameters
    ----------
    key : str
        What a history's entries call them.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._recent: dict[int, dict[int, Metrics]] = {}
        self._in_history: dict[int, History] = {}

    def __getitem__(self, server_round: int) -> dict[int, Metrics]:
        if (history := self._in_history.get(server_round)) is not None:
            return _by_client(history.read(server_round)[self.key])
        return self._recent[server_round]

    def __iter__(self) -> Iterator[int]:
        yield from self._in_history
        yield from self._recent

    def __len__(self) -> int:
        return len(self._in_history) + len(self._recent)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def add(self, server_round: int, clients: dict[int, Metrics]) -> None:
        """Add a round, later than those before."""
        self._recent[server_round] = clients

    def size(self, server_round: int) -> int:
        """Return how many numbers of a round are in memory."""
        return sum(len(metrics) for metrics in self._recent.get(server_round, {}).values())

    def release(self, server_round: int, history: History | None) -> None:
        """Hold a round in memory no longer."""
        if self._recent.pop(server_round, None) is not None and history is not None:
            self._in_history[server_round] = history


def _by_client(metrics: Mapping[str, Metrics]) -> dict[int, Metrics]:
    return {int(client): values for client, values in metrics.items()}


class Record:
    """The history of a run.

    Attributes
    ----------
    train_metrics, evaluate_metrics : ClientMetrics
        Metrics of every client in every round.
    traffic : dict of int to Traffic
        Bytes of the training messages' arrays by round; round 0 is a handshake, where there was
        one. Evaluation is not counted: it is not part of any algorithm.
    result : Result
        Flower's: the model and the aggregated metrics of every round.
    past_rounds : list of int
        The rounds before this process, where the run was resumed.
    """

    def __init__(self) -> None:
        self.begin(ArrayRecord())

    def begin(self, arrays: ArrayRecord) -> None:
        """Start a run from an initial model."""
        self.train_metrics = ClientMetrics("train")
        self.evaluate_metrics = ClientMetrics("evaluate")
        self._sizes: dict[int, int] = {}  # of the rounds whose clients' metrics are in memory
        self._is_complete = True
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

    def release_old(self, server_round: int, history: History | None) -> None:
        """After a round, hold what clients measured long ago in memory no longer."""
        both = self.train_metrics, self.evaluate_metrics
        self._sizes[server_round] = sum(metrics.size(server_round) for metrics in both)
        total = sum(self._sizes.values())
        while total > MOST_IN_MEMORY and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            total -= self._sizes.pop(oldest)
            for metrics in both:
                metrics.release(oldest, history)
            if history is None and self._is_complete:
                self._is_complete = False
                log(
                    WARNING,
                    f"round {server_round}: from now on only the last rounds of every client's "
                    f"metrics are kept ({MOST_IN_MEMORY:,} numbers); give start() a checkpoint_dir "
                    "to keep all",
                )

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

    def load(self, entries: Iterable[Mapping[str, Any]], history: History | None = None) -> None:
        """Put back the entries of past rounds; `history` is the file that holds them."""
        for entry in entries:
            server_round = entry["round"]
            self.past_rounds += [server_round] if server_round > 0 else []
            if entry["traffic"] is not None:
                self.traffic[server_round] = Traffic(*entry["traffic"])
            for metrics in (self.train_metrics, self.evaluate_metrics):
                if (clients := entry[metrics.key]) is not None:
                    metrics.add(server_round, _by_client(clients))
            for means, values in zip(self._means(), entry["result"], strict=True):
                if values:
                    means[server_round] = MetricRecord(values)
            self.release_old(server_round, history)

    def _means(self) -> tuple[dict[int, MetricRecord], ...]:
        result = self.result
        return (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        )
