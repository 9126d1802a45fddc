"""FedProx by hand, FedAvg as its special case, and its limits; docs/methods/fedprox.md.

The clients are the three of the pages' worked examples: see `quadratics`.
"""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord, MessageType
from numpy.testing import assert_allclose, assert_array_equal

from clients import FedProxClient
from fl_admm_strategies import FedProx
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, follow
from tests.support.federation import node_of


def fedprox(**settings: Any) -> FedProx:
    return FedProx(**{"lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0.0} | settings)


def run(strategy: FedProx, grid: Grid, *rounds: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the uploads of every round, in the order of the clients, and w after it."""
    w = follow(strategy, grid, *rounds, read=lambda: strategy.state.model["w"].item(), **options)
    uploads = []
    for server_round in range(1, len(rounds) + 1):
        got = sorted(grid.got_in(MessageType.TRAIN, server_round).items())
        uploads.append([content["arrays"]["w"].numpy().item() for _, content in got])
    return uploads, w


def test_the_worked_example() -> None:
    # E1, mu = .5: x <- x - .1 [a_i (x - b_i) + .5 (x - w)]. For w_1: .1, then
    # .1 - .1 (-.9 + .05) = .185; w = (10 * .185 - 20 * .35 + 30 * 1.86)/60 = .8441666667.
    uploads, w = run(fedprox(mu=0.5), Grid(FedProxClient), ALL, ALL)
    assert_allclose(uploads[0], [0.185, -0.35, 1.86], atol=1e-8)
    assert_allclose(uploads[1], [0.8729958333, 0.1987083333, 2.1807833333], atol=1e-8)
    assert_allclose(w, [0.8441666667, 1.3021270833], atol=1e-8)


def test_without_the_proximal_term_it_is_fedavg() -> None:
    # x - b_i shrinks by 1 - .1 a_i a step, so by .81, .64, .36 a round. From 0: 1 - .81 = .19,
    # -(1 - .64) = -.36, 3 (1 - .36) = 1.92, and w = (10 * .19 - 20 * .36 + 30 * 1.92)/60
    # = 52.3/60 = .8716666667. Then 1 - .81 (1 - w) = .89605, -1 + .64 (1 + w) = .1978666667,
    # 3 - .36 (3 - w) = 2.2338, and w = (8.9605 + 3.9573333333 + 67.014)/60 = 1.3321972222.
    uploads, w = run(fedprox(mu=0.0), Grid(FedProxClient), ALL, ALL)
    assert_allclose(uploads[0], [0.19, -0.36, 1.92], atol=1e-8)
    assert_allclose(uploads[1], [0.89605, 0.1978666667, 2.2338], atol=1e-8)
    assert_allclose(w, [0.8716666667, 1.3321972222], atol=1e-8)


def test_the_mean_is_over_those_who_take_part() -> None:
    # FedAvg with clients 1 and 2, then 2 and 3: w = (10 * .19 - 20 * .36)/30 = -.1766666667;
    # w_2 = -1 + .64 (1 + w) = -.4730666667, w_3 = 3 - .36 (3 - w) = 1.8564, and
    # w = (-20 * .4730666667 + 30 * 1.8564)/50 = .9246133333.
    uploads, w = run(fedprox(mu=0.0), Grid(FedProxClient), (0, 1), (1, 2))
    assert_allclose(uploads[0], [0.19, -0.36], atol=1e-8)
    assert_allclose(uploads[1], [-0.4730666667, 1.8564], atol=1e-8)
    assert_allclose(w, [-0.1766666667, 0.9246133333], atol=1e-8)


@pytest.mark.parametrize(
    ("epochs", "rounds", "limit"),
    [
        pytest.param(130, 14, 1.4324324324, marks=pytest.mark.slow),
        (2, 40, 1.8451730419),
    ],
)
def test_the_limit_is_not_the_minimiser(epochs: int, rounds: int, limit: float) -> None:
    # P4, mu = .5. With exact local solutions (a_i b_i + mu w)/(a_i + mu), w = sum h_i b_i/sum h_i,
    # h_i = n_i a_i/(a_i + mu) = 6.6667, 16, 26.6667: (6.6667 - 16 + 80)/49.3333 = 1.4324324324.
    # Two steps go c_i = 1 - (1 - .1 (a_i + mu))^2 of the way, so h_i = c_i n_i a_i/(a_i + mu) with
    # c = .2775, .4375, .6975: (1.85 - 7 + 55.8)/(1.85 + 7 + 18.6) = 1.8451730419. The minimiser is
    # (10 - 40 + 360)/(10 + 40 + 120) = 1.9411764706.
    strategy = fedprox(mu=0.5, local_epochs=epochs)
    _, w = run(strategy, Grid(FedProxClient), *[ALL] * rounds)
    assert w[-1] == pytest.approx(limit, abs=1e-8)


def test_clients_keep_nothing_and_are_sent_the_model_alone() -> None:
    grid = Grid(FedProxClient)
    strategy = fedprox(mu=0.5)
    run(strategy, grid, ALL, (0, 1))
    for client in ALL:
        assert not grid.context(node_of(client)).state.array_records
    assert {r: tuple(traffic) for r, traffic in strategy.traffic.items()} == {
        1: (24, 24),
        2: (16, 16),
    }
    for content in grid.sent_in(MessageType.TRAIN, 2).values():
        assert list(content.array_records) == ["arrays"]
        assert_allclose(content["arrays"]["w"].numpy(), [0.8441666667], atol=1e-8)


def test_a_joining_client_is_one_more_participant() -> None:
    # FedAvg of clients 1 and 2: w = -.1766666667, as above; then client 3 is there as well:
    # 1 - .81 (1 - w) = .0469, -.4730666667, 1.8564, and w = (.469 - 9.4613333333 + 55.692)/60
    # = .7783277778.
    grid = Grid(FedProxClient, away=[2])
    _, w = run(fedprox(mu=0.0), grid, (0, 1), ALL, after={1: grid.away.clear})
    assert_allclose(w, [-0.1766666667, 0.7783277778], atol=1e-8)


def test_buffers_are_averaged_as_the_parameters_are() -> None:
    # Two passes over n_i samples: seen = 2 n_i = 20, 40, 60 and the mean, weighted by n_i,
    # (10 * 20 + 20 * 40 + 30 * 60)/60 = 46.6667; as much again in round 2. An integer stays one.
    strategy = fedprox()
    follow(strategy, Grid(FedProxClient, Counting), ALL, ALL)
    model = strategy.global_model()
    assert_allclose(model["seen"], [93.3333333333], atol=1e-8)
    assert model["steps"].dtype == "int64"
    assert model["steps"] == 4


def test_a_model_that_is_read_is_a_copy_of_the_state() -> None:
    strategy = fedprox()
    follow(strategy, Grid(FedProxClient), ALL)
    before = strategy.state_dict()
    strategy.global_model()["w"] += 1
    assert_array_equal(strategy.state_dict()["state/model/w"], before["state/model/w"])


def test_the_global_model_is_evaluated_and_there_is_no_other() -> None:
    # f_i at w = .8441666667: (1 - w)^2/2, (1 + w)^2, 2 (3 - w)^2.
    strategy = fedprox(mu=0.5, fraction_evaluate=1.0)
    follow(strategy, Grid(FedProxClient), ALL)
    losses = {i: m["global-loss"] for i, m in strategy.evaluate_metrics[1].items()}
    expected = {0: 0.0121420139, 1: 3.4009506944, 2: 9.2952347222}
    assert losses == pytest.approx(expected, abs=1e-8)
    with pytest.raises(ValueError, match=r"FedProx has no personal models, expected one of \['gl"):
        strategy.personal_arrays(0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mu": -0.1}, "mu is -0.1, expected a finite number >= 0"),
        ({"lr": 0.0}, "lr is 0.0, expected a finite number > 0"),
        ({"local_epochs": 0}, "local_epochs is 0, expected an integer >= 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FedProx(**settings)


def test_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="The initial arrays are empty"):
        fedprox().start(Grid(FedProxClient), ArrayRecord(), 1)
