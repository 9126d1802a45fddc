"""Ditto by hand: FedAvg's global model, and beside it personal ones that stay.

See docs/methods/ditto.md. The clients are the three of the pages' worked examples (`quadratics`).
Where two gradient steps of .1 are taken on f_i = a_i/2 (x - b_i)^2, x - b_i shrinks by
(1 - .1 a_i)^2 = .81, .64, .36. With lambda = .5 beside it, v goes from v to
q v + (1 - q) (a_i b_i + .5 w)/(a_i + .5), where q = (1 - .1 (a_i + .5))^2 = .7225, .5625, .3025.
"""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

from clients import DittoClient, LocalClient
from fl_admm_strategies import Ditto, Local
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, N, follow, run

PARTLY = (0, 1), (1, 2)


def ditto(**settings: Any) -> Ditto:
    return Ditto(**{"lam": 0.5, "lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0.0} | settings)


# --- The worked example (E1) --------------------------------------------------------------------


def test_everybody_takes_part() -> None:
    # w_i = .19, -.36, 1.92 as FedAvg's, w = 1.75/3 = .5833333333. v_i from 0 with w = 0:
    # (1 - .7225)(2/3) = .185, (1 - .5625)(-.8) = -.35, (1 - .3025)(12/4.5) = 1.86. Round 2:
    # w_i = 1 - .81 (1 - w) = .6625, .0133333333, 2.13, w = 2.8058333333/3 = .9352777778;
    # v_1 = .7225 * .185 + .2775 (1 + .5 * .5833333333)/1.5 = .3726208333, and so on.
    w, _, v = run(ditto(), Grid(DittoClient), ALL, ALL)
    assert_allclose(v[0], [0.185, -0.35, 1.86], atol=1e-8)
    assert_allclose(v[1], [0.3726208333, -0.4958333333, 2.4678583333], atol=1e-8)
    assert_allclose(w, [0.5833333333, 0.9352777778], atol=1e-8)


def test_two_take_part_in_turn() -> None:
    # w = (.19 - .36)/2 = -.085. Round 2: w_2 = -1 + .64 (1 + w) = -.4144, w_3 = 3 - .36 (3 - w)
    # = 1.8894, w = .7375. v_2: -.35 - .1 [2 (.65) + .5 (-.265)] = -.46675, then
    # -.46675 - .1 [2 (.53325) + .5 (-.38175)] = -.5543125; v_1 stays; v_3 from w^0 = 0.
    w, _, v = run(ditto(), Grid(DittoClient), *PARTLY)
    assert_allclose(v[0], [0.185, -0.35, 0], atol=1e-8)
    assert_allclose(v[1], [0.185, -0.5543125, 1.8534125], atol=1e-8)
    assert_allclose(w, [-0.085, 0.7375], atol=1e-8)


def test_the_personal_step_may_have_a_length_of_its_own() -> None:
    # One step of .2: v_i = -.2 a_i (0 - b_i) = .2, -.4, 2.4; the global ones are two of .1 as ever.
    w, _, v = run(ditto(personal_lr=0.2, personal_epochs=1), Grid(DittoClient), ALL)
    assert_allclose(v[0], [0.2, -0.4, 2.4], atol=1e-12)
    assert_allclose(w, [0.5833333333], atol=1e-8)


# --- Special cases ------------------------------------------------------------------------------


def test_without_a_pull_the_personal_models_are_those_of_local_training() -> None:
    # In the rounds in which a client takes part; to the bit.
    rounds = (0, 1), (1, 2), ALL, (1,)
    v = run(ditto(lam=0.0), Grid(DittoClient), *rounds).own
    grid = Grid(LocalClient)
    follow(Local(lr=0.1, local_epochs=2), grid, *rounds)
    assert v[-1] == grid.own_w(*ALL)
    # Client 1 took 4 steps, client 2 all 8, client 3 took 4.
    assert_allclose(v[-1], [1 - 0.9**4, -(1 - 0.8**8), 3 * (1 - 0.6**4)], atol=1e-12)


def test_with_many_steps_a_personal_model_solves_its_own_problem() -> None:
    # 50 steps of .04 are enough at lambda = 20: v_i = (a_i b_i + 20 w)/(a_i + 20). 100 steps of the
    # global model take w_i to b_i, so w is their mean, 1, from round 1 on.
    strategy = ditto(lam=20.0, local_epochs=100, personal_lr=0.04, personal_epochs=50)
    w, _, v = run(strategy, Grid(DittoClient), *[ALL] * 2)
    assert w[-1] == pytest.approx(1.0, abs=1e-4)
    assert_allclose(v[-1], [1.0, 18 / 22, 32 / 24], atol=1e-4)


# --- Coming, going, losing ----------------------------------------------------------------------


def test_a_client_that_lost_its_model_starts_again_from_the_initial_one() -> None:
    # Client 2 finds out in round 2, which it sits out: w = (.6625 + 2.13)/2 = 1.39625. In round 3
    # v_2 goes from 0 towards this w: .4375 (-2 + .5 * 1.39625)/2.5 = -.227828125. It never mattered
    # for w_2 = -1 + .64 (1 + 1.39625) = .5336.
    grid = Grid(DittoClient)
    strategy = ditto()
    w, uploads, v = run(strategy, grid, ALL, ALL, ALL, after={1: lambda: grid.forget(1)})
    assert sorted(strategy.train_metrics[2]) == [0, 2]
    assert w[1] == pytest.approx(1.39625, abs=1e-12)
    assert v[2][1] == pytest.approx(-0.227828125, abs=1e-12)
    assert uploads[2][1] == pytest.approx(0.5336, abs=1e-12)
    # The others went on from their own.
    kept = run(ditto(), Grid(DittoClient), ALL, (0, 2), ALL).own
    assert_allclose([v[2][0], v[2][2]], [kept[2][0], kept[2][2]], atol=1e-12)


def test_a_joining_client_starts_from_the_w_of_the_day() -> None:
    # Client 3 comes after round 1: v_3 from w = -.085 is .3025 w + .6975 (12 + .5 w)/4.5 = 1.8277,
    # and w = (.12115 - .4144 + 1.8894)/3 with w_1 = 1 - .81 (1 + .085) = .12115.
    grid = Grid(DittoClient, away=[2])
    w, _, v = run(ditto(), grid, (0, 1), ALL, after={1: grid.away.clear})
    assert_allclose(w, [-0.085, 0.5320500000], atol=1e-8)
    assert v[1][2] == pytest.approx(1.8277, abs=1e-8)
    assert v[1][1] == pytest.approx(-0.5543125, abs=1e-8)


def test_the_buffers_of_both_models_are_apart() -> None:
    # Both start at 0 and count the samples of their own two passes: 2 n_i each round. w averages
    # 2 n_i over the participants: 40 after round 1. In round 2, of clients 1 and 2 alone, w's is
    # 40 + (20 + 40)/2 = 70 and v_i's 4 n_i; client 3 keeps 2 n_3 = 60.
    grid = Grid(DittoClient, Counting)
    strategy = ditto()
    run(strategy, grid, ALL, (0, 1))
    assert_allclose(strategy.global_model()["seen"], [70])
    assert strategy.global_model()["steps"] == 4
    assert [grid.own(i)["seen"].item() for i in ALL] == [4 * N[0], 4 * N[1], 2 * N[2]]
    assert [grid.own(i)["steps"].item() for i in ALL] == [4, 4, 2]
