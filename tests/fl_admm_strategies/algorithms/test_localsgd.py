"""LocalSGD by hand; docs/methods/localsgd.md. The clients are those of `quadratics`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from clients import LeastSquares, LocalSGDClient, LocalSGDLinearClient
from fl_admm_strategies import LocalSGD
from fl_admm_strategies.algorithms.localsgd import LocalSGDInstruction
from tests.clients.methods.lines import line_client, new_context
from tests.clients.methods.messages import received
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, N, follow, run
from tests.support.refusals import refused


def localsgd(**settings: Any) -> LocalSGD:
    return LocalSGD(**{"lr": 0.1, "local_steps": 2, "fraction_evaluate": 0.0} | settings)


def test_the_worked_example() -> None:
    # E1. Steps of .1/log2(2) = .1, .1/log2(3) = .0630930; then .1/log2(4) = .05, .1/log2(5) =
    # .0430677. For client 1: .1, then .1 + .0630930 * .9 = .1567837.
    x, uploads, _ = run(localsgd(), Grid(LocalSGDClient), ALL, ALL)
    assert_allclose(uploads[0], [0.1567836778, -0.3009487606, 1.6542694226], atol=1e-8)
    assert_allclose(uploads[1], [0.5485190402, 0.2364875291, 1.3467715555], atol=1e-8)
    assert_allclose(x, [0.5033681133, 0.7105927083], atol=1e-8)


def test_the_step_goes_on_falling_for_those_who_sat_out() -> None:
    # Round 2 of client 3 has the steps .05 and .0430677, though it is its first.
    _, uploads, _ = run(localsgd(), Grid(LocalSGDClient), (0, 1), (2,))
    x = (0.1567836778 - 0.3009487606) / 2
    expected = 3 - (1 - 4 * 0.05) * (1 - 4 * 0.0430676558) * (3 - x)
    assert uploads[1] == pytest.approx([expected], abs=1e-8)


def test_with_one_step_it_is_gradient_descent_on_the_plain_mean() -> None:
    # k0 = 1: x <- x - gamma_k mean_i a_i (x - b_i), where sum a_i = 7 and sum a_i b_i = 11.
    x, _, _ = run(localsgd(local_steps=1), Grid(LocalSGDClient), ALL, ALL)
    first = 0.1 * 11 / 3
    assert_allclose(x, [first, first - 0.0630929754 * (7 * first - 11) / 3], atol=1e-8)


def test_buffers_are_averaged_as_the_parameters_are() -> None:
    strategy = localsgd()
    follow(strategy, Grid(LocalSGDClient, Counting), ALL)
    assert_allclose(strategy.global_model()["seen"], [2 * sum(N) / 3])


def test_an_optimizer_of_ones_own_is_refused() -> None:
    with refused(ValueError, "optimizer_fn", "LocalSGD"):
        line_client(LocalSGDClient, optimizer_fn=partial(torch.optim.SGD, momentum=0.5))


# --- Linear models, as FedGiA's paper has them ------------------------------------------------


def linear_client(batch_share: float, rows: int = 40) -> LocalSGDLinearClient:
    draw = np.random.default_rng(3)
    matrix, targets = draw.normal(size=(rows, 4)), draw.normal(size=rows)
    problem = LeastSquares(matrix, targets)
    return LocalSGDLinearClient(new_context(), problem, problem, batch_share=batch_share)


def fit(client: LocalSGDLinearClient, seed: int = 5, local_steps: int = 2) -> np.ndarray:
    asked = LocalSGDInstruction({"x": np.ones(4)}, 0.1, 3, local_steps)
    (x,), num_examples, metrics = client.fit(*received(asked, seed=seed))
    assert num_examples == client.problem.num_examples
    assert metrics["loss"] == metrics["initial-loss"]
    return x


def test_a_linear_model_takes_full_steps() -> None:
    # The steps k = 3, 4 of a run: .1/log2(4), .1/log2(5).
    client = linear_client(1.0)
    x = np.ones(4)
    for step in (0.05, 0.1 / np.log2(5)):
        x = x - step * client.problem.value_and_gradient(x)[1]
    assert_allclose(fit(client), x, rtol=1e-14)


def test_or_steps_on_samples_that_are_drawn_anew() -> None:
    # 5 % of 40 are 2: one of the pairs of samples gives the first step.
    client = linear_client(0.05)
    assert (fit(client) == fit(linear_client(0.05))).all()
    assert not (fit(client) == fit(client, seed=6)).all()
    x = fit(client, local_steps=1)
    pairs = (np.array([i, j]) for i in range(40) for j in range(i))
    steps = (0.05 * client.problem.value_and_gradient(np.ones(4), pair)[1] for pair in pairs)
    assert any(np.allclose(np.ones(4) - step, x, rtol=1e-12) for step in steps)
    with refused(ValueError, "batch_share", 0):
        linear_client(0)
