"""The server's work of one round of FedADMM beside a plain copy of the bytes it handles.

Run with `pytest tests/benchmarks/test_consensus_speed.py --benchmark-enable`. Everybody takes part:
`update` and `train_instructions`, without packing or unpacking messages, which is Flower's. The
copy is single-threaded `np.copyto` of as many bytes as the round handles: the uploads, u_i, pi_i
and the anchors to send, 1.6 GB: of 1,000 clients with 100,000 parameters, or 50 with 2,000,000,
which no cache holds. Nothing here asserts a time. Without --benchmark-enable, ten clients show that
it works.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from fl_admm_strategies import FedADMM
from fl_admm_strategies.algorithms.shared.consensus import ProximalInstruction
from fl_admm_strategies.runtime.messages.records import ClientInstruction, Reply

FEW = 10
SIZES = {"100,000": (1000, 1), "2,000,000": (50, 20)}  # clients, and copies of these arrays
SHAPES = {"a.weight": (300, 300), "a.bias": (300,), "b.weight": (90, 100), "b.bias": (700,)}
WIDTH = sum(int(np.prod(shape)) for shape in SHAPES.values())  # 100,000


def server_round(clients: int, copies: int) -> Callable[[], dict[int, ProximalInstruction]]:
    """Return a round of a run in which all clients are in step with the server."""
    rng = np.random.default_rng(0)
    first = {
        f"{name}.{copy}": rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
        for copy in range(copies)
    }
    strategy = FedADMM(rho=0.1)
    strategy.run.begin(first, range(clients))
    strategy.run.handshake(lambda asked, kind: [], {})
    sent = ClientInstruction({}, {"rule": strategy.rule_of(0).text()})
    replies = {
        client: Reply(
            {name: array + np.float32(client) for name, array in first.items()}, 1.0, {}, sent=sent
        )
        for client in strategy.client_ids
    }
    strategy.membership.accept(strategy.client_ids, 0)
    rounds = count(1)

    def one_round() -> dict[int, ProximalInstruction]:
        number = next(rounds)
        strategy.update(number, replies)
        return strategy.train_instructions(number + 1, strategy.client_ids)

    return one_round


@pytest.mark.parametrize("size", SIZES)
def test_copy(benchmark: Any, size: str) -> None:
    (clients, copies), benchmark.group = SIZES[size], f"{size} parameters"
    width = copies * WIDTH if benchmark.enabled else WIDTH
    source = np.ones((clients if benchmark.enabled else FEW, width), np.float32)
    target = np.zeros_like(source)

    def copy_all() -> None:
        for _ in ("uploads", "u_i", "pi_i", "anchors"):
            np.copyto(target, source)

    benchmark.pedantic(copy_all, warmup_rounds=1, rounds=5)


@pytest.mark.parametrize("size", SIZES)
def test_server_round(benchmark: Any, size: str) -> None:
    (clients, copies), benchmark.group = SIZES[size], f"{size} parameters"
    assert WIDTH == 100_000
    if not benchmark.enabled:
        clients, copies = FEW, 1
    instructions = benchmark.pedantic(server_round(clients, copies), warmup_rounds=1, rounds=5)
    assert len(instructions) == clients
    assert all(own.start is None for own in instructions.values())
