"""Lp-Proj by hand, p = 1 and p = 2; docs/methods/lp-proj.md.

E1: P = (.6, .8), two clients, f_i = a_i/2 ||theta - c_i||^2, a = (1, 2), c = (1, 2), (-1, .5);
lambda = 1, all step sizes .1, K = R = 2, everything 0 at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from numpy.testing import assert_allclose

from clients import LpProjClient, PFedMeClient, client_app
from fl_admm_strategies import LpProj, PFedMe
from fl_admm_strategies.maths.projection import projection
from tests.fl_admm_strategies.algorithms.quadratics import (
    ALL,
    PAIR,
    Grid,
    Point,
    follow,
    point_client,
)
from tests.support.federation import (
    Federation,
    node_of,
)
from tests.support.refusals import refused

BOTH = (0, 1)


new_client = partial(point_client, LpProjClient, b=PAIR[0], c=PAIR[1])


def lp_proj(**settings: Any) -> LpProj:
    usual = {"lam": 1.0, "lr": 0.1, "outer_lr": 0.1, "local_rounds": 2, "inner_steps": 2}
    return LpProj(**usual | {"dimension": 1, "fraction_evaluate": 0.0} | settings)


@pytest.fixture
def given_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.methods.lp_proj.projection", lambda *_: np.array([[0.6, 0.8]]))


class PairGrid(Federation):
    """Two clients of two parameters."""

    model = Point

    def __init__(self) -> None:
        super().__init__(client_app(lambda context: new_client(context).to_client()), 2)


def run(
    strategy: LpProj, *rounds: Sequence[int]
) -> tuple[list[list[Any]], list[float], Federation]:
    """Return the theta_i and w after every round, and the grid."""
    grid = PairGrid()

    def read() -> tuple[list[Any], float]:
        models = [new_client(grid.context(node_of(i))).personal_arrays() for i in BOTH]
        return [model["theta"] for model in models], strategy.state.w.item()

    seen = follow(strategy, grid, *rounds, read=read)
    return [thetas for thetas, _ in seen], [w for _, w in seen], grid


@pytest.mark.usefixtures("given_p")
def test_the_worked_example_with_p_2() -> None:
    # Client 1: theta = .1 (1, 2), then (.1, .2) + .1 [(.9, 1.8) - .22 (.6, .8)] = (.1768, .3624),
    # whose image is .396: w_{1,1} = .0396; and so on.
    theta, w, watched = run(lp_proj(), BOTH, BOTH)
    assert_allclose(theta[0], [[0.2838928, 0.6077904], [-0.5810376, 0.3076832]], atol=1e-8)
    assert_allclose(
        theta[1], [[0.3847319204, 0.8926644205], [-0.8030267022, 0.4550487704]], atol=1e-8
    )
    assert_allclose(w, [0.0424646, 0.1078343902], atol=1e-8)
    uploads = [m.content["arrays"]["w"].numpy().item() for m in watched.replies("train", 2)]
    assert_allclose(sorted(uploads), [0.0126291423, 0.2030396382], atol=1e-8)


@pytest.mark.usefixtures("given_p")
def test_the_worked_example_with_p_1() -> None:
    # sign(0) = 0 in the first step; P theta stays above w_i for client 1, so w_1 = .1, then .2.
    theta, w, _ = run(lp_proj(p=1), BOTH, BOTH)
    assert_allclose(theta[0], [[0.1813, 0.471], [-0.444, 0.4904]], atol=1e-8)
    assert_allclose(theta[1], [[0.25651093, 0.7217031], [-0.6911424, 0.60422784]], atol=1e-8)
    assert_allclose(w, [0.2, 0.2], atol=1e-8)


@pytest.mark.usefixtures("given_p")
def test_both_train_and_the_sampled_one_is_averaged() -> None:
    _, w, watched = run(lp_proj(), (0,), (1,))
    assert_allclose(w, [0.1012968, 0.0625905643], atol=1e-8)
    for server_round, averaged in ((1, 0), (2, 1)):
        for reply in watched.replies("train", server_round):
            sent = [*reply.content["arrays"]]
            assert sent == (["w"] if reply.metadata.src_node_id == node_of(averaged) else [])


def test_with_p_the_identity_and_theta_started_at_w_it_is_pfedme(monkeypatch):
    # One round from theta = w = 0: pFedMe with theta_start="warm".
    monkeypatch.setattr("clients.methods.lp_proj.projection", lambda *_: np.array([[1.0]]))
    settings: dict[str, Any] = {
        "lam": 2.0,
        "lr": 0.1,
        "outer_lr": 0.2,
        "local_rounds": 2,
        "inner_steps": 2,
        "beta": 0.5,
    }
    projected, whole = Grid(LpProjClient), Grid(PFedMeClient)
    one, other = LpProj(dimension=1, **settings), PFedMe(**settings)
    follow(one, projected, ALL)
    follow(other, whole, ALL)
    assert one.state.w.item() == pytest.approx(other.global_model()["w"].item(), abs=1e-15)
    assert_allclose(projected.own_w(*ALL), whole.own_w(*ALL), atol=1e-15)


def start(strategy: LpProj) -> None:
    strategy.start(PairGrid(), ArrayRecord(Point().state_dict()), 1)


def test_p_follows_from_the_seed() -> None:
    strategy = lp_proj(dimension=2, local_rounds=1, inner_steps=1, seed=7)
    start(strategy)
    # From w = 0 and theta = 0: theta_i = .1 a_i c_i, w_i = .1 P theta_i.
    images = [projection(7, 2, 2, "float64") @ c for c in ((0.1, 0.2), (-0.2, 0.1))]
    assert_allclose(strategy.state.w, 0.1 * np.mean(images, axis=0), atol=1e-15)


def test_steps_that_overshoot_and_too_many_dimensions_are_refused() -> None:
    with refused(ValueError, "outer_lr", "lam", 2.5):
        lp_proj(outer_lr=2.5)
    with refused(ValueError, "lr", "lam", 2.5, 0.08):  # P is one row of length 1: lr * lam alone
        start(lp_proj(lam=25.0, lr=0.1, outer_lr=0.01))
    start(lp_proj(p=1, lam=25.0, lr=0.1, outer_lr=0.01))
    with refused(ValueError, "dimension", 3, 2):
        start(lp_proj(dimension=3))
