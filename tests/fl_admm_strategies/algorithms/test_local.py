"""Local training: each client for itself, and nothing but metrics travels; docs/methods/local.md.

The clients are the three of the pages' worked examples: see `quadratics`.
"""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import MessageType
from numpy.testing import assert_allclose

from clients import LocalClient
from fl_admm_strategies import Local
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, follow


def local(**settings: Any) -> Local:
    return Local(**{"lr": 0.1, "local_epochs": 2} | settings)


def test_the_worked_example() -> None:
    # E1: a step takes w_i - b_i to (1 - .1 a_i)(w_i - b_i), so after k steps from 0
    # w_i = b_i (1 - (1 - .1 a_i)^k): 1 - .9^2 = .19, -(1 - .8^2) = -.36, 3 (1 - .6^2) = 1.92 after
    # the first round; 1 - .9^4 = .3439, -(1 - .8^4) = -.5904, 3 (1 - .6^4) = 2.6112 after two.
    grid = Grid(LocalClient)
    seen = follow(local(), grid, ALL, ALL, read=lambda: grid.own_w(*ALL))
    assert_allclose(seen[0], [0.19, -0.36, 1.92], atol=1e-8)
    assert_allclose(seen[1], [0.3439, -0.5904, 2.6112], atol=1e-8)


def test_a_client_that_sits_out_keeps_its_model() -> None:
    # Client 1 takes part in the first round, client 3 in the second, client 2 in both.
    grid = Grid(LocalClient)
    follow(local(), grid, (0, 1), (1, 2))
    assert_allclose(grid.own_w(*ALL), [0.19, -0.5904, 1.92], atol=1e-8)


def test_the_initial_model_is_all_that_travels_and_once() -> None:
    grid = Grid(LocalClient)
    strategy = local()
    follow(strategy, grid, (0, 1), ALL)
    # One number of 8 bytes for each client that is new to the run.
    assert {r: tuple(traffic) for r, traffic in strategy.traffic.items()} == {1: (16, 0), 2: (8, 0)}


def test_the_own_models_are_evaluated_where_they_are() -> None:
    # After round 1 client 1 has .19: (.19 - 1)^2/2 = .32805; client 2 -.36: (.64)^2 = .4096.
    # Client 3 has not trained yet: 4/2 (0 - 3)^2 = 18, with the initial model.
    grid = Grid(LocalClient)
    strategy = local()
    follow(strategy, grid, (0, 1))
    losses = {i: m["personal-loss"] for i, m in strategy.evaluate_metrics[1].items()}
    assert losses == pytest.approx({0: 0.32805, 1: 0.4096, 2: 18.0}, rel=1e-12)
    sent = grid.sent_in(MessageType.EVALUATE, 1)
    assert {c: len(content["arrays"]) for c, content in sent.items()} == {0: 0, 1: 0, 2: 1}


def test_buffers_are_the_clients_own() -> None:
    # Two passes over n_i = 10, 20, 30 samples a round.
    grid = Grid(LocalClient, Counting)
    follow(local(), grid, ALL, (0,))
    assert [grid.own(i)["seen"].item() for i in ALL] == [40, 40, 60]
    assert [grid.own(i)["steps"].item() for i in ALL] == [4, 2, 2]
