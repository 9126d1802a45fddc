"""Flower's own strategies as methods of the app: FedAvg, which any other has to beat, and kin."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from math import prod
from typing import Any, ClassVar, TypedDict, Unpack, cast

import flwr.serverapp.strategy
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from fl_admm_strategies import Models
from fl_admm_strategies.algorithms.shared.robust import Rule, check_rule, robust_or_before
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import check_count, check_positive
from fl_admm_strategies.runtime.callbacks import StopRule
from fl_admm_strategies.runtime.link import GridLink
from fl_admm_strategies.runtime.members.owners import Owners
from fl_admm_strategies.runtime.members.sampling import num_sampled
from fl_admm_strategies.runtime.messages.records import (
    ERROR,
    NUM_EXAMPLES,
    ClientInstruction,
    Metrics,
    from_array_record,
    to_array_record,
)
from fl_admm_strategies.runtime.progress import progress_bar
from fl_admm_strategies.runtime.record import Traffic

from ..data.federated import generator


class FedAvgSettings(TypedDict, total=False):
    """The parameters of `FedAvg`."""

    lr: float
    local_epochs: int
    fraction_train: float
    min_available_nodes: int
    seed: int


class FedAvg(flwr.serverapp.strategy.FedAvg):
    """Flower's FedAvg with the same clients in every run of a seed, and their metrics kept.

    Configuration, aggregation and the loop of rounds are Flower's. The client is
    `clients.SGDClient`, one on every node.

    Parameters
    ----------
    lr : float (default: 0.1)
        The clients' step size.
    local_epochs : int (default: 1)
        Their local epochs of a round.
    fraction_train : float (default: 1.0)
        Fraction of the clients that train in a round.
    min_available_nodes : int (default: 2)
        The number of clients.
    seed : int (default: 0)
        The run's: who trains, and the clients' own randomness.
    """

    paper: ClassVar = (
        "McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, arXiv:1602.05629"
    )
    kinds: ClassVar = {"global": "one global model"}
    title = "FedAvg"

    def __init__(
        self,
        *,
        lr: float = 0.1,
        local_epochs: int = 1,
        fraction_train: float = 1.0,
        min_available_nodes: int = 2,
        seed: int = 0,
    ) -> None:
        check_positive("lr", lr)
        check_count("local_epochs", local_epochs, least=1)
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=num_sampled(min_available_nodes, fraction_train),  # as other methods
            min_evaluate_nodes=min_available_nodes,
            min_available_nodes=min_available_nodes,
        )
        self.lr = lr
        self.local_epochs = local_epochs
        self.seed = seed

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        evaluate_every: int = 1,
        stop: StopRule | None = None,
        on_round: Callable[[int, Mapping[str, float]], None] | None = None,
        progress: bool | None = None,
        checkpoint_dir: Any = None,
        checkpoint_every: int = 1,
        resume: bool = False,
        collect: bool = False,
    ) -> Result:
        """Run the federation; options as `StatefulStrategy.start` has them, but for checkpoints.

        Raises
        ------
        ValueError
            If the run is to be resumed, a node hosts more than one client, or a setting of the
            clients is one that the constructor gives.
        """
        if resume:
            raise ValueError(
                f"{self.title} is Flower's own and saves no checkpoints: leave --resume out."
            )
        self.train_metrics: dict[int, dict[int, Metrics]] = {}
        self.evaluate_metrics: dict[int, dict[int, Metrics]] = {}
        self.traffic: dict[int, Traffic] = {}
        self._arrays = initial_arrays
        self._client_of = self._clients(grid)
        self._last = num_rounds
        self._every = evaluate_every
        self._on_round = on_round
        self._means: dict[str, float] = {}
        sampling, clients = (
            int(generator(self.seed, "fedavg", purpose).integers(2**63))
            for purpose in ("sampling", "clients")
        )
        self._chance = random.Random(sampling).getstate()
        config = {"lr": self.lr, "local-epochs": self.local_epochs, "seed": clients}
        given = {*(train_config or {}), *(evaluate_config or {})}
        if twice := [key for key in config if key in given]:
            raise ValueError(
                f"train_config has {twice}, which {type(self).__name__}(...) gives: leave them out."
            )
        with progress_bar(self.title, num_rounds, 0, progress) as self._advance:
            return super().start(
                grid,
                initial_arrays,
                num_rounds,
                timeout,
                ConfigRecord({**(train_config or {}), **config}),
                ConfigRecord({**(evaluate_config or {}), "seed": clients}),
                evaluate_fn,
            )

    def _clients(self, grid: Grid) -> dict[int, int]:
        """Return every node's client, in the order of the clients."""
        link = GridLink(self.min_available_nodes, 120, None, Owners())
        link.connect(grid, [], allow_missing=False)
        clients = link.discovery.client_ids
        probe = ClientInstruction({"arrays": {}}, {"server-round": 0})
        nodes = {
            message.metadata.dst_node_id: client
            for client in clients
            for message in link.messages({client: probe}, MessageType.TRAIN)
        }
        if len(nodes) < len(clients):
            raise ValueError(
                f"{len(clients)} clients are on {len(nodes)} nodes, expected one on "
                f"each: Flower's {self.title} speaks to nodes. Give as many nodes as there are "
                f"clients (--nodes {len(clients)}), or name it in [baselines]."
            )
        return nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let Flower sample and write the messages."""
        messages = self._seeded(super().configure_train, server_round, arrays, config, grid)
        self.traffic[server_round] = Traffic(_nbytes(messages), 0)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let Flower average."""
        replies = self._usable(replies)
        arrays, means = super().aggregate_train(server_round, replies)
        if arrays is not None:
            arrays = self.combined(server_round, arrays, replies)
        self._arrays = arrays or self._arrays
        down = self.traffic[server_round].down
        self.traffic[server_round] = Traffic(down, _nbytes(replies))
        self.train_metrics[server_round] = self._by_client(replies)
        self._means = {f"train-{name}": value for name, value in _numbers(means).items()}
        return arrays, means

    def combined(
        self, server_round: int, mean: ArrayRecord, replies: Iterable[Message]
    ) -> ArrayRecord:
        """Return what the server makes of a round's uploads: here their mean."""
        return mean

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all clients, every so many rounds and after the last."""
        if server_round % self._every and server_round != self._last:
            return []
        return self._seeded(super().configure_evaluate, server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let Flower average; keep every client's metrics."""
        replies = self._usable(replies)
        means = super().aggregate_evaluate(server_round, replies)
        if own := self._by_client(replies):
            self.evaluate_metrics[server_round] = own
        self._means |= _numbers(means)
        if self._on_round is not None:
            self._on_round(server_round, self._means)
        self._advance(server_round, self._means)
        return means

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the global model as plain arrays."""
        return {f"model/{name}": array.numpy() for name, array in self._arrays.items()}

    def models(self) -> Models:
        """Return the global model."""
        arrays = {name: array.numpy() for name, array in self._arrays.items()}
        return Models(self.title, arrays, absent=f"{self.title} has no personal models.")

    def _seeded(
        self, configure: Callable[..., Iterable[Message]], *arguments: Any
    ) -> list[Message]:
        """Configure a phase; Flower samples by Python's global random numbers, from a grid's nodes.

        Both are put in place for it: numbers of the seed, and nodes in the order of their clients.
        """
        *others, grid = arguments
        before = random.getstate()
        random.setstate(self._chance)
        try:
            return list(configure(*others, cast(Grid, _Nodes(grid, list(self._client_of)))))
        finally:
            self._chance = random.getstate()
            random.setstate(before)

    def _usable(self, replies: Iterable[Message]) -> list[Message]:
        """Return the replies of clients that did not fail; say who did."""
        usable = []
        for reply in replies:
            if reply.has_error():
                reason = reply.error.reason
            elif (failure := reply.content.config_records.get(ERROR)) is not None:
                reason = str(next(iter(failure.values()), "no reason given"))
            else:
                usable.append(reply)
                continue
            client = self._client_of[reply.metadata.src_node_id]
            log(WARNING, "Client %s failed: %s", client, reason)
        return usable

    def _by_client(self, replies: Iterable[Message]) -> dict[int, Metrics]:
        found: dict[int, Metrics] = {}
        for reply in replies:
            client = self._client_of[reply.metadata.src_node_id]
            for record in reply.content.metric_records.values():
                numbers = _numbers(record)
                if numbers.get(NUM_EXAMPLES) == 0:  # it has no say: see `clients.AttackingClient`
                    continue
                found[client] = {k: v for k, v in numbers.items() if k != NUM_EXAMPLES}
        return dict(sorted(found.items()))


class RobustFedAvg(FedAvg):
    """FedAvg with a robust rule in the place of the mean."""

    aggregation: ClassVar[Rule]
    malicious: float = 0.0

    def combined(
        self, server_round: int, mean: ArrayRecord, replies: Iterable[Message]
    ) -> ArrayRecord:
        """Return what the rule makes of the uploads, of too few the model as it was."""
        uploads: dict[int, Arrays] = {}
        for reply in replies:
            (record,) = reply.content.array_records.values()
            uploads[self._client_of[reply.metadata.src_node_id]] = from_array_record(record)
        in_order = [uploads[client] for client in sorted(uploads)]
        before = from_array_record(self._arrays)
        return to_array_record(
            robust_or_before(self.aggregation, self.malicious, before, server_round, in_order)
        )


class FedMedian(RobustFedAvg):
    """FedAvg with the coordinates' medians in place of the mean, by Flower's FedMedian.

    Parameters
    ----------
    **base
        The parameters of `FedAvg`.
    """

    paper: ClassVar = "Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv:1803.01498"
    title = "FedMedian"
    aggregation = "median"


class RobustToShare(RobustFedAvg):
    """A rule that is told how many uploads may be false."""

    def __init__(self, *, malicious: float = 0.2, **base: Unpack[FedAvgSettings]) -> None:
        super().__init__(**base)
        check_rule(self.aggregation, malicious)
        self.malicious = malicious


class FedTrimmedAvg(RobustToShare):
    """FedAvg with the coordinates' trimmed means, by Flower's FedTrimmedAvg.

    Parameters
    ----------
    malicious : float (default: 0.2)
        The share of a round's uploads that is cut off at either end, in every coordinate.
    **base
        The parameters of `FedAvg`.
    """

    paper: ClassVar = "Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv:1803.01498"
    title = "FedTrimmedAvg"
    aggregation = "trimmed-mean"


class MultiKrum(RobustToShare):
    """FedAvg with the mean of the n - f uploads nearest to others, by Flower's MultiKrum.

    Parameters
    ----------
    malicious : float (default: 0.2)
        The share of a round's n uploads that is taken for false: f = floor(malicious n).
    **base
        The parameters of `FedAvg`.
    """

    paper: ClassVar = "Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv:1703.02757"
    title = "multi-Krum"
    aggregation: ClassVar[Rule] = "multi-krum"


class Krum(MultiKrum):
    """FedAvg with the one upload nearest to others in the place of the mean, by Flower's Krum.

    Parameters
    ----------
    malicious : float (default: 0.2)
        The share of a round's n uploads that is taken for false: f = floor(malicious n).
    **base
        The parameters of `FedAvg`.
    """

    paper: ClassVar = "Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv:1703.02757"
    title = "Krum"
    aggregation = "krum"


class _Nodes:
    """The nodes of a grid that are connected, in a given order."""

    def __init__(self, grid: Grid, order: list[int]) -> None:
        self._grid, self._order = grid, order

    def get_node_ids(self) -> list[int]:
        connected = set(self._grid.get_node_ids())
        return [node for node in self._order if node in connected]


def _numbers(record: MetricRecord | None) -> Metrics:
    return {k: float(v) for k, v in (record or {}).items() if not isinstance(v, list)}


def _nbytes(messages: Iterable[Message]) -> int:
    """Return the bytes of the arrays in messages."""
    return sum(
        np.dtype(array.dtype).itemsize * prod(array.shape)
        for message in messages
        for record in message.content.array_records.values()
        for array in record.values()
    )
