"""A small federation of ratings, driven round by round without a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from clients import FedEASEClient, FedMCADMMClient
from clients.toolkit.data.ratings import Ratings
from clients.toolkit.round.completion import CompletionClient
from clients.toolkit.round.memory import Memory
from fl_admm_strategies.algorithms.shared.completion import CompletionStrategy
from fl_admm_strategies.maths.regularizers import Regularizer, SquaredL2
from fl_admm_strategies.runtime.messages.records import ClientInstruction, RawReply

NUM_CLIENTS, NUM_ITEMS, RANK = 5, 7, 2


def ratings(client: int, *, density: float = 0.6, seed: int = 0) -> Ratings:
    """Return ratings of 3 + client users, 1 to 5 stars; item 6 is rated by nobody."""
    rng = np.random.default_rng([seed, client])
    observed = rng.random((3 + client, NUM_ITEMS)) < density
    observed[:, -1] = False
    observed[0, 0] = True  # never empty
    users, items = np.nonzero(observed)
    stars = rng.integers(1, 6, len(users)).astype(float)
    return Ratings(users, items, stars, 3 + client, NUM_ITEMS)


def dense(ratings: Ratings) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return M and the mask of what is observed, for tests only."""
    shape = (ratings.num_users, ratings.num_items)
    values, mask = np.zeros(shape), np.zeros(shape)
    values[ratings.users, ratings.items] = ratings.values
    mask[ratings.users, ratings.items] = 1
    return values, mask


def new_context(client: int = 0) -> Context:
    config = {"partition-id": client, "num-partitions": NUM_CLIENTS}
    return Context(1, client, config, RecordDict(), {})


def initial(seed: int = 3) -> dict[str, NDArray[Any]]:
    return {"item-factors": np.random.default_rng(seed).random((RANK, NUM_ITEMS))}


def contract_client(
    context: Context,
    *_: Any,
    kind: type[CompletionClient[Any]] = FedMCADMMClient,
    num_items: int = NUM_ITEMS,
    state_dir: Any = None,
    **__: Any,
) -> CompletionClient[Any]:
    """Return the client of the contract test, which offers a model and samples: not for it."""
    client = int(context.node_config.get("partition-id", context.node_id % 6))
    own, test = (replace(ratings(client, seed=seed), num_items=num_items) for seed in (0, 1))
    needs = () if kind is FedEASEClient else (SquaredL2(0.1),)
    return kind(context, own, *needs, test=None if client == 1 else test, state_dir=state_dir)


@dataclass
class RatingsRun:
    """Clients with their contexts, which a strategy trains and evaluates directly."""

    strategy: CompletionStrategy
    regularizer: Regularizer = field(default_factory=lambda: SquaredL2(0.1))
    first: dict[str, NDArray[Any]] = field(default_factory=initial)
    test: dict[int, Ratings] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    density: float = 0.6
    kind: type[CompletionClient[Any]] = FedMCADMMClient
    train: dict[int, Ratings] = field(default_factory=dict)
    users: dict[int, NDArray[Any]] = field(default_factory=dict)  # U_i^0, drawn by default

    def __post_init__(self) -> None:
        if not self.train:
            self.train = {i: ratings(i, density=self.density) for i in range(NUM_CLIENTS)}
        self.contexts = {i: new_context(i) for i in self.train}
        self.strategy.run.begin(self.first, self.train)
        self.strategy.run.handshake(lambda asked, _: self._fit(asked), {})

    def client(self, i: int) -> CompletionClient[Any]:
        own = {"test": self.test.get(i), **self.options}
        client = self.kind(self.contexts[i], self.train[i], self.regularizer, **own)
        if i in self.users:
            setattr(client, "first_users", lambda *_: self.users[i])  # noqa: B010
        return client

    def _fit(self, asked: Mapping[int, ClientInstruction]) -> Iterator[tuple[int, RawReply]]:
        for i, own in asked.items():
            arrays, count, metrics = self.client(i).fit(own.flat(), own.full_config())
            named = dict(zip(own.upload_names(), arrays, strict=True))
            yield i, RawReply(named, {**metrics, "num-examples": count})

    def round(self, server_round: int, sampled: list[int] | None = None) -> list[int]:
        """Train a round, with these clients drawn if they are given; return who was asked."""
        if sampled is not None:
            setattr(self.strategy.run.sampling, "for_training", lambda *_: sampled)  # noqa: B010
        asked = self.strategy.run.configure_train(server_round, {})
        self.strategy.run.aggregate_train(server_round, self._fit(asked))
        return sorted(asked)

    def evaluate(self, server_round: int) -> dict[str, float]:
        asked = self.strategy.run.configure_evaluate(server_round, {})

        def replies() -> Iterator[tuple[int, RawReply]]:
            for i, own in asked.items():
                loss, count, metrics = self.client(i).evaluate(own.flat(), own.full_config())
                yield i, RawReply(None, {"loss": loss, **metrics, "num-examples": count})

        return self.strategy.run.aggregate_evaluate(server_round, replies())

    def first_users(self, i: int) -> NDArray[Any]:
        """Return U_i^0 as the docstrings promise it: uniform, from the seed in the message."""
        asked = self.strategy.evaluate_instructions(1, [i])[i]
        rng = np.random.default_rng(asked.factor_seed)
        return rng.uniform(0, asked.factor_scale, (self.train[i].num_users, RANK))

    def held(self, i: int) -> dict[str, NDArray[Any]]:
        """Return what a client keeps after the last round that it took part in."""
        return Memory(self.contexts[i]).latest()


def worked_example(strategy: CompletionStrategy, kind: type[CompletionClient[Any]]) -> RatingsRun:
    """Return two clients with two users each: M_1 = ((5, -, 3), (4, 2, -)), M_2 likewise."""
    matrices = np.array([[[5.0, 0, 3], [4, 2, 0]], [[0, 1, 4], [1, 5, 0]]])
    train = {}
    for i, matrix in enumerate(matrices):
        users, items = np.nonzero(matrix)
        train[i] = Ratings(users, items, matrix[users, items], 2, 3)
    return RatingsRun(
        strategy,
        SquaredL2(0.1),
        {"item-factors": np.array([[1, 0.5, 0.8]])},
        kind=kind,
        train=train,
        users={0: np.array([[1.0], [0.6]]), 1: np.array([[0.4], [0.9]])},
    )
