"""The server's work of one round of FedADMM beside a plain copy of the bytes it handles.

Run with `pytest tests/benchmarks/test_consensus_speed.py --benchmark-enable`. Everybody takes part:
`update` and `train_instructions`, without packing or unpacking messages, which is Flower's. The
copy is single-threaded `np.copyto` of as many bytes as the round handles: the uploads, u_i, pi_i
and the anchors to send, 1.6 GB. Nothing here asserts a time. Without --benchmark-enable, ten
clients show that it works.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from fl_admm_strategies import FedADMM
from fl_admm_strategies.algorithms.fedadmm import FedADMMInstruction
from fl_admm_strategies.runtime.messages import Reply

CLIENTS, FEW = 1000, 10
SHAPES = {"a.weight": (300, 300), "a.bias": (300,), "b.weight": (90, 100), "b.bias": (700,)}
WIDTH = sum(int(np.prod(shape)) for shape in SHAPES.values())  # 100,000


def server_round(clients: int) -> Callable[[], dict[int, FedADMMInstruction]]:
    """Return a round of a run in which all clients are in step with the server."""
    rng = np.random.default_rng(0)
    first = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    strategy = FedADMM()
    strategy.run.begin(first, range(clients))
    strategy.run.handshake(lambda asked, kind: [], {})
    replies = {
        client: Reply({name: array + np.float32(client) for name, array in first.items()}, 1.0, {})
        for client in strategy.client_ids
    }
    strategy.membership.accept(strategy.client_ids, 0)
    rounds = count(1)

    def one_round() -> dict[int, FedADMMInstruction]:
        number = next(rounds)
        strategy.update(number, replies)
        return strategy.train_instructions(number + 1, strategy.client_ids)

    return one_round


def test_copy(benchmark: Any) -> None:
    benchmark.group = f"{CLIENTS} clients x {WIDTH} parameters"
    source = np.ones((CLIENTS if benchmark.enabled else FEW, WIDTH), np.float32)
    target = np.zeros_like(source)

    def copy_all() -> None:
        for _ in ("uploads", "u_i", "pi_i", "anchors"):
            np.copyto(target, source)

    benchmark.pedantic(copy_all, warmup_rounds=1, rounds=5)


def test_server_round(benchmark: Any) -> None:
    benchmark.group = f"{CLIENTS} clients x {WIDTH} parameters"
    assert WIDTH == 100_000
    clients = CLIENTS if benchmark.enabled else FEW
    instructions = benchmark.pedantic(server_round(clients), warmup_rounds=1, rounds=5)
    assert len(instructions) == clients
    assert all(own.start is None for own in instructions.values())
