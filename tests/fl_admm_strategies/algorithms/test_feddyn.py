"""FedDyn by hand and as FedADMM; docs/methods/feddyn.md. The clients are those of `quadratics`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clients import FedADMMClient, FedDynClient
from fl_admm_strategies import FedADMM, FedDyn
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, follow
from tests.support.pace import fast
from tests.support.refusals import refused

TURNS = [(0, 1), (1, 2), (0, 2)]


def feddyn(**settings: Any) -> FedDyn:
    return FedDyn(**{"alpha": 1.0, "lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0} | settings)


def run(strategy: FedDyn, *rounds: Any) -> Any:
    """Return theta and h after every round, shape (rounds, 2)."""

    def read() -> list[float]:
        state = strategy.state
        return [float(state.w[0]), -strategy.penalty * float(state.total[0]) / 3]

    return np.array(follow(strategy, Grid(FedDynClient), *rounds, read=read))


def test_the_worked_example() -> None:
    # E1, alpha = 1. Round 1: x <- x - .1 [a_i (x - b_i) + (x - 0)] twice from 0: .18, -.34, 1.8, of
    # which the mean is 1.64/3; h = -1.64/3, theta = 1.64/3 + 1.64/3, grad = -.18, .34, -1.8.
    # Round 2, clients 1 and 2, from theta = 1.0933333: x_1: the gradient is .0933333 + .18, then
    # (.066 - .0273333 + .18): 1.066, then 1.0441333. x_2: 4.1866667 - .34 = 3.8466667, then at
    # .7086667: 3.4173333 - .34 - .3846667 = 2.6926667: .4394. h = -1.64/3 + (.0492 + .6539333)/3,
    # theta = (1.0441333 + .4394)/2 - h.
    found = run(feddyn(), ALL, (0, 1))
    assert_allclose(found[0], [3.28 / 3, -1.64 / 3], atol=1e-9)
    assert_allclose(found[1], [1.0540555556, -0.3122888889], atol=1e-9)


@pytest.mark.parametrize("duals", ["strategy", "client"])
@pytest.mark.parametrize("rounds", fast([TURNS * 3], [[ALL] * 6, TURNS * 3]))
def test_it_is_fedadmm_with_rho_for_alpha(duals: Any, rounds: Any) -> None:
    # P1: pi_i = -grad_i, of which the mean is -h. Equal but for rounding.
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0}
    admm = FedADMM(rho=0.7, duals=duals, **settings)
    w = follow(admm, Grid(FedADMMClient), *rounds, read=lambda: admm.state.w.item())
    assert_allclose(run(feddyn(alpha=0.7), *rounds)[:, 0], w, rtol=1e-13)


@pytest.mark.parametrize("how", ["forgets", "leaves"])
def test_when_a_gradient_is_gone_all_begin_again(how: str) -> None:
    # From theta = 3.28/3 with grad_i = h = 0: x goes [1 - (1 - .1 (a + 1))^2] a/(a + 1) of the way
    # to b: .18 and .34. Then theta is the mean of the x_i plus a third of the sum of the moves.
    grid, strategy = Grid(FedDynClient), feddyn(max_missed_rounds=1)
    gone = {"forgets": lambda: grid.forget(2), "leaves": lambda: grid.away.add(2)}[how]
    rounds = [ALL, (2,), (0, 1)] if how == "forgets" else [ALL, (0, 1)]
    follow(strategy, grid, *rounds, after={1: gone})
    theta = 3.28 / 3
    moves = np.array([0.18 * (1 - theta), 0.34 * (-1 - theta)])
    members = 3 if how == "forgets" else 2
    expected = theta + moves.mean() + moves.sum() / members
    assert_allclose(strategy.state.w, [expected], atol=1e-9)


def test_its_rho_is_alpha() -> None:
    with refused(TypeError, "rho", "FedDyn"):
        FedDyn(rho=0.1)  # type: ignore[call-arg]


def test_by_default_it_follows_the_step_sizes_as_fedadmm_does() -> None:
    # One step of .1 a round, so that .3/S is 3, beyond the bound of .2.
    strategy = FedDyn(lr=0.1, local_epochs=1, fraction_evaluate=0)
    follow(strategy, Grid(FedDynClient), ALL)
    assert strategy.state.step_sum == pytest.approx(0.1)
    assert strategy.penalty == 0.2
