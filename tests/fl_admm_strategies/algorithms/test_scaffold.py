"""SCAFFOLD by hand and its limits; docs/methods/scaffold.md. The clients are `quadratics`'."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from clients import DittoClient, SCAFFOLDClient, client_app
from fl_admm_strategies import SCAFFOLD, Ditto, InProcessGrid
from tests.clients.methods.lines import line_client
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, follow
from tests.support.cases import NUM_CLIENTS
from tests.support.federation import client_fn_of, initial_arrays
from tests.support.refusals import refused


def scaffold(**settings: Any) -> SCAFFOLD:
    return SCAFFOLD(**{"lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0.0} | settings)


def run(strategy: SCAFFOLD, *rounds: Any, **options: Any) -> Any:
    """Return x and c after every round, shape (rounds, 2)."""

    def read() -> list[float]:
        state = strategy.state
        return [state.model["w"].item(), state.totals.sums["w"].item() / 3]

    return np.array(follow(strategy, Grid(SCAFFOLDClient), *rounds, read=read, **options))


ONE = [1.75 / 3, -8.75 / 3]


@pytest.mark.parametrize(("eta", "two"), [(1.0, 0.94925), (0.5, 0.7662916667)])
def test_the_worked_example(eta: float, two: float) -> None:
    # E1. Round 1, all: y = .19, -.36, 1.92 as FedAvg's, c_i = -y_i/.2 = -.95, 1.8, -9.6, of which
    # the mean is c = -8.75/3; for eta_g = 1 x = 1.75/3. Round 2, clients 1 and 2:
    # y_1: x - .1 [(x - 1) + c + .95] = .8216667, then 1.0361667; y_2: .7383333, .8623333;
    # c_i is the mean of the gradients at the two points: (-.4166667 - .1783333)/2 = -.2975 and
    # (3.1666667 + 3.4766667)/2 = 3.3216667; x is the mean of the two, c = (-.2975 + 3.3216667
    # - 9.6)/3. The first round has eta_g = 1 in both; with 1/2 the second goes half of the way.
    strategy = scaffold()
    after = {1: lambda: setattr(strategy, "global_lr", eta)}
    found = run(strategy, ALL, (0, 1), after=after)
    assert_allclose(found, [ONE, [two, -2.1919444444]], atol=1e-9)


@pytest.mark.slow
def test_it_converges_to_the_minimiser_whoever_takes_part() -> None:
    # 11/7, with the c_i at the clients' gradients there, which sum to 0 (T1); two of three take
    # part, in turn.
    x, c = run(scaffold(), *[(0, 1), (1, 2), (0, 2)] * 20)[-1]
    assert (x, c) == (pytest.approx(11 / 7, abs=1e-6), pytest.approx(0, abs=1e-6))


@pytest.mark.parametrize("how", ["forgets", "leaves"])
def test_when_a_control_variate_is_gone_all_begin_again(how: str) -> None:
    # Round 2 of clients 1 and 2 is FedAvg's from x then: without corrections y_1 goes
    # 1 - .9^2 = .19 of the way from x to 1, y_2 .36 of it to -1, and c_i is (x - y_i)/.2.
    grid, strategy = Grid(SCAFFOLDClient), scaffold(max_missed_rounds=1)
    gone = {"forgets": lambda: grid.forget(2), "leaves": lambda: grid.away.add(2)}[how]
    rounds = [ALL, (2,), (0, 1)] if how == "forgets" else [ALL, (0, 1)]

    def read() -> list[float]:
        return [strategy.state.model["w"].item(), strategy.state.totals.sums["w"].item()]

    found = follow(strategy, grid, *rounds, read=read, after={1: gone})
    x = ONE[0]
    moves = np.array([0.19 * (1 - x), 0.36 * (-1 - x)])
    assert_allclose(found[-1], [x + moves.mean(), -moves.sum() / 0.2], atol=1e-9)


def test_its_first_round_is_fedavgs_to_the_bit() -> None:
    def model(strategy: Any, client_class: Any) -> Any:
        grid = InProcessGrid(client_app(client_fn_of(client_class)), NUM_CLIENTS)
        strategy.start(grid, initial_arrays(), 1)
        return strategy.global_arrays

    settings: dict[str, Any] = {"lr": 0.3, "local_epochs": 2, "seed": 2, "fraction_evaluate": 0}
    found = model(SCAFFOLD(**settings), SCAFFOLDClient)
    plain = model(Ditto(weights="uniform", **settings), DittoClient)
    for name, array in plain.items():
        assert_array_equal(found[name].numpy(), array.numpy())


def test_steps_from_which_no_gradient_can_be_read_are_refused() -> None:
    with refused(ValueError, "optimizer_fn", "SCAFFOLD"):
        line_client(SCAFFOLDClient, optimizer_fn=partial(torch.optim.SGD, momentum=0.9))
