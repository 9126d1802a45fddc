"""The client's steps: optimality, descent, formulas; never a dense matrix; recommending.

T1 to T4 and P5 are items of docs/methods/fedmc-admm-notes.md.
"""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from numpy.typing import NDArray

from clients.methods.fedmc_admm import FedMCADMMClient, item_steps, user_steps
from clients.toolkit.data.ratings import Ratings
from clients.toolkit.round.completion import Residual
from fl_admm_strategies.algorithms.fedadmm import FedADMMRule
from fl_admm_strategies.maths.regularizers import L1Norm, Regularizer, SquaredL2
from fl_admm_strategies.messages import FedMCFactors, FedMCInstruction
from tests.clients.methods.messages import Received, changed, received
from tests.support.ratings import NUM_ITEMS, RANK, dense, initial, new_context, ratings
from tests.support.refusals import refused

P, BETA, LAM = 5, 0.8, 0.3
KINDS: dict[str, Regularizer] = {"l2": SquaredL2(LAM), "l1": L1Norm(LAM)}

each_kind = pytest.mark.parametrize("kind", KINDS)


class Problem:
    """A client's data and variables at random, with a dual that is no gradient."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.ratings = ratings(2, seed=seed)
        self.values, self.mask = dense(self.ratings)
        self.U = rng.normal(size=(self.ratings.num_users, RANK))
        self.W, self.V, self.Y = rng.normal(size=(3, RANK, NUM_ITEMS))
        self.residual = Residual(self.ratings, np.dtype(float))

    def error(self, U: NDArray[Any], W: NDArray[Any]) -> NDArray[Any]:
        return self.mask * (U @ W - self.values)

    def users(self, steps: int, regularizer: Regularizer) -> NDArray[Any]:
        return user_steps(self.residual, self.U, self.W.T.copy(), regularizer, steps)

    def items(self, U: NDArray[Any], steps: int) -> NDArray[Any]:
        anchor = (self.V - self.Y / BETA).T.copy()
        items = item_steps(self.residual, U, self.W.T.copy(), anchor, P * BETA, steps)
        return items.T

    def lagrangian(self, U: NDArray[Any], W: NDArray[Any], regularizer: Regularizer) -> float:
        """Return this client's part of (5)."""
        fit = 0.5 * (self.error(U, W) ** 2).sum() + regularizer.value(U)
        gap = W - self.V
        return float(fit / P + (self.Y * gap).sum() + BETA / 2 * (gap**2).sum())


# --- The steps ----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_a_user_step_minimises_the_linearised_problem(kind: str, seed: int) -> None:
    """(14): 0 is in E W^T + L (U_new - U) + dR(U_new)."""
    problem, regularizer = Problem(seed), KINDS[kind]
    U = problem.users(1, regularizer)
    L = np.linalg.norm(problem.W @ problem.W.T)
    slope = -(problem.error(problem.U, problem.W) @ problem.W.T + L * (U - problem.U))
    if kind == "l2":
        np.testing.assert_allclose(slope, LAM * U, rtol=0, atol=1e-10)
    else:
        zero = U == 0
        np.testing.assert_allclose(slope[~zero], LAM * np.sign(U[~zero]), atol=1e-10)
        assert (np.abs(slope[zero]) <= LAM + 1e-10).all()


@pytest.mark.parametrize("steps", [1, 4])
def test_an_item_step_is_optimal_and_yields_the_dual(steps: int) -> None:
    """T2 at the last step, and T1 (20): the new dual is a gradient whatever the old one was."""
    problem = Problem()
    U = problem.U
    before = problem.items(U, steps - 1) if steps > 1 else problem.W
    W = problem.items(U, steps)
    L = np.linalg.norm(U.T @ U)
    gradient = U.T @ problem.error(U, before)
    optimality = gradient / P + problem.Y + L / P * (W - before) + BETA * (W - problem.V)  # T2
    np.testing.assert_allclose(optimality, 0, atol=1e-10)
    Y = problem.Y + BETA * (W - problem.V)  # (13)
    np.testing.assert_allclose(Y, -(gradient + L * (W - before)) / P, rtol=0, atol=1e-10)  # T1


@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_both_blocks_descend(kind: str, seed: int) -> None:
    """T3 (24) and T4 (27): the Lagrangian falls by the steps' squares at least."""
    problem, regularizer, steps = Problem(seed), KINDS[kind], 4
    path = [problem.U, *(problem.users(n, regularizer) for n in range(1, steps + 1))]
    L = np.linalg.norm(problem.W @ problem.W.T)
    fallen = L / (2 * P) * sum(((b - a) ** 2).sum() for a, b in pairwise(path))
    start = problem.lagrangian(problem.U, problem.W, regularizer)
    U = path[-1]
    middle = problem.lagrangian(U, problem.W, regularizer)
    assert middle + fallen <= start + 1e-10
    path = [problem.W, *(problem.items(U, n) for n in range(1, steps + 1))]
    L = np.linalg.norm(U.T @ U)
    fallen = L / (2 * P) * sum(((b - a) ** 2).sum() for a, b in pairwise(path))
    assert problem.lagrangian(U, path[-1], regularizer) + fallen <= middle + 1e-10


def test_factors_that_vanished_stay_at_zero() -> None:
    """A strong l1 norm makes L = 0 (P5)."""
    problem = Problem()
    nothing = np.zeros((NUM_ITEMS, RANK))
    U = user_steps(problem.residual, problem.U, nothing, L1Norm(1.0), 3)
    np.testing.assert_array_equal(U, 0)
    W = item_steps(problem.residual, U, nothing, nothing, P * BETA, 3)
    np.testing.assert_array_equal(W, 0)


# --- The client ---------------------------------------------------------------------------------


def message(V: NDArray[Any], *, begins: bool = True, **changes: Any) -> Received:
    asked = FedMCInstruction(
        model={"V": V},
        start={} if begins else None,
        rule=FedADMMRule(True, BETA, 1 / P).text(),
        duals="strategy",
        optimised=["V"],
        factor_seed=7,
        factor_scale=1.0,
        inner_steps=3,
        feedback="explicit",
        confidence=1.0,
    )
    return changed(asked, **changes)


def evaluation(V: NDArray[Any], *, version: int = 0) -> Received:
    return received(FedMCFactors({"V": V}, 7, 1.0), version=version)


def make(context: Context | None = None, **settings: Any) -> FedMCADMMClient:
    return FedMCADMMClient(context or new_context(), ratings(2), SquaredL2(LAM), **settings)


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


def recommender(**settings: Any) -> tuple[FedMCADMMClient, NDArray[Any]]:
    """Return a client after an evaluation, and what it must predict."""
    context = new_context()
    make(context, **settings).fit(*message(first()))
    V = 2 * first()
    make(context, **settings).evaluate(*evaluation(V, version=1))
    client = make(context, **settings)  # as a user makes it anew, out of the context
    return client, client.personal_arrays()["user-factors"] @ V


def test_recommend() -> None:
    client, products = recommender()
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
