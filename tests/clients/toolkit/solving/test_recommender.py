"""Finished models: what a new user gets is what a client of the run would have got."""

from __future__ import annotations

import numpy as np
import pytest

from clients import FactorRecommender, FedALSClient
from fl_admm_strategies import FedALS
from fl_admm_strategies.maths.regularizers import SquaredL2
from tests.support.ratings import NUM_ITEMS, RatingsRun, ratings
from tests.support.refusals import refused


@pytest.mark.parametrize("feedback", ["explicit", "implicit"])
def test_a_new_user_gets_what_a_client_predicts(feedback: str) -> None:
    here = RatingsRun(
        FedALS(SquaredL2(0.5), feedback=feedback, confidence=2.0),  # type: ignore[arg-type]
        regularizer=SquaredL2(0.3),
        kind=FedALSClient,
    )
    for server_round in (1, 2):
        here.round(server_round)
        here.evaluate(server_round)
    client, own = here.client(2), ratings(2)
    model = FactorRecommender(
        here.strategy.item_factors,
        lam=0.3,
        feedback=feedback,
        confidence=2.0,
        mean=own.values.mean(),
    )
    every = np.arange(NUM_ITEMS)
    for user in range(own.num_users):
        mine = own.users == user
        expected = client.predict(np.full(NUM_ITEMS, user), every)
        found = model.scores(own.items[mine], own.values[mine])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
        best = model.recommend(own.items[mine], own.values[mine], n=3)
        np.testing.assert_array_equal(best, client.recommend(user, 3))


def test_what_is_refused() -> None:
    with refused(ValueError, "item_factors", "shape"):
        FactorRecommender(np.ones(3), lam=1.0)
    with refused(ValueError, "feedback", "clicks"):
        FactorRecommender(np.ones((2, 3)), lam=1.0, feedback="clicks")
    with refused(ValueError, "item", 7):
        FactorRecommender(np.ones((2, 3)), lam=1.0).similar_items(7)
