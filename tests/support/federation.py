"""The federation of the tests: a small model and its data, clients, a grid, comparisons."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import ServerApp
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import accuracy
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction, Reply
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


Raises = Mapping[int, Sequence[int]]
"""By client, the rounds in which its training raises, when its state has changed."""


def client_fn_of(
    client_class: Callable[..., NumPyClient], raises: Raises | None = None
) -> ClientFn:
    def client_fn(context: Context) -> Any:
        client = make_client(client_class, context)
        if raises is not None:
            rounds = raises.get(int(context.node_config["partition-id"]), ())
            client = Raising(client, rounds)
        return client.to_client()

    return client_fn


@dataclass
class MeanState:
    """The model."""

    model: Arrays


class Mean(StatefulStrategy):
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


# --- The federation -------------------------------------------------------------------------------

Online = Mapping[int, Sequence[int]]
"""The connected nodes by round; a round that is missing is like the one before it."""

# Nodes 2, 3, 4 are there from the start, node 5 comes later. The joining client's id is between
# others'.
INITIAL, JOINING = [0, 1, 4], 2
PARTITIONS = (*INITIAL, JOINING)
FROM_ROUND_3: Online = {0: [2, 3, 4], 3: [2, 3, 4, 5]}
# Client 1 is away from round 3 on; in round 6 it is back on another node.
GONE_AND_BACK: Online = {0: [2, 3, 4], 3: [2, 4], 6: [2, 4, 5]}

AWAY = "away"
"""The fault of a message that does not arrive; the others are of a reply."""

Faults = Mapping[int, Mapping[int, str]]
"""By client, the training rounds in which its message or its reply has a fault, and which."""


def _with_last_array(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Spoil:
    def spoil(replies: list[Message]) -> list[Message]:
        for reply in replies:
            # A method that uploads nothing expects no array, so that another one is a fault.
            arrays = dict(reply.content.array_records["arrays"]) or {"extra": Array(np.zeros(2))}
            name = list(arrays)[-1]
            arrays[name] = Array(change(arrays[name].numpy()))
            reply.content["arrays"] = ArrayRecord(arrays)
        return replies

    return spoil


FAULTS: dict[str, Spoil] = {
    "wrong shape": _with_last_array(lambda array: array.reshape(-1)[:-1]),
    "NaN": _with_last_array(lambda array: np.full_like(array, np.nan)),
    "too large": _with_last_array(lambda array: np.full_like(array, np.finfo(array.dtype).max)),
    "lost": lambda replies: [],
    "twice": lambda replies: [*replies, *replies],
}


class Federation(InProcessGrid):
    """Clients in this process: a test reads and spoils messages; nodes come and go.

    Parameters
    ----------
    app : ClientApp
    clients : int or sequence of int
        How many nodes there are, or the client of each: these say that there are three. The first
        node has the id 2.
    online : Online, optional
        The connected nodes by round; by default all of them.
    spoil : dict of int to callable, optional
        By round, what is done to the list of training replies.
    faults : Faults, optional
    shuffled : int, optional
        The seed of the order in which nodes and replies come.

    Attributes
    ----------
    sent, received : list of (message type, round, list of Message)
    server_round : int
        The round of the last training message.
    asked : list of int
        The nodes that got a query after the run had begun.
    deaf_for : int
        How often `pull_messages` has nothing to say.
    away : set of int
        Clients, one on each node, that are not connected.
    """

    def __init__(
        self,
        app: Any,
        clients: int | Sequence[int],
        online: Online | None = None,
        *,
        spoil: Mapping[int, Spoil] | None = None,
        faults: Faults | None = None,
        shuffled: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(clients, int):
            configs = [
                {"partition-id": client, "num-partitions": len(INITIAL)} for client in clients
            ]
            options = {"node_configs": configs, **options}
        super().__init__(app, clients if isinstance(clients, int) else len(clients), **options)
        self.spoil, self.faults = dict(spoil or {}), faults or {}
        self.online = None if online is None else dict(online)
        self.random = None if shuffled is None else random.Random(shuffled)
        self.sent: list[tuple[str, int, list[Message]]] = []
        self.received: list[tuple[str, int, list[Message]]] = []
        self.server_round = 0
        self.asked: list[int] = []
        self.deaf_for = 0
        self.away: set[int] = set()

    def get_node_ids(self) -> list[int]:
        nodes = super().get_node_ids()
        if self.online is not None:
            known = [r for r in self.online if r <= self.server_round + 1]
            nodes = list(self.online[max(known)])
        nodes = [node for node in nodes if node - node_of(0) not in self.away]
        if self.random is not None:
            self.random.shuffle(nodes)
        return nodes

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

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        messages = list(messages)
        delivered = [m for m in messages if self._fault(m, m.metadata.dst_node_id) != AWAY]
        replies = super().send_and_receive(delivered, timeout=timeout)
        if messages:
            kind = messages[0].metadata.message_type
            server_round = int(messages[0].metadata.group_id or 0)
            replies = self._spoiled(replies, kind, server_round)
            self.sent.append((kind, server_round, messages))
            self.received.append((kind, server_round, replies))
        if self.random is not None:
            self.random.shuffle(replies)
        return replies

    def _spoiled(self, replies: list[Message], kind: str, server_round: int) -> list[Message]:
        arrived: list[Message] = []
        for reply in replies:
            fault = FAULTS.get(self._fault(reply, reply.metadata.src_node_id))
            arrived += [reply] if fault is None else fault([reply])
        if kind != MessageType.TRAIN or server_round not in self.spoil:
            return arrived
        return self.spoil[server_round](arrived)

    def _fault(self, message: Message, node: int) -> str:
        if message.metadata.message_type != MessageType.TRAIN:
            return ""
        own = self.faults.get(node - node_of(0), {})
        return own.get(int(message.metadata.group_id or 0), "")

    def phase(self, kind: str, server_round: int) -> list[Message]:
        """Return the messages that went out in a phase."""
        return next(m for k, r, m in self.sent if (k, r) == (kind, server_round))

    def replies(self, kind: str, server_round: int) -> list[Message]:
        """Return the replies that came in a phase."""
        return next(m for k, r, m in self.received if (k, r) == (kind, server_round))

    def forget(self, client: int) -> None:
        """Take from a client all that it keeps."""
        state = self.context(node_of(client)).state
        for key in list(state):
            del state[key]


@cache
def public_key(site: int) -> bytes:
    """Return the key of a site, as Flower tells a ServerApp."""
    key = ec.derive_private_key(site + 1, ec.SECP256R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class KeyedGrid(Federation):
    """A federation of nodes that have keys, as SuperNodes do: each its own, or a site's.

    Attributes
    ----------
    words : dict of int to list of (str, int)
        By node, the type of each message to it, and how many arrays it held.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: Sequence[int],
        online: Online,
        sites: Sequence[int] | None = None,
    ) -> None:
        super().__init__(app, clients, online)
        self.sites = range(len(clients)) if sites is None else sites
        self.words: dict[int, list[tuple[str, int]]] = {}

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
            self.words.setdefault(message.metadata.dst_node_id, []).append(word)
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


def method_state(strategy: StatefulStrategy) -> dict[str, NDArray[Any]]:
    """Return the part of a strategy's state that is its method's."""
    state = strategy.state_dict()
    return {name: array for name, array in state.items() if name.startswith("state/")}


def assert_same_runs(actual: StatefulStrategy, expected: StatefulStrategy) -> None:
    """Compare what two runs ended with, and what was measured in them, to the bit."""
    assert_same_bits(actual.state_dict(), expected.state_dict())
    assert actual.train_metrics == expected.train_metrics
    assert actual.evaluate_metrics == expected.evaluate_metrics


def assert_equal_to_rounding(actual: StatefulStrategy, expected: StatefulStrategy) -> None:
    """Compare the same in runs whose sums may be in another order."""
    assert_close(method_state(actual), method_state(expected))
    for found, wanted in (
        (actual.train_metrics, expected.train_metrics),
        (actual.evaluate_metrics, expected.evaluate_metrics),
    ):
        assert {r: list(clients) for r, clients in found.items()} == {
            r: list(clients) for r, clients in wanted.items()
        }
        for server_round, clients in wanted.items():
            for client, metrics in clients.items():
                assert found[server_round][client] == pytest.approx(metrics, rel=1e-3, abs=1e-4)


def assert_close(
    actual: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    rtol: float = 1e-3,
    atol: float = 1e-4,
) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=rtol, atol=atol, err_msg=name)


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
