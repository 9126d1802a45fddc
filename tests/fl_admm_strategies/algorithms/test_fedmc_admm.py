"""FedMC-ADMM against a dense transcript of Algorithm 1, the identities of its theory, its edges.

T1 to T7, P6 and E1 are items of docs/methods/fedmc-admm-notes.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType
from numpy.typing import NDArray

from clients import client_app
from clients.methods.fedmc_admm import FedMCADMMClient
from clients.toolkit.data.ratings import Ratings
from fl_admm_strategies import FedMCADMM, initial_item_factors, made_by
from fl_admm_strategies.maths.regularizers import L1Norm, SquaredL2
from fl_admm_strategies.runtime.messages.records import RawReply
from tests.support.federation import Federation
from tests.support.ratings import (
    NUM_CLIENTS,
    NUM_ITEMS,
    RANK,
    RatingsRun,
    dense,
    initial,
    ratings,
)
from tests.support.refusals import refused

STAMP = made_by("FedMCADMM")
P = NUM_CLIENTS
BETA, STEPS = 0.8, 3
USERS, ITEMS = 0.3, 0.2  # lambda, gamma
KINDS = {"l2": (SquaredL2(USERS), SquaredL2(ITEMS)), "l1": (L1Norm(USERS), L1Norm(ITEMS))}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_place = pytest.mark.parametrize("duals", ["strategy", "client"])


def federation(kind: str = "l2", **settings: Any) -> RatingsRun:
    of_users, of_items = KINDS[kind]
    options = {"beta": BETA, "inner_steps": STEPS, "fraction_train": 0.4, "seed": 1} | settings
    return RatingsRun(FedMCADMM(of_items, published=True, **options), of_users)


def soft(x: NDArray[Any], threshold: float) -> NDArray[Any]:
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


class Transcript:
    """Algorithm 1, line by line, with dense matrices."""

    def __init__(self, run: RatingsRun, kind: str) -> None:
        self.kind = kind
        self.data = {i: dense(run.train[i]) for i in range(P)}
        self.V = run.first["item-factors"].copy()
        self.U = {i: run.first_users(i) for i in range(P)}
        self.W = {i: self.V.copy() for i in range(P)}
        self.Y = {i: np.zeros_like(self.V) for i in range(P)}

    def error(self, i: int, U: NDArray[Any], W: NDArray[Any]) -> NDArray[Any]:
        values, mask = self.data[i]
        return mask * (U @ W - values)

    def round(self, sampled: list[int]) -> None:
        V, l1 = self.V, self.kind == "l1"
        for i in sampled:
            U, W, Y = self.U[i], self.W[i], self.Y[i]
            L = np.linalg.norm(W @ W.T)
            for _ in range(STEPS):
                gradient = self.error(i, U, W) @ W.T
                of_l1 = soft(U - gradient / L, USERS / L)  # (71)
                of_l2 = (L * U - gradient) / (L + USERS)  # (66)
                U = of_l1 if l1 else of_l2
            L = np.linalg.norm(U.T @ U)
            for _ in range(STEPS):
                gradient = U.T @ self.error(i, U, W)
                W = (L / P * W + BETA * V - gradient / P - Y) / (L / P + BETA)  # (67)
            self.U[i], self.W[i], self.Y[i] = U, W, Y + BETA * (W - V)  # (13), the old V
        mean = sum(self.W[i] + self.Y[i] / BETA for i in range(P)) / P
        if l1:
            self.V = soft(mean, ITEMS / (P * BETA))  # (73)
        else:
            self.V = P * BETA * mean / (P * BETA + ITEMS)  # (68)


# --- The algorithm ------------------------------------------------------------------------------


@each_kind
@each_place
def test_the_trajectory_is_that_of_algorithm_1(kind: str, duals: str) -> None:
    run = federation(kind, duals=duals)
    expected = Transcript(run, kind)
    seen: set[int] = set()
    for k in range(1, 13):
        sampled = run.round(k)
        assert len(sampled) == 2
        expected.round(sampled)
        seen.update(sampled)
        np.testing.assert_allclose(run.strategy.item_factors, expected.V, rtol=0, atol=1e-10)
    assert seen == set(range(P))
    for i in range(P):
        held = run.held(i)
        np.testing.assert_allclose(held["user-factors"], expected.U[i], rtol=0, atol=1e-10)
        W, dual = (held[f"row/{name}"].reshape(RANK, NUM_ITEMS) for name in ("u", "dual"))
        np.testing.assert_allclose(W, expected.W[i], rtol=0, atol=1e-10)
        np.testing.assert_allclose(BETA * dual, expected.Y[i], rtol=0, atol=1e-10)


def test_the_worked_example() -> None:
    # E1: one user and one item on both clients, M = (4, 2), lam = gamma = .1, beta = 1, N = 1,
    # U_i^0 = V^0 = 1. U_1 = (1 - (1 - 4))/1.1 = 3.6364; L_U = U_1^2, E = U_1 - 4 = -.3636, so
    # W_1 = (L_U/2 + 1 + 3.6364 * .3636/2)/(L_U/2 + 1) = 1.0869, Y_1 = W_1 - 1.
    one, zero = np.ones((1, 1)), np.zeros(1, np.int64)
    run = RatingsRun(
        FedMCADMM(SquaredL2(0.1), beta=1.0, inner_steps=1, published=True),
        SquaredL2(0.1),
        {"item-factors": one},
        train={i: Ratings(zero, zero, np.array([(4.0, 2.0)[i]]), 1, 1) for i in (0, 1)},
        users={0: one, 1: one},
    )
    for server_round, (U, W, Y, V) in {
        1: (
            [3.6363636364, 1.8181818182],
            [1.0868621064, 1.0623052960],
            [0.0868621064, 0.0623052960],
            1.0944451451,
        ),
        2: (
            [3.3930795305, 1.7294452507],
            [1.1535186290, 1.1066302071],
            [0.1459355903, 0.0744903580],
            1.1812260879,
        ),
    }.items():
        run.round(server_round)
        held = [run.held(i)["user-factors"].item() for i in (0, 1)]
        np.testing.assert_allclose(held, U, atol=1e-10)
        clients = run.strategy.state.clients
        np.testing.assert_allclose(clients.column("u")[:, 0], W, atol=1e-10)
        np.testing.assert_allclose(clients.column("dual")[:, 0], Y, atol=1e-10)
        np.testing.assert_allclose(run.strategy.item_factors, V, atol=1e-10)


# --- Messages -----------------------------------------------------------------------------------


def client_fn(context: Any) -> Any:
    i = int(context.node_config["partition-id"])
    train, test = ratings(i), ratings(i, seed=1)
    return FedMCADMMClient(context, train, SquaredL2(USERS), test=test).to_client()


@each_place
@pytest.mark.parametrize("published", [True, False])
def test_the_users_factors_are_in_no_message(duals: Any, published: bool) -> None:
    grid = Federation(client_app(client_fn), P)
    strategy = FedMCADMM(SquaredL2(ITEMS), published=published, duals=duals, seed=1)
    strategy.start(grid, initial_item_factors(RANK, NUM_ITEMS, seed=3), 3)
    for kind, _, messages in grid.received:
        for reply in messages:
            arrays = {n: a for r in reply.content.array_records.values() for n, a in r.items()}
            # One r x n array and nothing else but numbers: no room for m_i x r.
            expected = {"item-factors": (RANK, NUM_ITEMS)} if kind == MessageType.TRAIN else {}
            assert {n: a.shape for n, a in arrays.items()} == expected


# --- Evaluation ---------------------------------------------------------------------------------


def test_rmse_weighs_every_test_rating_alike_and_phi_is_the_objective() -> None:
    run = federation("l1")
    run.regularizer = L1Norm(2.0)  # so that some factors are 0
    run.test = {i: ratings(i, seed=1, density=0.1 + 0.2 * i) for i in range(P) if i != 2}
    run.options = {"mean": 3.0, "std": 1.5}
    run.round(1)
    metrics = run.evaluate(1)
    V, squares, count, entries = run.strategy.item_factors, 0.0, 0, []
    phi = ITEMS * np.abs(V).sum()
    for i in range(P):
        taken = run.strategy.membership.last_accepted[i] > 0
        U = run.held(i)["user-factors"] if taken else run.first_users(i)
        entries.append(U.ravel())
        values, mask = dense(run.train[i])
        phi += (0.5 * ((mask * (U @ V - values)) ** 2).sum() + 2.0 * np.abs(U).sum()) / P
        if i in run.test:
            values, mask = dense(run.test[i])
            squares += ((mask * (U @ V - values)) ** 2).sum()
            count += len(run.test[i])
    users = np.concatenate(entries)
    assert 0 < np.count_nonzero(users) < len(users)
    assert metrics == pytest.approx(
        {
            "loss": phi,  # (17)
            "rmse": 1.5 * np.sqrt(squares / count),
            "nnz-users": np.count_nonzero(users) / len(users),  # Figure 4's
            "nnz-items": np.count_nonzero(V) / V.size,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize(
    ("error", "rmse"), [(np.nan, 1.0), (np.inf, 1.0), (-9.0, 1.0), (14.0, 2.0)]
)
def test_a_bad_report_does_not_hide_the_others(error: float, rmse: float) -> None:
    strategy = FedMCADMM(SquaredL2(ITEMS), seed=1)
    strategy.run.begin(initial(), range(2))
    strategy.run.configure_evaluate(1, {})
    own = {"loss": 1.0, "num-examples": 1, "test-ratings": 2}
    replies = [
        (0, RawReply(None, {**own, **STAMP, "squared-error": 2.0})),
        (1, RawReply(None, {**own, **STAMP, "squared-error": error})),
    ]
    found = strategy.run.aggregate_evaluate(1, replies)
    assert found["rmse"] == rmse  # sqrt((2 + 14) / (2 + 2))


def test_the_initial_arrays_are_one_matrix() -> None:
    matrix = np.ones((2, 3))
    for arrays in ({"a": matrix, "b": matrix}, {"a": matrix[0]}, {"a": matrix.astype(np.int64)}):
        with refused(ValueError, "one array of floating point numbers"):
            FedMCADMM(SquaredL2(ITEMS)).run.begin(arrays, range(P))
