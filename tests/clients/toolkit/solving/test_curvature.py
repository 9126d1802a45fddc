"""The losses with a known curvature, their Gram matrices, and the curvature of any loss.

See docs/methods/fedgia-notes.md, P8, P10 and P16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients.toolkit.data.batches import split_batch
from clients.toolkit.solving.curvature import DataLoss, LeastSquares, Logistic
from clients.toolkit.solving.hessian import largest_curvature
from clients.toolkit.solving.solvers import LocalProblem
from tests.clients.methods.lines import labels, matrix
from tests.support.refusals import refused

RNG = np.random.default_rng(5)


tall = LeastSquares(matrix(9, 5), np.zeros(9))
wide = LeastSquares(matrix(4, 7), np.zeros(4))
ridge = Logistic(matrix(4, 7), labels(4), mu=0.5)


# --- Losses -------------------------------------------------------------------------------------


def test_least_squares_by_hand() -> None:
    # A x - b = (1, 2) at x = (1, 1): f = 5/4, grad = A'(1, 2)/2 = (3, 2)/2, A'A = [[2, 0], [0, 1]]
    loss = LeastSquares([[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])
    value, gradient = loss.value_and_gradient(np.ones(2))
    assert value == pytest.approx(1.25)
    np.testing.assert_allclose(gradient, [1.5, 1.0])
    # ||A'A|| = (3 + sqrt 5)/2, the golden ratio squared
    assert loss.largest_curvature() == pytest.approx((3 + 5**0.5) / 4)
    assert loss.metrics(np.ones(2)) == {"rmse": pytest.approx(2.5**0.5)}


@pytest.mark.parametrize(("scaling", "reg"), [("per_sample", 0.6 / 2), ("full", 0.6)])
def test_logistic_by_hand(scaling: Any, reg: float) -> None:
    # A x = (ln 3, 0): sigmoid (3/4, 1/2), ln(1 + e^u) = (ln 4, ln 2)
    loss = Logistic([[np.log(3)], [0.0]], [1, 0], mu=0.6, reg_scaling=scaling)
    value, gradient = loss.value_and_gradient(np.ones(1))
    assert value == pytest.approx((np.log(4) - np.log(3) + np.log(2)) / 2 + reg / 2)
    np.testing.assert_allclose(gradient, [-np.log(3) / 4 / 2 + reg])
    assert loss.largest_curvature() == pytest.approx(np.log(3) ** 2 / 8 + reg)
    assert loss.metrics(np.ones(1)) == {"accuracy": 1.0}


@pytest.mark.parametrize("loss", [tall, Logistic(matrix(9, 5), labels(9))])
def test_the_mean_over_parts_of_equal_size_is_the_whole(loss: DataLoss) -> None:
    x, rows = RNG.normal(size=loss.size), RNG.permutation(9).reshape(3, 3)
    values, gradients = zip(*(loss.value_and_gradient(x, part) for part in rows), strict=True)
    value, gradient = loss.value_and_gradient(x)
    assert np.mean(values) == pytest.approx(value, rel=1e-13)
    np.testing.assert_allclose(np.mean(gradients, axis=0), gradient, rtol=1e-12)


def test_logistic_does_not_overflow() -> None:
    value, gradient = Logistic([[1000.0], [-1000.0]], [1, 1], mu=0.0).value_and_gradient(np.ones(1))
    assert value == pytest.approx(500.0)
    np.testing.assert_allclose(gradient, [500.0])


@pytest.mark.parametrize("loss", [tall, wide, ridge, Logistic(matrix(9, 5), labels(9))])
def test_the_gradient_is_lipschitz_with_the_reported_curvature(loss: DataLoss) -> None:
    # (21) with Theta = H_i: f(x) <= f(z) + <grad f(z), x - z> + |x - z|_H^2 / 2, and H <= r I
    for _ in range(20):
        x, z = RNG.normal(size=(2, loss.size))
        (f_x, g_x), (f_z, g_z) = loss.value_and_gradient(x), loss.value_and_gradient(z)
        values, basis = loss.gram
        image = ((values - loss.reg) * (basis @ (x - z))) @ basis + loss.reg * (x - z)
        assert f_x <= f_z + g_z @ (x - z) + (x - z) @ image / 2 + 1e-12
        distance = np.linalg.norm(x - z)
        assert np.linalg.norm(g_x - g_z) <= loss.largest_curvature() * distance + 1e-12


# --- Bad data -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "targets", "named"),
    [
        (np.ones(3), np.ones(3), "matrix"),
        (np.ones((3, 2)), np.ones(2), "2 targets"),
        (np.ones((0, 2)), np.ones(0), "(0, 2)"),
        ([[1.0, 2.0], [np.nan, np.inf]], np.ones(2), "2 of 4"),
        (np.ones((2, 2)), [0.0, np.inf], "targets"),
    ],
)
def test_bad_data(data: Any, targets: Any, named: str) -> None:
    with refused(ValueError, named):
        LeastSquares(data, targets)


# --- Any loss -----------------------------------------------------------------------------------


def torch_problem(loss: DataLoss, model: nn.Module, loss_fn: Any) -> LocalProblem:
    data = TensorDataset(torch.tensor(loss.matrix), torch.tensor(loss.targets))
    return LocalProblem(model, DataLoader(data, 4), loss_fn, split_batch, torch.device("cpu"))


class Linear(nn.Linear):
    """x -> <a, x>, in float64 and without intercept."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


def test_the_largest_curvature_is_found() -> None:
    # At x = 0 every sample of the logistic loss has l'' = 1/4, its maximum
    loss = Logistic(matrix(30, 5), labels(30), mu=0.0)
    problem = torch_problem(loss, Linear(5), nn.BCEWithLogitsLoss())
    estimate = largest_curvature(problem, seed=3, tolerance=1e-9)
    assert estimate == pytest.approx(loss.largest_curvature(), rel=1e-8)
    assert estimate == largest_curvature(problem, seed=3, tolerance=1e-9)
    for seed in range(8):  # from above, by at most the tolerance
        ratio = largest_curvature(problem, seed) / loss.largest_curvature()
        assert 1 - 1e-9 <= ratio <= 1.001


def spectrum(values: Sequence[float]) -> LocalProblem:
    """f = 1/2 sum_k values_k x_k^2 as a loss of a linear model."""
    weights = torch.tensor(values)
    model = nn.Linear(len(values), 1, bias=False)
    return LocalProblem(
        model,
        [(torch.eye(len(values)), torch.zeros(len(values)))],
        lambda outputs, _: 0.5 * (weights * outputs[:, 0] ** 2).sum(),
        split_batch,
        torch.device("cpu"),
    )


def test_two_curvatures_of_opposite_sign_and_like_size_are_told_apart() -> None:
    """Power iteration rests between them: 200 products find 1 where it is 1.03."""
    rest = np.linspace(-0.5, 0.5, 200)
    for values in ([-1.0, 1.03], [1.0, -1.03]):
        for seed in range(5):
            found = largest_curvature(spectrum([*values, *rest]), seed)
            assert 1.03 - 1e-6 <= found <= 1.03 * 1.001


@pytest.mark.parametrize("wrong", ["linear", "infinite"])
def test_a_loss_without_curvature_is_refused(wrong: str) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        difference = (outputs - targets).mean()
        return difference if wrong == "linear" else (difference * 1e200) ** 2

    problem = torch_problem(tall, Linear(5), loss)
    with refused(ValueError, "curvature"):
        largest_curvature(problem, seed=0)
