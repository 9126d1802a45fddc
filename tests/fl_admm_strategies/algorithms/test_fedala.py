"""FedALA by hand: where clients start, between the global model and theirs; docs/methods/fedala.md.

The clients are the three of the pages' worked examples (`quadratics`), whose one parameter is one
layer. Two steps of .1 take x - b_i to (1 - .1 a_i)^2 = .81, .64, .36 of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.utils.data import DataLoader

from clients import FedALAClient
from clients.methods.fedala import MOST_PASSES, settled
from fl_admm_strategies import FedALA
from fl_admm_strategies.messages import FedALAInstruction
from tests.clients.methods.lines import new_context
from tests.clients.methods.messages import received
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Counting, Grid, Scalar, follow
from tests.support.federation import (
    dataset,
    make_model,
)


def fedala(**settings: Any) -> FedALA:
    return FedALA(**{"lr": 0.1, "local_epochs": 2, "fraction_evaluate": 0.0} | settings)


def run(strategy: FedALA, *rounds: Any, **options: Any) -> tuple[Grid, list[float]]:
    """Return the grid, and w after every round."""
    grid = Grid(FedALAClient)
    seen = follow(strategy, grid, *rounds, read=lambda: strategy.state.model["w"].item(), **options)
    return grid, seen


# --- Learning W_i (E1) --------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    # f = (x - 1.6)^2, theta = 1, w = 3, so x = 1 + 2 W from 3 on. A step: W - .1 * 2 (x - 1.6) * 2.
    batch = (torch.zeros(1), torch.full((1,), 1.6, dtype=torch.float64))

    def square(outputs: Any, targets: Any) -> Any:
        return ((outputs - targets) ** 2).mean()

    client = FedALAClient(new_context(), Scalar(), [batch], square)
    theta, change, weights = (
        {"w": torch.tensor([value], dtype=torch.float64)} for value in (1.0, 2.0, 1.0)
    )
    found, losses = [], []
    for _ in range(4):
        losses.append(client._pass(client.train_problem, 0.1, theta, change, weights))
        found.append(weights["w"].item())
    assert_allclose(found, [0.44, 0.328, 0.3056, 0.30112], atol=1e-8)
    starts = [1 + 2 * value for value in found]
    assert_allclose(starts, [1.88, 1.656, 1.6112, 1.60224], atol=1e-8)
    assert_allclose(losses, [(x - 1.6) ** 2 for x in [3.0, *starts[:3]]], atol=1e-12)


def test_a_federation_by_hand() -> None:
    # Round 1 is FedAvg's: theta = .19, -.36, 1.92, w = .8716666667. In round 2 client 1, at b = 1,
    # is better off with w, so that W = 1; the others with their own, W = 0. Then
    # 1 - .81 (1 - w) = .89605, -1 + .64 * .64 = -.5904, 3 - .36 * 1.08 = 2.6112.
    strategy = fedala(fraction_evaluate=1.0)
    grid, w = run(strategy, ALL, ALL)
    assert_allclose(w, [0.8716666667, (8.9605 - 11.808 + 78.336) / 60], atol=1e-8)
    assert_allclose(grid.own_w(*ALL), [0.89605, -0.5904, 2.6112], atol=1e-8)
    # What is evaluated is where they would start: f_i(x) = a_i/2 (x - b_i)^2 at w, -.36, 1.92.
    metrics = strategy.evaluate_metrics[1]
    expected = {0: (1 - w[0]) ** 2 / 2, 1: 0.64**2, 2: 2 * 1.08**2}
    assert {i: own["personal-loss"] for i, own in metrics.items()} == pytest.approx(expected)
    assert metrics[1]["global-loss"] == pytest.approx((1 + w[0]) ** 2)
    # And that leaves nothing behind: without evaluation it is the same run.
    _, without = run(fedala(), ALL, ALL)
    assert without == w


def test_the_first_time_takes_passes_until_the_loss_settles_and_later_ones_one() -> None:
    _, _ = run(strategy := fedala(), ALL, ALL, ALL)
    passes = [
        [own["weight-passes"] for own in strategy.train_metrics[r].values()] for r in (1, 2, 3)
    ]
    assert passes == [[0, 0, 0], [11, 11, 11], [1, 1, 1]]


def test_losses_settle() -> None:
    assert not settled([1.0] * 10)
    assert settled([1.0] * 11)
    assert not settled([0.0, 1.0] * 10)
    assert settled([5.0] + [1.0, 1.1] * 5)
    assert settled([0.0, 1.0] * (MOST_PASSES // 2))  # but not for ever


# --- Special cases ------------------------------------------------------------------------------


def test_with_weights_that_stay_at_1_it_is_fedavg() -> None:
    _, w = run(fedala(weight_lr=0.0), ALL, ALL)
    assert_allclose(w, [0.8716666667, 1.3321972222], atol=1e-8)


@pytest.mark.parametrize("full_batch", [False, True])
def test_only_the_top_layers_are_mixed(full_batch: bool) -> None:
    loader = DataLoader(dataset(2), batch_size=4)
    client: Any = FedALAClient(
        new_context(), make_model(), loader, nn.CrossEntropyLoss(), full_batch=full_batch
    )
    first = {name: tensor.numpy() for name, tensor in make_model().state_dict().items()}
    settings = {"layers": 1, "sample": 0.5, "weight_lr": 1.0, "lr": 0.5, "local_epochs": 2}
    client.fit(*received(FedALAInstruction(first, **settings)))
    theta = client.personal_arrays()
    w = {name: array + 0.1 for name, array in first.items()}
    asked = FedALAInstruction(w, **settings)
    weights, metrics = client.load_mixed(asked, {"version": 1, "server-round": 2})
    assert metrics["weight-passes"] >= 11
    assert list(weights) == ["head.weight", "head.bias"]
    state = client.arrays()
    for name in ("body.weight", "body.bias"):
        assert_array_equal(state[name], w[name])
    for name, own in weights.items():
        share = own.numpy()
        assert 0 <= share.min() < share.max() <= 1
        assert_allclose(state[name], theta[name] + (w[name] - theta[name]) * share, rtol=1e-5)


def test_buffers_are_those_of_the_global_model() -> None:
    # Learning W_i runs the model in training mode, on a batch norm's statistics, too.
    grid = Grid(FedALAClient, Counting)
    follow(fedala(), grid, ALL, ALL)
    assert grid.own(0)["steps"].item() == 4  # two of each round, not those of 11 passes
    mean = (10 * 20 + 20 * 40 + 30 * 60) / 60  # the samples of two passes each, weighted by n_i
    assert grid.own(0)["seen"].item() == pytest.approx(mean + 20)
