"""Finished models: what a new user gets is what a client of the run would have got."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clients import FactorRecommender, FedALSClient, ItemRecommender, Recommender
from fl_admm_strategies import FedALS
from fl_admm_strategies.maths.regularizers import SquaredL2
from tests.support.ratings import NUM_ITEMS, RatingsRun, ratings
from tests.support.refusals import refused


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_a_new_user_gets_what_a_client_predicts(feedback: str, tmp_path: Path) -> None:
    here = RatingsRun(
        FedALS(SquaredL2(0.5), feedback=feedback, confidence=2.0),  # type: ignore[arg-type]
        regularizer=SquaredL2(0.3),
        kind=FedALSClient,
    )
    for server_round in (1, 2):
        here.round(server_round)
        here.evaluate(server_round)
    client, own = here.client(2), ratings(2)
    made = FactorRecommender(
        here.strategy.item_factors,
        lam=0.3,
        feedback=feedback,
        confidence=2.0,
        mean=own.values.mean(),
    )
    made.save(tmp_path / "model")
    model = Recommender.load(tmp_path / "model")
    every = np.arange(NUM_ITEMS)
    for user in range(own.num_users):
        mine = own.users == user
        expected = client.predict(np.full(NUM_ITEMS, user), every)
        found = model.scores(own.items[mine], own.values[mine])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
        best = model.recommend(own.items[mine], own.values[mine], n=3)
        np.testing.assert_array_equal(best, client.recommend(user, 3))


def test_weights_of_items(tmp_path: Path) -> None:
    weights = np.array([[0, 0.9, 0.1], [0.9, 0, 0.1], [0.1, 0.2, 0]])
    ItemRecommender(weights).save(tmp_path / "model")
    model = Recommender.load(tmp_path / "model")
    assert model.recommend([0], n=2).tolist() == [1, 2]
    assert model.recommend([0], n=3, exclude_seen=False).tolist() == [1, 2, 0]
    assert model.similar_items(2, n=2).tolist() == [0, 1]


def test_what_is_refused(tmp_path: Path) -> None:
    with refused(ValueError, "item_factors", "shape"):
        FactorRecommender(np.ones(3), lam=1.0)
    with refused(ValueError, "feedback", "clicks"):
        FactorRecommender(np.ones((2, 3)), lam=1.0, feedback="clicks")
    with refused(ValueError, "item_weights", "(2, 3)"):
        ItemRecommender(np.ones((2, 3)))
    with refused(ValueError, "item", 7):
        ItemRecommender(np.eye(3)).similar_items(7)
