"""What several test modules share: a small federation, and a grid that watches and spoils."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import accuracy
from fl_admm_strategies import InProcessGrid, SampledStrategy, StatefulStrategy
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction, Reply
from fl_admm_strategies.runtime.messages.seal import SEAL
from tests.support.refusals import warnings_in as warnings_in  # most ask for it here

ClientFn = Callable[[Context], Any]
Spoil = Callable[[list[Message]], list[Message]]
AnyStrategy = TypeVar("AnyStrategy", bound=StatefulStrategy)

NUM_CLASSES = 3


def make_model() -> nn.Module:
    """Return the same small network, with two named blocks, at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            OrderedDict(body=nn.Linear(3, 4), bend=nn.Tanh(), head=nn.Linear(4, NUM_CLASSES))
        )


def run_on_ray(server_app: ServerApp, clients: ClientApp, num_nodes: int, **init_args: Any) -> None:
    """Run a federation in Flower's simulation engine, on two processors and without Ray's noise."""
    from flwr.simulation import run_simulation  # a second to import

    # "local": a Ray of its own, whatever another test has started on this machine.
    quiet = {"address": "local", "num_cpus": 2, "log_to_driver": False, "logging_level": "ERROR"}
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app,
        clients,
        num_supernodes=num_nodes,
        backend_config={"client_resources": resources, "init_args": quiet | init_args},
    )


def initial_arrays() -> ArrayRecord:
    return ArrayRecord(make_model().state_dict())


@cache
def dataset(client: int) -> TensorDataset:
    """Return 10 + client samples; clients of equal remainder mod 3 share a labelling rule."""
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(10 + client, 3, generator=generator)
    labels = (inputs.argmax(dim=1) + client) % NUM_CLASSES
    return TensorDataset(inputs, labels)


def make_client(client_class: Callable[..., NumPyClient], context: Context) -> NumPyClient:
    """Return the client of a context's partition; nodes without one take their node id mod 6."""
    client = int(context.node_config.get("partition-id", context.node_id % 6))
    data = dataset(client)
    return client_class(
        context,
        make_model(),
        DataLoader(data, batch_size=8, shuffle=True),
        nn.CrossEntropyLoss(),
        test_loader=DataLoader(data, batch_size=64),
        metrics={"accuracy": accuracy},
    )


def client_fn_of(client_class: Callable[..., NumPyClient]) -> ClientFn:
    def client_fn(context: Context) -> Any:
        return make_client(client_class, context).to_client()

    return client_fn


@dataclass
class MeanState:
    """The model."""

    model: Arrays


class Mean(SampledStrategy):
    """The smallest strategy: the model is the plain mean of what the clients send."""

    method: ClassVar = None
    kinds: ClassVar = {"global": "one global model"}

    def init_state(self, arrays: Arrays) -> MeanState:
        return MeanState(arrays)

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, ClientInstruction]:
        return {client: ClientInstruction({"model": self.state.model}) for client in client_ids}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        for name, array in self.state.model.items():
            mean = np.mean([reply.arrays[name] for reply in replies.values()], axis=0)
            self.state.model[name] = mean.astype(array.dtype)

    def model(self, kind: str, client_id: int) -> Arrays:
        model: Arrays = self.state.model
        return model


class Adding(NumPyClient):
    """A client of `Mean` that adds something of its own to the model, and costs nothing."""

    def __init__(self, context: Context, *_: Any, **__: Any) -> None:
        self.client = int(context.node_config["partition-id"])

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        own = np.float32(np.random.default_rng(config["seed"]).random())
        return [array + own for array in parameters], 10 + self.client, {"loss": float(own)}

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        return float(parameters[0].sum()), 10 + self.client, {}


class Raising(NumPyClient):
    """Another client, but training raises in the given rounds."""

    def __init__(self, client: NumPyClient, rounds: Sequence[int]) -> None:
        self.client, self.rounds = client, rounds

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        result = self.client.fit(parameters, config)  # raises after its state has changed
        if config["server-round"] in self.rounds:
            raise OSError("the disk is full")
        return result

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        return self.client.evaluate(parameters, config)


def raising_client_fn(
    client_class: Callable[..., NumPyClient], when: Mapping[int, Sequence[int]]
) -> ClientFn:
    """Return a client_fn whose clients fail as ``when[client id] = rounds`` says."""

    def client_fn(context: Context) -> Any:
        client = make_client(client_class, context)
        rounds = when.get(int(context.node_config["partition-id"]), ())
        return Raising(client, rounds).to_client()

    return client_fn


class WatchedGrid(InProcessGrid):
    """Keeps the messages of every phase; `spoil` may change the replies of training rounds.

    Attributes
    ----------
    sent, received : list of (message type, round, list of Message)
    spoil : dict of int to callable
        By round, what is done to the list of training replies.
    """

    def __init__(self, *args: Any, spoil: Mapping[int, Spoil] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spoil = dict(spoil or {})
        self.sent: list[tuple[str, int, list[Message]]] = []
        self.received: list[tuple[str, int, list[Message]]] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if messages:
            kind = messages[0].metadata.message_type
            server_round = int(messages[0].metadata.group_id)
            if kind == MessageType.TRAIN and server_round in self.spoil:
                replies = self.spoil[server_round](replies)
                for reply in replies:  # who lies would seal what it sends
                    for record in (
                        () if reply.has_error() else reply.content.metric_records.values()
                    ):
                        record.pop(SEAL, None)
            self.sent.append((kind, server_round, messages))
            self.received.append((kind, server_round, replies))
        return replies

    def phase(self, kind: str, server_round: int) -> list[Message]:
        """Return the messages that went out in a phase."""
        return next(m for k, r, m in self.sent if (k, r) == (kind, server_round))

    def replies(self, kind: str, server_round: int) -> list[Message]:
        """Return the replies that came in a phase."""
        return next(m for k, r, m in self.received if (k, r) == (kind, server_round))


class Shuffled(Grid):
    """Another grid, whose nodes and replies come in an order of chance."""

    def __init__(self, grid: Grid, seed: int) -> None:
        self.grid, self.random = grid, random.Random(seed)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self.random.shuffle(replies)
        return replies

    def get_node_ids(self) -> list[int]:
        nodes = list(self.grid.get_node_ids())
        self.random.shuffle(nodes)
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)


Online = Mapping[int, Sequence[int]]
"""The connected nodes by round; a round that is missing is like the one before it."""

# Nodes 2, 3, 4 are there from the start, node 5 comes later. The joining client's id is between
# others'.
INITIAL, JOINING = [0, 1, 4], 2
PARTITIONS = (*INITIAL, JOINING)
FROM_ROUND_3: Online = {0: [2, 3, 4], 3: [2, 3, 4, 5]}
# Client 1 is away from round 3 on; in round 6 it is back on another node.
GONE_AND_BACK: Online = {0: [2, 3, 4], 3: [2, 4], 6: [2, 4, 5]}


class RestlessGrid(InProcessGrid):
    """Nodes with the given partition ids, of which only some are connected in a round.

    Attributes
    ----------
    online : Online
    server_round : int
        The round of the last training message.
    asked : list of int
        The nodes that got a query after the run had begun.
    deaf_for : int
        How often `pull_messages` has nothing to say.
    """

    def __init__(self, app: ClientApp, partitions: Sequence[int], online: Online) -> None:
        configs = [{"partition-id": p, "num-partitions": 3} for p in partitions]
        super().__init__(app, len(partitions), node_configs=configs)
        self.online = dict(online)
        self.server_round = 0
        self.asked: list[int] = []
        self.deaf_for = 0

    def get_node_ids(self) -> list[int]:
        known = [r for r in self.online if r <= self.server_round + 1]
        return list(self.online[max(known)])

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == MessageType.QUERY and self.server_round:
                self.asked.append(message.metadata.dst_node_id)
            if message.metadata.message_type == MessageType.TRAIN:
                # A handshake with new clients is of round 0.
                self.server_round = max(self.server_round, int(message.metadata.group_id or 0))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        if self.deaf_for:
            self.deaf_for -= 1
            return []
        return super().pull_messages(message_ids)


@cache
def public_key(site: int) -> bytes:
    """Return the key of a site, as Flower tells a ServerApp."""
    key = ec.derive_private_key(site + 1, ec.SECP256R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class KeyedGrid(RestlessGrid):
    """Nodes that have keys, as SuperNodes do: each its own, or those of the given sites.

    Attributes
    ----------
    sent : dict of int to list of (str, int)
        By node, the type of each message to it, and how many arrays it held.
    """

    def __init__(
        self,
        app: ClientApp,
        partitions: Sequence[int],
        online: Online,
        sites: Sequence[int] | None = None,
    ) -> None:
        super().__init__(app, partitions, online)
        self.sites = range(len(partitions)) if sites is None else sites
        self.sent: dict[int, list[tuple[str, int]]] = {}

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(node_id=node, public_key=public_key(self.sites[node - 2]))
            for node in self.get_node_ids()
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        for message in messages:
            arrays = sum(map(len, message.content.array_records.values()))
            word = (message.metadata.message_type, arrays)
            self.sent.setdefault(message.metadata.dst_node_id, []).append(word)
        return super().push_messages(messages)


Absent = Mapping[int, Collection[int]]
"""Clients by round."""


def not_asking(strategy: AnyStrategy, absent: Absent) -> AnyStrategy:
    """Make a strategy leave clients out of the sample of a round; return it."""
    instructions = strategy.train_instructions

    def fewer(server_round: int, client_ids: Sequence[int]) -> Any:
        left_out = absent.get(server_round, ())
        asked = instructions(server_round, [c for c in client_ids if c not in left_out])
        return {c: own for c, own in asked.items() if c not in left_out}  # some ask more

    strategy.train_instructions = fewer  # type: ignore[method-assign]
    return strategy


def trained(strategy: StatefulStrategy) -> dict[int, list[int]]:
    """Return who took part in every round."""
    return {r: sorted(clients) for r, clients in strategy.train_metrics.items()}


def assert_same_runs(actual: StatefulStrategy, expected: StatefulStrategy) -> None:
    """Compare what two runs ended with, and what was measured in them."""
    assert_same_bits(actual.state_dict(), expected.state_dict())
    assert actual.train_metrics == expected.train_metrics
    assert actual.evaluate_metrics == expected.evaluate_metrics


def node_of(client: int) -> int:
    """Return the node of a client in an InProcessGrid with one client on each node."""
    return client + 2


def assert_same_bits(
    actual: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]
) -> None:
    assert actual.keys() == expected.keys()
    for key, array in expected.items():
        assert actual[key].dtype == array.dtype, key
        assert actual[key].shape == array.shape, key
        assert actual[key].tobytes() == array.tobytes(), key


def differs(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether two states have other bits: a NaN, such as an unset number, equals itself."""
    try:
        assert_same_bits(a, b)
    except AssertionError:
        return True
    return False
