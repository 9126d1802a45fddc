"""FedProx by hand and its limits, docs/methods/fedprox.md; with mu = 0 it is FedAvg: `test_fedavg`.

The clients are the three of the pages' worked examples: see `quadratics`.
"""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

from clients import FedProxClient
from fl_admm_strategies import FedProx
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, run


def fedprox(**settings: Any) -> FedProx:
    return FedProx(**{"lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0.0} | settings)


def test_the_worked_example() -> None:
    # E1, mu = .5: x <- x - .1 [a_i (x - b_i) + .5 (x - w)]. For w_1: .1, then
    # .1 - .1 (-.9 + .05) = .185; w = (10 * .185 - 20 * .35 + 30 * 1.86)/60 = .8441666667.
    w, uploads, _ = run(fedprox(mu=0.5), Grid(FedProxClient), ALL, ALL)
    assert_allclose(uploads[0], [0.185, -0.35, 1.86], atol=1e-8)
    assert_allclose(uploads[1], [0.8729958333, 0.1987083333, 2.1807833333], atol=1e-8)
    assert_allclose(w, [0.8441666667, 1.3021270833], atol=1e-8)


def test_clients_of_unequal_power_do_what_they_can() -> None:
    # E1 with 1, 2 and 3 epochs: w_3's third step is 1.86 - .1 [4 (1.86 - 3) + .5 * 1.86] = 2.223.
    def epochs(server_round: int, client: int) -> int:
        return client + 1

    w, uploads, _ = run(fedprox(mu=0.5, local_epochs=epochs), Grid(FedProxClient), ALL)
    assert_allclose(uploads[0], [0.1, -0.35, 2.223], atol=1e-8)
    assert_allclose(w, [(10 * 0.1 - 20 * 0.35 + 30 * 2.223) / 60], atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "rounds", "limit"),
    [(130, 14, 1.4324324324), (2, 40, 1.8451730419)],
)
def test_the_limit_is_not_the_minimiser(epochs: int, rounds: int, limit: float) -> None:
    # P4, mu = .5. With exact local solutions (a_i b_i + mu w)/(a_i + mu), w = sum h_i b_i/sum h_i,
    # h_i = n_i a_i/(a_i + mu) = 6.6667, 16, 26.6667: (6.6667 - 16 + 80)/49.3333 = 1.4324324324.
    # Two steps go c_i = 1 - (1 - .1 (a_i + mu))^2 of the way, so h_i = c_i n_i a_i/(a_i + mu) with
    # c = .2775, .4375, .6975: (1.85 - 7 + 55.8)/(1.85 + 7 + 18.6) = 1.8451730419. The minimiser is
    # (10 - 40 + 360)/(10 + 40 + 120) = 1.9411764706.
    strategy = fedprox(mu=0.5, local_epochs=epochs)
    w, _, _ = run(strategy, Grid(FedProxClient), *[ALL] * rounds)
    assert w[-1] == pytest.approx(limit, abs=1e-8)
