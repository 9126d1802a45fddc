"""The client of FedMC-ADMM: never a dense matrix; what it refuses; recommending."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from numpy.typing import NDArray

from clients.methods.fedmc_admm import FedMCADMMClient, item_steps, user_steps
from clients.toolkit.data.ratings import Ratings
from clients.toolkit.round.completion import Residual
from fl_admm_strategies.algorithms.fedadmm import FedADMMRule
from fl_admm_strategies.maths.regularizers import L1Norm, SquaredL2
from fl_admm_strategies.messages import FedMCFactors, FedMCInstruction
from tests.clients.methods.messages import Received, received
from tests.support.ratings import NUM_ITEMS, RANK, initial, new_context, ratings
from tests.support.refusals import refused

P, BETA, LAM = 5, 0.8, 0.3


def test_factors_that_vanished_stay_at_zero() -> None:
    """A strong l1 norm makes L = 0 (P5)."""
    residual, nothing = Residual(ratings(2), np.dtype(float)), np.zeros((NUM_ITEMS, RANK))
    U = user_steps(residual, np.ones((5, RANK)), nothing, L1Norm(1.0), 3)
    np.testing.assert_array_equal(U, 0)
    W = item_steps(residual, U, nothing, nothing, P * BETA, 3)
    np.testing.assert_array_equal(W, 0)


# --- The client ---------------------------------------------------------------------------------


def message(V: NDArray[Any]) -> Received:
    asked = FedMCInstruction(
        model={"V": V},
        start={},
        rule=FedADMMRule(True, BETA, 1 / P).text(),
        duals="strategy",
        optimised=["V"],
        factor_seed=7,
        factor_scale=1.0,
        inner_steps=3,
        feedback="explicit",
        confidence=1.0,
    )
    return received(asked)


def evaluation(V: NDArray[Any], *, version: int = 0) -> Received:
    return received(FedMCFactors({"V": V}, 7, 1.0), version=version)


def make(context: Context | None = None) -> FedMCADMMClient:
    return FedMCADMMClient(context or new_context(), ratings(2), SquaredL2(LAM))


def first() -> NDArray[Any]:
    return initial()["item-factors"]


def test_no_array_of_users_by_items_is_ever_made() -> None:
    """30,000 users x 20,000 items would be 4.8 GB; the factors are 0.8 MB, the ratings fewer."""
    rng = np.random.default_rng(0)
    users, items = np.arange(2000) * 15, rng.integers(0, 20_000, 2000)
    few = Ratings(users, items, rng.integers(1, 6, 2000).astype(float), 30_000, 20_000)
    V = rng.random((2, 20_000))
    tracemalloc.start()
    try:
        client = FedMCADMMClient(new_context(), few, SquaredL2(LAM), test=few)
        client.fit(*message(V))
        client.evaluate(*evaluation(V, version=1))
        client.recommend(15, 10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6


def test_what_does_not_fit_the_ratings_is_refused() -> None:
    V = np.ones((RANK, NUM_ITEMS + 1))
    for call, asked in ((make().fit, message(V)), (make().evaluate, evaluation(V))):
        with refused(ValueError, "(2, 8)", "7 items"):
            call(*asked)
    with refused(TypeError, "regularizer"):
        FedMCADMMClient(new_context(), ratings(2), "l2")  # type: ignore[arg-type]


# --- Recommending -------------------------------------------------------------------------------


def test_recommend() -> None:
    context, V = new_context(), 2 * first()
    make(context).fit(*message(first()))
    make(context).evaluate(*evaluation(V, version=1))
    client = make(context)  # as a user makes it anew, out of the context
    products = client.personal_arrays()["user-factors"] @ V
    rated = set(client.train_ratings.items[client.train_ratings.users == 3].tolist())
    ranking = np.argsort(-products[3]).tolist()
    assert rated
    assert client.recommend(3, 4, exclude_seen=False).tolist() == ranking[:4]
    fresh = [item for item in ranking if item not in rated]
    assert client.recommend(3, 2).tolist() == fresh[:2]
    assert client.recommend(3, 100).tolist() == fresh
    for user, item, named in ((-1, 0, "users"), (5, 0, "users"), (0, -1, "items"), (0, 7, "items")):
        with refused(ValueError, named):
            client.predict(np.array([user]), np.array([item]))
    with refused(ValueError, "n"):
        client.recommend(0, 0)


def test_the_factors_are_those_of_the_last_evaluation() -> None:
    context = new_context()
    with pytest.raises(RuntimeError):
        make(context).personal_arrays()
    make(context).fit(*message(first()))
    trained = make(context).personal_arrays()
    assert [*trained] == ["user-factors"]
    with refused(RuntimeError, "evaluate"):
        make(context).recommend(0, 1)
    make(context).evaluate(*evaluation(2 * first(), version=1))
    evaluated = make(context).personal_arrays()
    np.testing.assert_array_equal(evaluated["item-factors"], 2 * first())
    np.testing.assert_array_equal(evaluated["user-factors"], trained["user-factors"])
