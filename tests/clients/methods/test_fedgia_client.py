"""The client's half of FedGiA: its closed form of the local steps, its duals, what it refuses.

See docs/methods/fedgia.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FedGiAClient, FedGiALinearClient
from clients.toolkit.solving.curvature import LeastSquares, Logistic
from fl_admm_strategies.algorithms.fedgia import FedGiAInstruction, FedGiAQuestion, FedGiARule
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import labels, matrix
from tests.clients.methods.messages import Received, received
from tests.support.refusals import refused

RNG = np.random.default_rng(5)
NUM_CLIENTS, SIGMA = 4, 0.3
GLOBAL = ClientInstruction({"global": {"x": np.ones(2)}}).full_config()  # of an evaluation


tall = LeastSquares(matrix(9, 5), np.zeros(9))


# --- The steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 5), (4, 7)])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_the_steps_with_the_gram_matrix_are_the_loop(shape: tuple[int, int], steps: int) -> None:
    loss = Logistic(matrix(*shape), labels(shape[0]), mu=0.5)
    n = loss.size
    h = 0.25 * loss.matrix.T @ loss.matrix / loss.num_examples + loss.reg * np.eye(n)
    client = FedGiALinearClient(context(), loss)
    client.fit(*message(ones(n), gram=True))
    _, slope = loss.value_and_gradient(np.ones(n))
    dual = -slope / NUM_CLIENTS  # (17)
    x = RNG.normal(size=n)
    later = message({"x": x}, steps=steps, gram=True, version=1, server_round=2)
    (gradient, z), _, _ = client.fit(*later)
    for _ in range(steps):  # (13), (14) as printed
        pulled = h / NUM_CLIENTS + SIGMA * np.eye(n)
        x_i = x - np.linalg.solve(pulled, gradient / NUM_CLIENTS + dual)
        dual = dual + SIGMA * (x_i - x)
    np.testing.assert_allclose(z, x_i + dual / SIGMA, rtol=0, atol=1e-12)


# --- The clients --------------------------------------------------------------------------------


def context() -> Context:
    return Context(1, 2, {"partition-id": 3, "num-partitions": 4}, RecordDict(), {})


def message(
    model: Arrays,
    *,
    steps: int = 0,
    gram: bool = False,
    version: int = 0,
    server_round: int = 1,
    seed: int = 0,
) -> Received:
    """Return a round's message; by default it is for the gradient step."""
    rule = FedGiARule(True, 2.0, SIGMA, NUM_CLIENTS, steps, gram)
    asked = FedGiAInstruction(model, rule.text())
    names = [*model, *(f"message/{name}" for name in model if gram)]
    return received(asked, upload=names, version=version, server_round=server_round, seed=seed)


def ones(size: int) -> Arrays:
    return {"x": np.ones(size)}


def test_the_gradient_group_by_hand() -> None:
    loss = LeastSquares([[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])  # gradient (1.5, 1), above
    client = FedGiALinearClient(context(), loss)
    reply, num_examples, metrics = client.fit(*message(ones(2), gram=True))
    np.testing.assert_allclose(reply[0], [1.5, 1.0])
    np.testing.assert_allclose(reply[1], 1 - np.array([1.5, 1.0]) / NUM_CLIENTS / SIGMA)  # (18)
    assert num_examples == 2
    assert metrics.pop("initial-loss") == metrics["loss"]
    assert metrics == {"loss": pytest.approx(1.25), **made_by("FedGiA")}


def test_buffers_and_frozen_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    data = TensorDataset(torch.randn(8, 5), torch.randn(8, 1))
    client = FedGiAClient(context(), model, DataLoader(data, 8), nn.MSELoss())
    trained = ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"]
    before = client.arrays()
    assert [*before] == [name for name in model.state_dict() if name != "0.bias"]
    reply, _, _ = client.fit(*message(before))
    for (name, old), new in zip(before.items(), reply, strict=True):
        assert np.array_equal(old, new) == (name not in trained), name
        assert old.dtype == new.dtype
    asked = FedGiAQuestion(before, "gram")
    with refused(ValueError, "gram", "data matrix"):
        client.fit(*received(asked, handshake=True))
    # One function, whatever the seed of the round: no dropout, no change of the buffers
    again, _, _ = client.fit(*message(before, seed=1))
    for one, other in zip(reply, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_curvature_is_that_of_the_same_batches_whatever_was_drawn_before() -> None:
    """Of many samples it is measured on some, which a loader that shuffles draws."""
    data = TensorDataset(torch.randn(1100, 3).exp(), torch.randn(1100, 1))
    found = []
    for seed in (1, 2):
        client = FedGiAClient(context(), nn.Linear(3, 1), DataLoader(data, 50, True), nn.MSELoss())
        torch.manual_seed(seed)
        asked = FedGiAQuestion(
            {name: np.zeros_like(a) for name, a in client.arrays().items()}, "diagonal"
        )
        _, _, metrics = client.fit(*received(asked, handshake=True))
        found.append(metrics["curvature"])
    assert found[0] == found[1]


def test_a_lost_dual_fails_in_the_admm_group_and_heals_in_the_other() -> None:
    client = FedGiALinearClient(context(), tall)
    keeping: dict[str, Any] = {"gram": True, "version": 4, "server_round": 5}
    with refused(ValueError, "round 4"):
        client.fit(*message(ones(5), steps=3, **keeping))
    client.fit(*message(ones(5), **keeping))
    later: dict[str, Any] = {"gram": True, "version": 5, "server_round": 6}
    client.fit(*message(ones(5), steps=3, **later))


def test_evaluation() -> None:
    loss = LeastSquares([[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])
    client = FedGiALinearClient(context(), LeastSquares(np.eye(2), np.zeros(2)), loss)
    value, num_examples, metrics = client.evaluate(list(ones(2).values()), GLOBAL)
    assert (value, num_examples) == (pytest.approx(1.25), 2)
    rmse = pytest.approx(2.5**0.5)
    assert metrics == {"global-loss": value, "global-rmse": rmse, **made_by("FedGiA")}
    with refused(ValueError, "(3,)", "2 numbers"):
        client.fit(*message(ones(3)))
    with refused(ValueError, "test_problem"):
        FedGiALinearClient(context(), tall).evaluate(list(ones(5).values()), GLOBAL)
