"""The client's half of FedGiA: its closed form of the local steps, its duals, what it refuses.

See docs/methods/fedgia.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from clients.toolkit.solving.curvature import (
    Curvature,
    DataLoss,
    LeastSquares,
    Logistic,
    MatrixFree,
    ScaledIdentity,
)
from fl_admm_strategies.algorithms.fedgia import FedGiAInstruction
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
HESSIANS: dict[str, tuple[Curvature, NDArray[np.float64]]] = {
    "n <= d": (tall.gram, dense(tall, 1)),
    "d < n": (wide.gram, dense(wide, 1)),
    "d < n, regularised": (ridge.gram, dense(ridge, 0.25)),
    "matrix-free": (MatrixFree(wide.matrix, 1 / 4, 0.2), dense(wide, 1) + 0.2 * np.eye(7)),
    "diagonal": (ScaledIdentity(1.7), 1.7 * np.eye(6)),
}


# --- The steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HESSIANS)
@pytest.mark.parametrize("steps", range(1, 21))
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


def test_very_many_steps_are_a_gradient_step() -> None:
    # P4: M^k0 -> 0, so pi_i -> -gradient and x_i -> x: (16), (17)
    x, gradient, dual = RNG.normal(size=(3, 5))
    iterate, after = admm_steps(
        x, gradient, dual, tall.gram, num_clients=NUM_CLIENTS, sigma=SIGMA, steps=5000
    )
    np.testing.assert_allclose(iterate, x, atol=1e-12)
    np.testing.assert_allclose(after, -gradient, atol=1e-12)


def test_the_number_of_clients_is_a_matter_of_scale() -> None:
    # pi' = m pi and sigma' = m sigma give x_i = x - (H + sigma')^-1 (grad f_i + pi'): no m in it
    x, gradient, dual = RNG.normal(size=(3, 5))
    first = admm_steps(x, gradient, dual, tall.gram, num_clients=1, sigma=SIGMA, steps=3)
    for m in (2, 50):
        iterate, after = admm_steps(
            x, gradient / m, dual / m, tall.gram, num_clients=m, sigma=SIGMA / m, steps=3
        )
        np.testing.assert_allclose(iterate, first[0], rtol=1e-12)
        np.testing.assert_allclose(m * after, first[1], rtol=1e-12)


@pytest.mark.slow
def test_a_large_matrix_takes_few_products_whatever_the_number_of_steps() -> None:
    """The eigenvalues of M lie in [0, 1/(1 + t)]: 40 products, where n is 600, are many."""

    class Counting:
        __array_ufunc__ = None  # so that numpy leaves y @ A to __rmatmul__
        count = 0

        def __matmul__(self, vector: Any) -> Any:
            Counting.count += 1
            return loss.matrix @ vector

        def __rmatmul__(self, vector: Any) -> Any:
            return vector @ loss.matrix

    loss = LeastSquares(matrix(700, 600), np.zeros(700))
    assert isinstance(loss.gram, MatrixFree)  # both sides above LARGEST_FACTOR
    x, gradient, dual = RNG.normal(size=(3, 600))
    sigma, counts = 0.15 * loss.largest_curvature(), []
    for steps in (1, 20):
        Counting.count = 0
        hessian = MatrixFree(Counting(), 1 / 700, 0.0)  # type: ignore[arg-type]
        admm_steps(x, gradient, dual, hessian, num_clients=1, sigma=sigma, steps=steps)
        counts.append(Counting.count)
    assert max(counts) <= 60


# --- The clients --------------------------------------------------------------------------------


def context() -> Context:
    return Context(1, 2, {"partition-id": 3, "num-partitions": 4}, RecordDict(), {})


def message(
    model: Arrays,
    *,
    trained: Sequence[str] = (),
    version: int = 0,
    server_round: int = 1,
    seed: int = 0,
    **changes: Any,
) -> Received:
    """Return a round's message; by default all is trained, in the gradient step."""
    usual = FedGiAInstruction(
        model, None, False, "diagonal", 2.0, SIGMA, NUM_CLIENTS, 3, False, False
    )
    instruction = replace(usual, **changes)
    names = [*model]
    if not instruction.keep_dual:
        names += [f"dual/{name}" for name in trained or model]
    common = {"version": version, "server_round": server_round, "seed": seed}
    return received(instruction, upload=names, **common)


def ones(size: int) -> Arrays:
    return {"x": np.ones(size)}


def test_the_gradient_group_by_hand() -> None:
    loss = LeastSquares([[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])  # gradient (1.5, 1), above
    reply, num_examples, metrics = FedGiALinearClient(context(), loss).fit(*message(ones(2)))
    np.testing.assert_allclose(reply[0], 1 - np.array([1.5, 1.0]) / NUM_CLIENTS / SIGMA)  # (18)
    np.testing.assert_allclose(reply[1], -np.array([1.5, 1.0]) / NUM_CLIENTS)  # (17)
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
    reply, _, _ = client.fit(*message(before, trained=trained))
    assert len(reply) == len(before) + len(trained)
    for (name, old), new in zip(before.items(), reply, strict=False):
        assert np.array_equal(old, new) == (name not in trained), name
        assert old.dtype == new.dtype
    # One function, whatever the seed of the round: no dropout, no change of the buffers
    again, _, _ = client.fit(*message(before, trained=trained, seed=1))
    for one, other in zip(reply, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_lost_dual_fails_in_the_admm_group_and_heals_in_the_other() -> None:
    client = FedGiALinearClient(context(), tall)
    keeping = {"keep_dual": True, "version": 4, "server_round": 5}
    with refused(ValueError, "round 4"):
        client.fit(*message(ones(5), admm=True, **keeping))
    client.fit(*message(ones(5), admm=False, **keeping))
    later = {"keep_dual": True, "version": 5, "server_round": 6}
    client.fit(*message(ones(5), admm=True, **later))


def test_what_a_client_refuses() -> None:
    with refused(ValueError, "(3,)", "5 numbers"):
        FedGiALinearClient(context(), tall).fit(*message(ones(3)))
    with refused(ValueError, "test_problem"):
        FedGiALinearClient(context(), tall).evaluate(list(ones(5).values()), GLOBAL)
    data = DataLoader(TensorDataset(torch.randn(8, 5), torch.randn(8, 1)))
    client = FedGiAClient(context(), nn.Linear(5, 1), data, nn.MSELoss())
    with refused(ValueError, "hessian='gram'"):
        client.fit(*message(client.arrays(), hessian="gram"))


def test_evaluation() -> None:
    loss = LeastSquares([[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])
    client = FedGiALinearClient(context(), LeastSquares(np.eye(2), np.zeros(2)), loss)
    value, num_examples, metrics = client.evaluate(list(ones(2).values()), GLOBAL)
    assert (value, num_examples) == (pytest.approx(1.25), 2)
    rmse = pytest.approx(2.5**0.5)
    assert metrics == {"global-loss": value, "global-rmse": rmse, **made_by("FedGiA")}
