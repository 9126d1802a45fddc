"""The client's half of FedGiA: its closed form of the local steps, its duals, what it refuses.

See docs/methods/fedgia.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FedGiAClient, FedGiALinearClient
from clients.methods.fedgia import admm_steps
from clients.toolkit.solving.curvature import DataLoss, Gram, LeastSquares, Logistic
from fl_admm_strategies.algorithms.fedgia import FedGiAInstruction, FedGiARule
from fl_admm_strategies.algorithms.shared.rule import Row
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.lines import labels, matrix
from tests.clients.methods.messages import Received, received
from tests.support.refusals import refused

RNG = np.random.default_rng(5)
NUM_CLIENTS, SIGMA = 4, 0.3
GLOBAL = ClientInstruction({"global": {"x": np.ones(2)}}).full_config()  # of an evaluation


def dense(loss: DataLoss, bend: float) -> NDArray[np.float64]:
    """Table II's H_i, formed."""
    return bend * loss.matrix.T @ loss.matrix / loss.num_examples + loss.reg * np.eye(loss.size)


tall = LeastSquares(matrix(9, 5), np.zeros(9))
wide = LeastSquares(matrix(4, 7), np.zeros(4))
ridge = Logistic(matrix(4, 7), labels(4), mu=0.5)
HESSIANS: dict[str, tuple[Gram, NDArray[np.float64]]] = {
    "n <= d": (tall.gram, dense(tall, 1)),
    "d < n": (wide.gram, dense(wide, 1)),
    "d < n, regularised": (ridge.gram, dense(ridge, 0.25)),
}


# --- The steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HESSIANS)
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_the_closed_form_is_the_loop(name: str, steps: int) -> None:
    hessian, h = HESSIANS[name]
    n = len(h)
    x, gradient, dual = RNG.normal(size=(3, n))
    iterate, after = admm_steps(
        x, gradient, dual, hessian, num_clients=NUM_CLIENTS, sigma=SIGMA, steps=steps
    )
    expected = dual
    for _ in range(steps):  # (13), (14) as printed
        x_i = x - np.linalg.solve(h / NUM_CLIENTS + SIGMA * np.eye(n), gradient + expected)
        expected = expected + SIGMA * (x_i - x)
    np.testing.assert_allclose(iterate, x_i, rtol=0, atol=1e-12)
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-12)


def test_the_rule_of_the_server_is_the_loop_with_a_diagonal_matrix() -> None:
    h, n = 1.7, 6
    x, slope, dual = RNG.normal(size=(3, n))
    for steps in (1, 2, 5, 20):
        rule = FedGiARule(True, h, SIGMA, NUM_CLIENTS, steps, gram=False)
        row = rule.move(Row(z=x, pi=dual), slope, x)
        expected = dual
        for _ in range(steps):
            x_i = x - (slope / NUM_CLIENTS + expected) / (h / NUM_CLIENTS + SIGMA)
            expected = expected + SIGMA * (x_i - x)
        np.testing.assert_allclose(rule.copy(row), x_i, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row.z, x_i + expected / SIGMA, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row.pi, expected, rtol=0, atol=1e-12)


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
    # One function, whatever the seed of the round: no dropout, no change of the buffers
    again, _, _ = client.fit(*message(before, seed=1))
    for one, other in zip(reply, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


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
