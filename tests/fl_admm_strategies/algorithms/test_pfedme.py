"""pFedMe by hand, in both forms; docs/methods/pfedme.md.

The clients are the three of the pages' worked examples (`quadratics`). One inner step with
lambda = 2 is theta <- theta - .1 [a_i (theta - b_i) + 2 (theta - w_i)].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import PFedMeClient, PFedMeMatchedClient
from fl_admm_strategies import PFedMe, PFedMeMatched
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, N, run
from tests.support.refusals import refused

PARTLY = (0, 1), (1, 2)


def pfedme(**settings: Any) -> PFedMe:
    usual = {"lam": 2.0, "lr": 0.1, "outer_lr": 0.2, "local_rounds": 2, "inner_steps": 2}
    return PFedMe(**usual | {"fraction_evaluate": 0.0} | settings)


def matched(**settings: Any) -> PFedMeMatched:
    usual = {"lam": 2.0, "lr": 0.1, "outer_lr": 0.2, "local_epochs": 2}
    return PFedMeMatched(**usual | {"fraction_evaluate": 0.0} | settings)


# --- The worked examples (E1) -------------------------------------------------------------------


def test_pfedme_with_everybody() -> None:
    w, _, theta = run(pfedme(), Grid(PFedMeClient), ALL, ALL)
    assert_allclose(theta[0], [0.27642, -0.47616, 2.13696], atol=1e-8)
    assert_allclose(theta[1], [0.5518840117, -0.2767362074, 2.2464786253], atol=1e-8)
    assert_allclose(w, [0.380696, 0.6550559933], atol=1e-8)


def test_w_may_move_by_half_of_it() -> None:
    w, _, _ = run(pfedme(beta=0.5), Grid(PFedMeClient), ALL, ALL)
    assert_allclose(w, [0.190348, 0.3541119983], atol=1e-8)


def test_flames_form() -> None:
    # theta_1: .1, then .17 as above; w_1 = .4 * .17 = .068; w is the mean of all three.
    strategy = matched()
    run(strategy, Grid(PFedMeMatchedClient), ALL)
    assert_allclose(strategy.state.clients.column("local_w")[:, 0], [0.068, -0.128, 0.672])
    w, _, theta = run(matched(), Grid(PFedMeMatchedClient), ALL, ALL)
    assert_allclose(theta[0], [0.17, -0.32, 1.68], atol=1e-8)
    assert_allclose(theta[1], [0.32266, -0.36992, 2.00592], atol=1e-8)
    assert_allclose(w, [0.204, 0.3835546667], atol=1e-8)


def test_flames_form_averages_those_who_sat_out_as_well() -> None:
    # Round 1: (.068 - .128 + 0)/3 = -.02; round 2: (.068 - .18864 + .65776)/3 = .17904.
    strategy = matched()
    w, _, theta = run(strategy, Grid(PFedMeMatchedClient), *PARTLY)
    assert_allclose(w, [-0.02, 0.17904], atol=1e-8)
    assert_allclose(theta[1], [0.17, -0.4416, 1.6744], atol=1e-8)
    own = strategy.state.clients.column("local_w")[:, 0]
    assert_allclose(own, [0.068, -0.18864, 0.65776], atol=1e-8)


def test_with_everybody_flames_form_is_a_step_of_w_towards_the_mean() -> None:
    # w <- (1 - eta_g lambda) w + eta_g lambda mean theta_i.
    w, _, theta = run(matched(outer_lr=0.35), Grid(PFedMeMatchedClient), ALL, ALL, ALL)
    before = 0.0
    for own, now in zip(theta, w, strict=True):
        before = 0.3 * before + 0.7 * float(np.mean(own))
        assert now == pytest.approx(before, abs=1e-12)


# --- Who trains, who is averaged ----------------------------------------------------------------


def test_everyone_trains_and_the_sampled_ones_are_averaged() -> None:
    w, uploads, theta = run(pfedme(), Grid(PFedMeClient), *PARTLY)
    alone_w, _, alone = run(pfedme(everyone_trains=False), Grid(PFedMeClient), *PARTLY)
    assert w == alone_w
    assert [len(own) for own in uploads] == [2, 2]
    # Client 3 has trained in round 1 and client 1 in round 2, though nobody averaged them.
    assert theta[0][2] == pytest.approx(2.13696, abs=1e-8)
    assert alone[0][2] == 0.0
    assert theta[1][0] != theta[0][0]
    assert alone[1][0] == alone[0][0] == theta[0][0]


# --- Models -------------------------------------------------------------------------------------


def test_both_models_are_evaluated_and_the_personal_one_stays() -> None:
    for make, grid in ((pfedme, Grid(PFedMeClient)), (matched, Grid(PFedMeMatchedClient))):
        strategy = make(fraction_evaluate=1.0)
        w, _, theta = run(strategy, grid, ALL)
        metrics = strategy.evaluate_metrics[1]
        for i, (a, b) in enumerate([(1.0, 1.0), (2.0, -1.0), (4.0, 3.0)]):
            assert metrics[i]["personal-loss"] == pytest.approx(a / 2 * (theta[0][i] - b) ** 2)
            assert metrics[i]["global-loss"] == pytest.approx(a / 2 * (w[0] - b) ** 2)


def test_the_buffers_of_the_global_model_are_the_participants_means() -> None:
    # Each of the R K = 4 steps sees n_i samples, from the buffers of w.
    grid = Grid(PFedMeClient, Counting)
    strategy = pfedme()
    run(strategy, grid, ALL)
    assert_allclose(strategy.global_model()["seen"], [4 * np.mean(N)])
    assert [grid.own(i)["seen"].item() for i in ALL] == [4 * n for n in N]
    # Two steps from theta_i's own; weighted by the examples.
    grid = Grid(PFedMeMatchedClient, Counting)
    flames = matched()
    run(flames, grid, ALL)
    assert_allclose(flames.global_model()["seen"], [2 * np.average(N, weights=N)])


# --- Settings -----------------------------------------------------------------------------------


def test_a_step_of_w_that_overshoots_is_refused() -> None:
    for strategy in (pfedme, matched):
        with refused(ValueError, "outer_lr", "lam", 2):
            strategy(outer_lr=1.0)


def test_the_step_of_w_follows_from_lambda_unless_it_is_given() -> None:
    # w_i goes three quarters of the way to theta_i, and in FLAME's form all of it.
    for make, client, share in (
        (pfedme, PFedMeClient, 0.75),
        (matched, PFedMeMatchedClient, 1.0),
    ):
        for lam in (0.1, 2.0):
            found, expected = (
                run(make(lam=lam, outer_lr=outer), Grid(client), ALL, ALL)
                for outer in (None, share / lam)
            )
            assert found == expected
