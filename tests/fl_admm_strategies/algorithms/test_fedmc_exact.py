"""FedMC-ADMM with exact solutions, against docs/methods/fedmc-admm-notes.md, P14, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_admm_strategies import FedMCADMM
from fl_admm_strategies.maths.regularizers import L1Norm, SquaredL2
from tests.support.ratings import NUM_CLIENTS, NUM_ITEMS, RatingsRun, dense, initial, ratings
from tests.support.refusals import refused

LAM, GAMMA, BETA, CONFIDENCE = 0.3, 0.5, 0.8, 2.0
ROUNDS = ([0, 1, 3], [2, 4], [0, 2], [1, 3, 4], [0, 1, 2, 3, 4])


def federation(feedback: str = "explicit", **settings: Any) -> RatingsRun:
    options = {"beta": BETA, "feedback": feedback, "confidence": CONFIDENCE} | settings
    strategy = FedMCADMM(SquaredL2(GAMMA), **options)
    test = {i: ratings(i, seed=1) for i in range(NUM_CLIENTS)}
    return RatingsRun(strategy, SquaredL2(LAM), test=test)


def gradients(
    i: int, users: NDArray[Any], items: NDArray[Any], feedback: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return those of f_i in (U_i, b_i), (m, r), and in (W_i, c), (r, n)."""
    values, mask = dense(ratings(i))
    if feedback == "implicit":
        errors = (1 + CONFIDENCE * values) * (users @ items - mask)
        return errors @ items.T, users.T @ errors
    mean = values[mask > 0].mean()
    predicted = mean + users[:, :-1] @ items[:-1] + users[:, -1:] + items[-1]
    errors = mask * (predicted - values)
    ones = np.ones((len(users), 1)), np.ones((1, NUM_ITEMS))
    of_users = errors @ np.vstack([items[:-1], ones[1]]).T
    return of_users, np.hstack([users[:, :-1], ones[0]]).T @ errors


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
@pytest.mark.parametrize("duals", ["strategy", "client"])
def test_a_round_is_the_equations(feedback: str, duals: str) -> None:
    """Both minimisers have a gradient of 0; then (13), and V of the participants."""
    run = federation(feedback, duals=duals)
    V = initial()["item-factors"].copy()
    if feedback == "explicit":
        V[-1] = 0
    Y = {i: np.zeros_like(V) for i in range(NUM_CLIENTS)}
    for server_round, drawn in enumerate(ROUNDS, start=1):
        run.round(server_round, drawn)
        moves = []
        for i in drawn:
            held = run.held(i)
            in_users, _ = gradients(i, held["user-factors"], V, feedback)
            np.testing.assert_allclose(in_users + LAM * held["user-factors"], 0, atol=1e-10)
            new = BETA * held["row/dual"].reshape(V.shape)
            W = V + (new - Y[i]) / BETA  # (13)
            _, in_items = gradients(i, held["user-factors"], W, feedback)
            np.testing.assert_allclose(in_items + new, 0, atol=1e-10)
            moves.append(W - V)
            Y[i] = new
        mean = V + np.mean(moves, axis=0) + sum(Y.values()) / (NUM_CLIENTS * BETA)
        V = mean / (1 + GAMMA / (NUM_CLIENTS * BETA))
        np.testing.assert_allclose(run.strategy.item_factors, V, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
@pytest.mark.parametrize("drawn", [[[*range(NUM_CLIENTS)]], ROUNDS], ids=["all", "some"])
def test_the_default_converges_to_a_stationary_point_of_the_sum(drawn: Any, feedback: str) -> None:
    run = federation(feedback, beta=1.0)
    for server_round in range(1, 1001):
        run.round(server_round, drawn[server_round % len(drawn)])
    V = run.strategy.item_factors
    total = GAMMA * V
    for i in range(NUM_CLIENTS):
        users = run.held(i)["user-factors"]
        in_users, in_items = gradients(i, users, V, feedback)
        np.testing.assert_allclose(in_users + LAM * users, 0, atol=1e-5)
        total = total + in_items
    np.testing.assert_allclose(total, 0, atol=1e-5)


def test_no_weight_depends_on_the_number_of_clients() -> None:
    """All clients twice, and the items' weight twice: each V is the same."""
    one = federation()
    train = {i: ratings(i % NUM_CLIENTS) for i in range(2 * NUM_CLIENTS)}
    two = RatingsRun(FedMCADMM(SquaredL2(2 * GAMMA), beta=BETA), SquaredL2(LAM), train=train)
    for server_round in (1, 2, 3):
        one.round(server_round, [*range(NUM_CLIENTS)])
        two.round(server_round, [*range(2 * NUM_CLIENTS)])
    np.testing.assert_allclose(one.strategy.item_factors, two.strategy.item_factors, atol=1e-10)


def test_what_a_client_predicts_has_mean_and_biases() -> None:
    run = federation()
    run.round(1)
    run.evaluate(1)
    client, V = run.client(3), run.strategy.item_factors
    factors = client.personal_arrays()
    users, mean = factors["user-factors"], ratings(3).values.mean()
    expected = mean + users[:, :-1] @ V[:-1] + users[:, -1:] + V[-1]
    every = np.arange(NUM_ITEMS)
    for user in range(len(users)):
        found = client.predict(np.full(NUM_ITEMS, user), every)
        np.testing.assert_allclose(found, expected[user])
    assert client.recommend(2, 1, exclude_seen=False)[0] == expected[2].argmax()


def test_settings_that_do_not_go_together() -> None:
    with refused(ValueError, "feedback", "implicit", "published"):
        FedMCADMM(SquaredL2(0.1), feedback="implicit", published=True)
    run = federation()
    run.regularizer = L1Norm(0.1)
    with refused(TypeError, "regularizer", "SquaredL2"):
        run.round(1)
