"""pFedMe by hand, in both forms; docs/methods/pfedme.md.

The clients are the three of the pages' worked examples (`quadratics`). One inner step with
lambda = 2 is theta <- theta - .1 [a_i (theta - b_i) + 2 (theta - w_i)].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType
from numpy.testing import assert_allclose

from clients import PFedMeClient, PFedMeMatchedClient
from fl_admm_strategies import PFedMe, PFedMeMatched, StatefulStrategy
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, N, follow
from tests.support.federation import node_of
from tests.support.refusals import refused

PARTLY = (0, 1), (1, 2)
THETA_W = list[list[float]]


def pfedme(**settings: Any) -> PFedMe:
    usual = {"lam": 2.0, "lr": 0.1, "outer_lr": 0.2, "local_rounds": 2, "inner_steps": 2}
    return PFedMe(**usual | {"fraction_evaluate": 0.0} | settings)


def matched(**settings: Any) -> PFedMeMatched:
    usual = {"lam": 2.0, "lr": 0.1, "outer_lr": 0.2, "local_epochs": 2}
    return PFedMeMatched(**usual | {"fraction_evaluate": 0.0} | settings)


def run(
    strategy: StatefulStrategy, *rounds: Sequence[int], grid: Grid | None = None, **options: Any
) -> tuple[THETA_W, THETA_W, list[float]]:
    """Return theta_i, the uploads and w after every round; theta_i is 0 until i has trained."""
    matching = isinstance(strategy, PFedMeMatched)
    grid = grid or Grid(PFedMeMatchedClient if matching else PFedMeClient)

    def read() -> tuple[list[float], float]:
        kept = [grid.context(node_of(i)).state.array_records for i in ALL]
        theta = [grid.own_w(i)[0] if own else 0.0 for i, own in zip(ALL, kept, strict=True)]
        return theta, strategy.global_model()["w"].item()

    seen = follow(strategy, grid, *rounds, read=read, **options)
    if matching:  # its clients upload theta_i, of which w_i follows
        return [theta for theta, _ in seen], [], [w for _, w in seen]
    uploads = [
        [
            float(content["arrays"]["w"].numpy().item())
            for _, content in sorted(grid.got_in(MessageType.TRAIN, r).items())
            if "w" in content["arrays"]
        ]
        for r in range(1, len(rounds) + 1)
    ]
    return [theta for theta, _ in seen], uploads, [w for _, w in seen]


# --- The worked examples (E1) -------------------------------------------------------------------


def test_pfedme_with_everybody() -> None:
    theta, _, w = run(pfedme(), ALL, ALL)
    assert_allclose(theta[0], [0.27642, -0.47616, 2.13696], atol=1e-8)
    assert_allclose(theta[1], [0.5518840117, -0.2767362074, 2.2464786253], atol=1e-8)
    assert_allclose(w, [0.380696, 0.6550559933], atol=1e-8)


def test_w_may_move_by_half_of_it() -> None:
    _, _, w = run(pfedme(beta=0.5), ALL, ALL)
    assert_allclose(w, [0.190348, 0.3541119983], atol=1e-8)


def test_flames_form() -> None:
    # theta_1: .1, then .17 as above; w_1 = .4 * .17 = .068; w is the mean of all three.
    strategy = matched()
    run(strategy, ALL)
    assert_allclose(strategy.state.clients.column("local_w")[:, 0], [0.068, -0.128, 0.672])
    theta, _, w = run(matched(), ALL, ALL)
    assert_allclose(theta[0], [0.17, -0.32, 1.68], atol=1e-8)
    assert_allclose(theta[1], [0.32266, -0.36992, 2.00592], atol=1e-8)
    assert_allclose(w, [0.204, 0.3835546667], atol=1e-8)


def test_flames_form_averages_those_who_sat_out_as_well() -> None:
    # Round 1: (.068 - .128 + 0)/3 = -.02; round 2: (.068 - .18864 + .65776)/3 = .17904.
    strategy = matched()
    theta, _, w = run(strategy, *PARTLY)
    assert_allclose(w, [-0.02, 0.17904], atol=1e-8)
    assert_allclose(theta[1], [0.17, -0.4416, 1.6744], atol=1e-8)
    own = strategy.state.clients.column("local_w")[:, 0]
    assert_allclose(own, [0.068, -0.18864, 0.65776], atol=1e-8)


def test_with_everybody_flames_form_is_a_step_of_w_towards_the_mean() -> None:
    # w <- (1 - eta_g lambda) w + eta_g lambda mean theta_i.
    theta, _, w = run(matched(outer_lr=0.35), ALL, ALL, ALL)
    before = 0.0
    for own, now in zip(theta, w, strict=True):
        before = 0.3 * before + 0.7 * float(np.mean(own))
        assert now == pytest.approx(before, abs=1e-12)


# --- Who trains, who is averaged ----------------------------------------------------------------


def test_everyone_trains_and_the_sampled_ones_are_averaged() -> None:
    theta, uploads, w = run(pfedme(), *PARTLY)
    alone, _, alone_w = run(pfedme(everyone_trains=False), *PARTLY)
    assert w == alone_w
    assert [len(own) for own in uploads] == [2, 2]
    # Client 3 has trained in round 1 and client 1 in round 2, though nobody averaged them.
    assert theta[0][2] == pytest.approx(2.13696, abs=1e-8)
    assert alone[0][2] == 0.0
    assert theta[1][0] != theta[0][0]
    assert alone[1][0] == alone[0][0] == theta[0][0]


# --- Models -------------------------------------------------------------------------------------


def test_both_models_are_evaluated_and_the_personal_one_stays() -> None:
    for strategy in (pfedme(fraction_evaluate=1.0), matched(fraction_evaluate=1.0)):
        theta, _, w = run(strategy, ALL)
        metrics = strategy.evaluate_metrics[1]
        for i, (a, b) in enumerate([(1.0, 1.0), (2.0, -1.0), (4.0, 3.0)]):
            assert metrics[i]["personal-loss"] == pytest.approx(a / 2 * (theta[0][i] - b) ** 2)
            assert metrics[i]["global-loss"] == pytest.approx(a / 2 * (w[0] - b) ** 2)


def test_the_buffers_of_the_global_model_are_the_participants_means() -> None:
    # Each of the R K = 4 steps sees n_i samples, from the buffers of w.
    grid = Grid(PFedMeClient, Counting)
    strategy = pfedme()
    run(strategy, ALL, grid=grid)
    assert_allclose(strategy.global_model()["seen"], [4 * np.mean(N)])
    assert [grid.own(i)["seen"].item() for i in ALL] == [4 * n for n in N]
    # Two steps from theta_i's own; weighted by the examples.
    grid = Grid(PFedMeMatchedClient, Counting)
    flames = matched()
    run(flames, ALL, grid=grid)
    assert_allclose(flames.global_model()["seen"], [2 * np.average(N, weights=N)])


# --- Settings -----------------------------------------------------------------------------------


def test_a_step_of_w_that_overshoots_is_refused() -> None:
    for strategy in (pfedme, matched):
        with refused(ValueError, "outer_lr", "lam", 2):
            strategy(outer_lr=1.0)


def test_the_step_of_w_follows_from_lambda_unless_it_is_given() -> None:
    # w_i goes three quarters of the way to theta_i, and in FLAME's form all of it.
    for strategy, share in ((pfedme, 0.75), (matched, 1.0)):
        for lam in (0.1, 2.0):
            found = run(strategy(lam=lam, outer_lr=None), ALL, ALL)
            assert found == run(strategy(lam=lam, outer_lr=share / lam), ALL, ALL)
