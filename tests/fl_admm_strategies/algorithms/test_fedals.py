"""FedALS against alternating least squares with all ratings in one place, written as loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clients import FedALSClient
from fl_admm_strategies import FedALS
from fl_admm_strategies.maths.regularizers import L1Norm, SquaredL2
from fl_admm_strategies.runtime.algorithm import MembersChange
from tests.support.ratings import NUM_CLIENTS, NUM_ITEMS, RatingsRun, dense, initial, ratings

LAM, GAMMA, CONFIDENCE = 0.3, 0.5, 2.0


def federation(feedback: str = "explicit", **settings: Any) -> RatingsRun:
    strategy = FedALS(
        SquaredL2(GAMMA),
        feedback=feedback,  # type: ignore[arg-type]
        confidence=CONFIDENCE,
        **settings,
    )
    test = {i: ratings(i, seed=1) for i in range(NUM_CLIENTS)}
    return RatingsRun(strategy, regularizer=SquaredL2(LAM), kind=FedALSClient, test=test)


def central_users(
    clients: list[int], items: NDArray[Any], feedback: str
) -> dict[int, NDArray[np.float64]]:
    """Solve for every user, rating by rating."""
    found = {}
    for i in clients:
        values, mask = dense(ratings(i))
        rows = []
        for value, rated in zip(values, mask, strict=True):
            a, b = LAM * np.eye(len(items)), np.zeros(len(items))
            for j in range(NUM_ITEMS):
                if feedback == "implicit":
                    weight = 1 + CONFIDENCE * value[j]
                    a += weight * np.outer(items[:, j], items[:, j])
                    b += weight * rated[j] * items[:, j]
                elif rated[j]:
                    x = np.append(items[:-1, j], 1)
                    mean = values[mask > 0].mean()
                    a += np.outer(x, x)
                    b += (value[j] - mean - items[-1, j]) * x
            rows.append(np.linalg.solve(a, b))
        found[i] = np.array(rows)
    return found


def central_items(users: dict[int, NDArray[Any]], feedback: str) -> NDArray[np.float64]:
    columns = []
    for j in range(NUM_ITEMS):
        rank = next(iter(users.values())).shape[1]
        a, b = GAMMA * np.eye(rank), np.zeros(rank)
        for i, factors in users.items():
            values, mask = dense(ratings(i))
            mean = values[mask > 0].mean()
            for user, value, rated in zip(factors, values[:, j], mask[:, j], strict=True):
                if feedback == "implicit":
                    weight = 1 + CONFIDENCE * value
                    a += weight * np.outer(user, user)
                    b += weight * rated * user
                elif rated:
                    x = np.append(user[:-1], 1)
                    a += np.outer(x, x)
                    b += (value - mean - user[-1]) * x
        columns.append(np.linalg.solve(a, b))
    return np.array(columns).T


def first_items(feedback: str) -> NDArray[Any]:
    items = initial()["item-factors"].copy()
    if feedback == "explicit":
        items[-1] = 0
    return items


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_it_is_centralised_least_squares(feedback: str) -> None:
    """Clients that sit out count with the users that they had."""
    here, items, users = federation(feedback), first_items(feedback), {}
    everyone = [*range(NUM_CLIENTS)]
    for server_round, drawn in enumerate([everyone, everyone, [2, 4], [1, 3, 4]], start=1):
        here.round(server_round, drawn)
        users |= central_users(drawn, items, feedback)
        items = central_items(users, feedback)
        np.testing.assert_allclose(here.strategy.item_factors, items, rtol=0, atol=1e-8)
        for i in drawn:
            np.testing.assert_allclose(here.held(i)["user-factors"], users[i], rtol=0, atol=1e-8)


def test_when_a_client_leaves_the_others_begin_the_sums_anew() -> None:
    here = federation()
    for server_round in (1, 2):
        here.round(server_round)
    before = here.strategy.item_factors.copy()
    strategy = here.strategy
    strategy.members_changed(MembersChange(server_round=strategy.last_round, left=[1], rows=[1]))
    assert strategy.state.totals.began_in == 2
    here.round(3, [0, 2, 3, 4])  # client 1 is gone
    items = central_items(central_users([0, 2, 3, 4], before, "explicit"), "explicit")
    np.testing.assert_allclose(strategy.item_factors, items, rtol=0, atol=1e-8)


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_what_an_evaluation_reports(feedback: str) -> None:
    here = federation(feedback)
    here.round(1)
    items = here.strategy.item_factors
    objective, squared, count = GAMMA / 2 * np.sum(items**2), 0.0, 0
    for i, users in central_users([*range(NUM_CLIENTS)], items, feedback).items():
        objective += LAM / 2 * np.sum(users**2)
        values, mask = dense(ratings(i))
        if feedback == "implicit":  # what is not listed counts as a 0
            errors = (1 + CONFIDENCE * values) * (mask - users @ items) ** 2
            objective += 0.5 * errors.sum()
            continue
        mean = values[mask > 0].mean()
        products = users[:, :-1] @ items[:-1] + users[:, -1:] + items[-1] + mean
        objective += 0.5 * np.sum((mask * (values - products)) ** 2)
        tested, where = dense(ratings(i, seed=1))
        squared, count = squared + np.sum(where * (tested - products) ** 2), count + where.sum()
    reported = here.evaluate(1)
    assert reported["loss"] == pytest.approx(objective / NUM_CLIENTS, rel=1e-10)
    assert ("rmse" in reported) == (feedback == "explicit")  # scores of interactions are no stars
    if count:
        assert reported["rmse"] == pytest.approx(np.sqrt(squared / count), rel=1e-10)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"regularizer is SquaredL2\(0\)"):
        FedALS(SquaredL2(0))
    with pytest.raises(TypeError, match="expected SquaredL2"):
        FedALS(L1Norm(1.0))
    here = federation()
    here.regularizer = SquaredL2(0)
    with pytest.raises(ValueError, match=r"regularizer is SquaredL2\(0\)"):
        here.round(1)
