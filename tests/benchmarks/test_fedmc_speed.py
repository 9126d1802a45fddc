"""A client's round of FedMC-ADMM beside the same arithmetic in plain scipy.sparse.

Run with `pytest tests/benchmarks/test_fedmc_speed.py --benchmark-enable`. Compare within a group.
The shapes are those of MovieLens 1M dealt to 100 clients: 60 users, 3,706 items, 8,000 training
ratings, a few items with most of them, N = 10. "fit" is the whole round: reading and keeping the
client's variables and building the sparse structure included. Nothing here asserts a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from clients.methods.fedmc_admm import FedMCADMMClient, item_steps, user_steps
from clients.toolkit.data.ratings import Ratings
from clients.toolkit.round.completion import Residual
from fl_admm_strategies.algorithms.fedadmm import FedADMMRule
from fl_admm_strategies.algorithms.fedmc_admm import FedMCInstruction
from fl_admm_strategies.maths.regularizers import SquaredL2
from tests.clients.methods.messages import received

NUM_USERS, NUM_ITEMS, NUM_RATINGS, STEPS = 60, 3706, 8000, 10
P, BETA, LAM = 100, 1.0, 1e-6
RANKS = [5, 8, 13]


def movielens_like() -> Ratings:
    rng = np.random.default_rng(0)
    popularity = 1 / (np.arange(NUM_ITEMS) + 50.0)
    odds = np.tile(popularity / popularity.sum() / NUM_USERS, NUM_USERS)
    chosen = rng.choice(NUM_USERS * NUM_ITEMS, NUM_RATINGS, replace=False, p=odds)
    users, items = np.divmod(chosen, NUM_ITEMS)
    stars = rng.integers(1, 6, NUM_RATINGS).astype(float)
    return Ratings(users, items, stars, NUM_USERS, NUM_ITEMS)


def variables(rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(1)
    return rng.random((NUM_USERS, rank)), rng.random((rank, NUM_ITEMS))


def reference(
    M: csr_matrix, users: NDArray[Any], U: NDArray[Any], W: NDArray[Any], anchor: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(66) and (67) as one writes them down."""

    def error(U: NDArray[Any], W: NDArray[Any]) -> csr_matrix:
        predicted = np.einsum("kr,kr->k", U[users], W.T[M.indices])
        return csr_matrix((predicted - M.data, M.indices, M.indptr), M.shape)

    L = np.linalg.norm(W @ W.T)
    for _ in range(STEPS):
        U = (L * U - error(U, W) @ W.T) / (L + LAM)
    L = np.linalg.norm(U.T @ U)
    for _ in range(STEPS):
        W = (L / P * W + BETA * anchor - (error(U, W).T @ U).T / P) / (L / P + BETA)
    return U, W


@pytest.mark.parametrize("rank", RANKS)
def test_reference(benchmark: Any, rank: int) -> None:
    benchmark.group = f"rank {rank}"
    ratings, (U, V) = movielens_like(), variables(rank)
    benchmark(reference, ratings.to_csr(), ratings.users, U, V, V)


@pytest.mark.parametrize("rank", RANKS)
def test_steps(benchmark: Any, rank: int) -> None:
    benchmark.group = f"rank {rank}"
    ratings, (U, V) = movielens_like(), variables(rank)

    def both() -> tuple[NDArray[Any], NDArray[Any]]:
        items = np.ascontiguousarray(V.T)
        residual = Residual(ratings, V.dtype)
        users = user_steps(residual, U, items, SquaredL2(LAM), STEPS)
        new = item_steps(residual, users, items, items, P * BETA, STEPS)
        return users, new.T

    for own, plain in zip(
        benchmark(both), reference(ratings.to_csr(), ratings.users, U, V, V), strict=True
    ):
        np.testing.assert_allclose(own, plain, rtol=1e-9)


@pytest.mark.parametrize("rank", RANKS)
def test_fit(benchmark: Any, rank: int) -> None:
    benchmark.group = f"rank {rank}"
    ratings, (_, V) = movielens_like(), variables(rank)
    context = Context(1, 0, {}, RecordDict(), {})
    asked = FedMCInstruction(
        model={"V": V},
        start={},
        rule=FedADMMRule(True, BETA, 1 / P).text(),
        duals="strategy",
        optimised=["V"],
        factor_seed=0,
        factor_scale=1.0,
        inner_steps=STEPS,
        feedback="explicit",
        confidence=1.0,
    )
    FedMCADMMClient(context, ratings, SquaredL2(LAM)).fit(*received(asked))
    later = received(replace(asked, start=None), version=1, server_round=2)

    def fit() -> None:
        FedMCADMMClient(context, ratings, SquaredL2(LAM)).fit(*later)

    benchmark(fit)
