"""A small federation of ratings, driven round by round without a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from clients.methods.fedmc_admm import FedMCADMMClient
from clients.toolkit.memory import Memory
from clients.toolkit.ratings import Ratings
from fl_admm_strategies.algorithms.fedmc_admm import FedMCADMM
from fl_admm_strategies.maths.regularizers import Regularizer, SquaredL2
from fl_admm_strategies.runtime.messages import ClientInstruction, RawReply

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


def contract_client(context: Context, *_: Any, state_dir: Any = None, **__: Any) -> FedMCADMMClient:
    """Return the client of the contract test, which offers a model and samples: not for it."""
    client = int(context.node_config.get("partition-id", context.node_id % 6))
    test = None if client == 1 else ratings(client, seed=1)
    return FedMCADMMClient(context, ratings(client), SquaredL2(0.1), test=test, state_dir=state_dir)


@dataclass
class Federation:
    """Clients with their contexts, which a strategy trains and evaluates directly."""

    strategy: FedMCADMM
    regularizer: Regularizer = field(default_factory=lambda: SquaredL2(0.1))
    first: dict[str, NDArray[Any]] = field(default_factory=initial)
    test: dict[int, Ratings] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contexts = {i: new_context(i) for i in range(NUM_CLIENTS)}
        self.train = {i: ratings(i) for i in range(NUM_CLIENTS)}
        self.strategy.run.begin(self.first, range(NUM_CLIENTS))
        self.strategy.run.handshake(lambda asked, _: self._fit(asked), {})

    def client(self, i: int) -> FedMCADMMClient:
        own = {"test": self.test.get(i), **self.options}
        return FedMCADMMClient(self.contexts[i], self.train[i], self.regularizer, **own)

    def _fit(self, asked: Mapping[int, ClientInstruction]) -> Iterator[tuple[int, RawReply]]:
        for i, own in asked.items():
            arrays, count, metrics = self.client(i).fit(own.flat(), own.full_config())
            yield i, RawReply({"item-factors": arrays[0]}, {**metrics, "num-examples": count})

    def round(self, server_round: int) -> list[int]:
        """Train a round; return who took part."""
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
