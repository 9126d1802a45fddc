"""FedEASE against its definition with all data in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray

from clients import FedEASEClient, client_app, rank
from fl_admm_strategies import FedEASE, InProcessGrid, initial_item_weights
from fl_admm_strategies.algorithms.fedease import ease_weights
from fl_admm_strategies.runtime.algorithm import MembersChange
from tests.support.ratings import NUM_ITEMS, dense, new_context, ratings
from tests.support.refusals import refused

CLIENTS, LAM = 5, 2.0


def client_fn(context: Context) -> Any:
    i = int(context.node_config["partition-id"])
    test = None if i == 1 else ratings(i, seed=1)
    return FedEASEClient(context, ratings(i), test=test, rank_at=2, relevant=4).to_client()


def started(num_rounds: int = 1, first: ArrayRecord | None = None, **settings: Any) -> FedEASE:
    strategy = FedEASE(**{"lam": LAM, "seed": 1, **settings})
    first = first or initial_item_weights(NUM_ITEMS)
    strategy.start(InProcessGrid(client_app(client_fn), CLIENTS), first, num_rounds)
    return strategy


def seen(clients: range | list[int] = range(CLIENTS)) -> NDArray[np.float64]:
    return np.vstack([dense(ratings(i))[1] for i in clients])


def test_it_is_ease_with_all_data_in_one_place() -> None:
    """Each column of B is the ridge regression of an item on all others: the model's definition."""
    X = seen()
    expected = np.zeros((NUM_ITEMS, NUM_ITEMS))
    for k in range(NUM_ITEMS):
        others = [j for j in range(NUM_ITEMS) if j != k]
        A = X[:, others]
        ridge = LAM * np.eye(len(others))
        expected[others, k] = np.linalg.solve(A.T @ A + ridge, A.T @ X[:, k])
    strategy = started()
    pairs = X.T @ X
    total = strategy.state.totals.sums["pairs"]
    np.testing.assert_array_equal(total, pairs[np.triu_indices(NUM_ITEMS)])
    np.testing.assert_allclose(ease_weights(pairs, LAM), expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(strategy.state.weights, expected, rtol=0, atol=1e-6)  # float32
    double = started(first=ArrayRecord({"item-weights": Array(np.zeros_like(expected))}))
    np.testing.assert_allclose(double.state.weights, expected, rtol=0, atol=1e-8)


def test_clients_are_counted_once_whenever_they_take_part() -> None:
    strategy = started(12, fraction_train=0.4)
    np.testing.assert_array_equal(strategy.state.weights, started().state.weights)


def test_when_a_client_leaves_all_are_counted_again() -> None:
    strategy = started()
    strategy.members_changed(MembersChange(server_round=strategy.last_round, left=[2], rows=[2]))
    assert all(strategy.is_fresh(client) for client in range(CLIENTS))
    assert not strategy.state.totals.sums["pairs"].any()


def test_what_an_evaluation_reports() -> None:
    strategy = started()
    B = strategy.state.weights
    reported = strategy.run.record.result.evaluate_metrics_clientapp[1]
    rankings = [
        rank(dense(ratings(i))[1] @ B, ratings(i), ratings(i, seed=1), k=2, relevant=4)
        for i in range(CLIENTS)
        if i != 1
    ]
    users = sum(ranking["ranked-users"] for ranking in rankings)
    sums = {"hr": "hits", "precision": "precisions", "recall": "recalls", "ndcg": "ndcgs"}
    for name, parts in sums.items():
        mean = sum(ranking[parts] for ranking in rankings) / users
        assert reported[name] == pytest.approx(mean, rel=1e-5)
    X = seen()
    assert reported["loss"] == pytest.approx(((X - X @ B) ** 2).sum() / X.sum(), rel=1e-5)


def test_a_user_gets_what_scores_best() -> None:
    B = started().state.weights
    client = FedEASEClient(new_context(3), ratings(3))
    mask = dense(ratings(3))[1]
    scores = mask[2] @ B
    scores[mask[2] > 0] = -np.inf
    assert client.recommend(2, 1, B)[0] == scores.argmax()
    with refused(ValueError, "user", 99):
        client.recommend(99, 1, B)


def test_what_it_refuses() -> None:
    with refused(ValueError, "initial_item_weights", "(3, 4)"):
        FedEASE().init_state({"b": np.zeros((3, 4))})
    with refused(ValueError, "num_items", "1"):
        initial_item_weights(1)
    other = FedEASE()
    with refused(Exception, "10", str(NUM_ITEMS)):
        other.start(InProcessGrid(client_app(client_fn), 5), initial_item_weights(10), 1)
