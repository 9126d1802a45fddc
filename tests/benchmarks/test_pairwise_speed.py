"""FPFC's server work of one round beside a plain copy of the vectors it touches.

Run with `pytest tests/benchmarks/test_pairwise_speed.py --benchmark-enable -m ""`. Compare within
a group: the copy is single-threaded `np.copyto` of the bytes that the touched pairs' vectors have.
All pairs are stored, which is the most expensive state. Nothing here asserts a time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fl_admm_strategies.maths.pairs import PairwiseStore
from fl_admm_strategies.maths.penalties import SmoothedSCAD

SIZES = [
    pytest.param((100, 610, 30), id="m=100,d=610,active=30"),  # the paper's S1
    pytest.param((400, 4010, 120), id="m=400,d=4010,active=120", marks=pytest.mark.slow),
    pytest.param((1000, 1000, 300), id="m=1000,d=1000,active=300", marks=pytest.mark.slow),
]
ROUNDS = {100: 500, 400: 20, 1000: 20}  # short ones are disturbed more


def touched_pairs(m: int, active: int) -> int:
    """Pairs with at least one client active: all but those among the others."""
    return (m * (m - 1) - (m - active) * (m - active - 1)) // 2


def server_round(
    m: int, d: int, active: int, kernels: ModuleType
) -> tuple[PairwiseStore, Callable[[], None]]:
    """Return a store with all pairs in the first regime of (6), and a round on it."""
    rng = np.random.default_rng(0)
    # Distances of about .5: below xi + lam/rho, so every pair is stored and stays so.
    spread = 0.35 / np.sqrt(d)
    store = PairwiseStore(np.zeros((m, d), np.float32), SmoothedSCAD(0.6), 1.0, kernels)
    store.update(range(m), spread * rng.normal(size=(m, d)))
    models = (spread * rng.normal(size=(4, active, d))).astype(np.float32)
    clients = [rng.permutation(m)[:active] for _ in range(64)]
    rounds = count()

    def one_round() -> None:
        k = next(rounds)
        store.update(clients[k % 64], models[k % 4])
        store.zeta(clients[(k + 1) % 64])

    return store, one_round


def size_of(benchmark: Any, *size: int) -> tuple[int, ...]:
    """Return clients, numbers and active clients; few where nothing is measured."""
    m, d, active = size
    benchmark.group = f"m={m}, d={d}, {active} active"
    return size if benchmark.enabled else (m // 10, d // 10, active // 10)


@pytest.mark.parametrize("size", SIZES)
def test_copy(benchmark: Any, size: tuple[int, int, int]) -> None:
    m, d, active = size_of(benchmark, *size)
    source = np.ones((touched_pairs(m, active), d), np.float32)
    target = np.zeros_like(source)
    benchmark.pedantic(np.copyto, args=(target, source), warmup_rounds=1, rounds=ROUNDS[size[0]])


@pytest.mark.parametrize("engine", ["numba", "numpy"])
@pytest.mark.parametrize("size", SIZES)
def test_server_round(benchmark: Any, size: tuple[int, int, int], engine: str) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    m, d, active = size_of(benchmark, *size)
    kernels = import_module(f"fl_admm_strategies.maths.pairs.kernels_{engine}")
    store, one_round = server_round(m, d, active, kernels)
    rounds = ROUNDS[size[0]] if engine == "numba" else 5
    benchmark.pedantic(one_round, warmup_rounds=2, rounds=rounds)
    vectors = store.state_arrays()["delta"]
    assert len(vectors) == m * (m - 1) // 2
    benchmark.extra_info["MB of the vectors"] = vectors.nbytes // 10**6
