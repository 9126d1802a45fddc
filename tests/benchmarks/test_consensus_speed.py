"""The server's work of one round of FedADMM beside a plain copy of the bytes it handles.

Run with `pytest tests/benchmarks/test_consensus_speed.py --benchmark-enable`. Everybody takes part:
`update` and `train_orders`, without packing or unpacking messages, which is Flower's. The copy is
single-threaded `np.copyto` of as many bytes as the round handles: the uploads, u_i, pi_i and the
anchors to send, 1.6 GB. Nothing here asserts a time.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from fl_admm_strategies import FedADMM
from fl_admm_strategies.runtime.messages import Order, Reply

CLIENTS = 1000
SHAPES = {"a.weight": (300, 300), "a.bias": (300,), "b.weight": (90, 100), "b.bias": (700,)}
WIDTH = sum(int(np.prod(shape)) for shape in SHAPES.values())  # 100,000


def server_round() -> Callable[[], dict[int, Order]]:
    """Return a round of a run in which all clients are in step with the server."""
    rng = np.random.default_rng(0)
    first = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    strategy = FedADMM()
    strategy.begin(first, range(CLIENTS))
    replies = {
        client: Reply({name: array + np.float32(client) for name, array in first.items()}, 1.0, {})
        for client in strategy.client_ids
    }
    strategy._in_sync = set(strategy.client_ids)
    rounds = count(1)

    def one_round() -> dict[int, Order]:
        number = next(rounds)
        strategy.update(number, replies)
        return strategy.train_orders(number + 1, strategy.client_ids)

    return one_round


def test_copy(benchmark: Any) -> None:
    benchmark.group = f"{CLIENTS} clients x {WIDTH} parameters"
    source = np.ones((CLIENTS, WIDTH), np.float32)
    target = np.zeros_like(source)

    def copy_all() -> None:
        for _ in ("uploads", "u_i", "pi_i", "anchors"):
            np.copyto(target, source)

    benchmark.pedantic(copy_all, warmup_rounds=1, rounds=5)


def test_server_round(benchmark: Any) -> None:
    benchmark.group = f"{CLIENTS} clients x {WIDTH} parameters"
    assert WIDTH == 100_000
    orders = benchmark.pedantic(server_round(), warmup_rounds=1, rounds=5)
    assert len(orders) == CLIENTS
    assert all(list(order.groups) == ["center"] for order in orders.values())
