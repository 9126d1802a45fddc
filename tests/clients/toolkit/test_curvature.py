"""The losses with a known curvature, their Gram matrices, and the curvature of any loss.

See docs/methods/fedgia.md, P8, P10 and P16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients.toolkit import curvature as module
from clients.toolkit.batches import split_batch
from clients.toolkit.curvature import (
    DataLoss,
    FactorCache,
    LeastSquares,
    Logistic,
)
from clients.toolkit.power_iteration import power_iteration
from clients.toolkit.solvers import LocalProblem

RNG = np.random.default_rng(5)


def matrix(rows: int, columns: int) -> NDArray[np.float64]:
    return np.random.default_rng(rows).normal(size=(rows, columns))


def labels(rows: int) -> NDArray[np.float64]:
    return np.random.default_rng(rows).integers(0, 2, rows).astype(float)


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


def test_logistic_does_not_overflow() -> None:
    loss = Logistic([[1000.0], [-1000.0]], [1, 1], mu=0.0)
    value, gradient = loss.value_and_gradient(np.ones(1))
    assert value == pytest.approx(500.0)
    np.testing.assert_allclose(gradient, [500.0])


@pytest.mark.parametrize("loss", [tall, wide, ridge, Logistic(matrix(9, 5), labels(9))])
def test_the_gradient_is_lipschitz_with_the_reported_curvature(loss: DataLoss) -> None:
    # (21) with Theta = H_i: f(x) <= f(z) + <grad f(z), x - z> + |x - z|_H^2 / 2, and H <= r I
    for _ in range(20):
        x, z = RNG.normal(size=(2, loss.size))
        (f_x, g_x), (f_z, g_z) = loss.value_and_gradient(x), loss.value_and_gradient(z)
        (image,) = loss.gram.apply(x - z, [lambda h: h])
        assert f_x <= f_z + g_z @ (x - z) + (x - z) @ image / 2 + 1e-12
        distance = np.linalg.norm(x - z)
        assert np.linalg.norm(g_x - g_z) <= loss.largest_curvature() * distance + 1e-12


# --- The cache ----------------------------------------------------------------------------------


def test_a_factor_is_found_again_by_content_and_never_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, decompositions = FactorCache(10**6), []
    monkeypatch.setattr(module, "FACTOR_CACHE", cache)
    svd = np.linalg.svd
    monkeypatch.setattr(np.linalg, "svd", lambda *a, **k: decompositions.append(1) or svd(*a, **k))
    data = matrix(9, 5)

    def image(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        x = np.ones(rows.shape[1])
        (result,) = LeastSquares(rows, np.zeros(len(rows))).gram.apply(x, [lambda h: h])
        np.testing.assert_allclose(result, rows.T @ (rows @ x) / len(rows), atol=1e-12)
        return result

    image(data)
    image(data.copy())  # a client that was made anew with data that were read anew
    assert len(decompositions) == 1
    loss = LeastSquares(data, np.zeros(9))
    data[3, 2] += 1.0  # in place: the same array object
    image(data)
    image(data.reshape(15, 3))  # the same bytes
    assert len(decompositions) == 3
    assert loss.matrix[3, 2] != data[3, 2]  # a loss holds a copy of its own
    with pytest.raises(ValueError, match="read-only"):
        loss.matrix[0, 0] = 0.0


def test_the_cache_is_bounded() -> None:
    cache = FactorCache(most_bytes=3 * (5 + 25) * 8)
    matrices = [matrix(rows, 5) for rows in range(6, 12)]
    for each in matrices:
        cache.factor(each)
    assert cache.num_bytes <= cache.most_bytes
    _, kept = cache.factor(matrices[-1])
    assert cache.factor(matrices[-1])[1] is kept


# --- Bad data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_matrix_with_nan_is_refused(value: float) -> None:
    data = matrix(9, 5)
    data[3, 2] = data[4, 1] = value
    with pytest.raises(ValueError, match=r"in 2 of 45 entries, the first at \[3, 2\]"):
        LeastSquares(data, np.zeros(9))
    with pytest.raises(ValueError, match=r"targets holds NaN or infinity .* at \[1\]"):
        LeastSquares(matrix(2, 5), [0.0, value])


def test_zero_and_constant_columns_are_named() -> None:
    data = matrix(9, 5)
    data[:, 1], data[:, 3], data[:, 4] = 0.0, 2.0, 2.0
    loss = LeastSquares(data, np.ones(9))
    assert loss.zero_columns == [1]
    assert loss.constant_columns == [3, 4]
    assert loss.value_and_gradient(RNG.normal(size=5))[1][1] == 0.0


@pytest.mark.parametrize(
    ("data", "targets", "message"),
    [
        (np.zeros((3, 2)), np.ones(3), "All 3 x 2 entries of the data matrix are zero"),
        (np.ones(3), np.ones(3), "matrix has shape .*, expected 2 dimension"),
        (np.ones((3, 2)), np.ones(2), "2 targets for a data matrix of shape"),
        (np.ones((0, 2)), np.ones(0), "expected at least one sample"),
    ],
)
def test_bad_shapes(data: Any, targets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LeastSquares(data, targets)


def test_bad_logistic_settings() -> None:
    data = np.ones((3, 2))
    with pytest.raises(ValueError, match=r"hold -1, 2, expected 0 and 1 only.*\(b \+ 1\) / 2"):
        Logistic(data, [-1, 1, 2])
    with pytest.raises(ValueError, match="mu is -1"):
        Logistic(data, [0, 1, 1], mu=-1)
    with pytest.raises(ValueError, match="reg_scaling is 'half'"):
        Logistic(data, [0, 1, 1], reg_scaling="half")  # type: ignore[arg-type]


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


def test_power_iteration_finds_the_largest_curvature() -> None:
    # At x = 0 every sample of the logistic loss has l'' = 1/4, its maximum
    loss = Logistic(matrix(30, 5), labels(30), mu=0.0)
    problem = torch_problem(loss, Linear(5), nn.BCEWithLogitsLoss())
    estimate = power_iteration(problem, seed=3, tolerance=1e-9, most=1000)
    assert estimate == pytest.approx(loss.largest_curvature(), rel=1e-6)
    assert estimate == power_iteration(problem, seed=3, tolerance=1e-9, most=1000)


def test_power_iteration_counts_a_negative_curvature() -> None:
    # f = 1/2 (x_1^2 - 3 x_2^2): the gradient is Lipschitz with 3
    model = nn.Linear(2, 1, bias=False)
    problem = LocalProblem(
        model,
        [(torch.eye(2), torch.zeros(2))],
        lambda out, _: 0.5 * (out[0, 0] ** 2 - 3 * out[1, 0] ** 2),
        split_batch,
        torch.device("cpu"),
    )
    assert power_iteration(problem, seed=0) == pytest.approx(3.0, rel=1e-3)


def test_a_loss_without_curvature_is_refused() -> None:
    problem = torch_problem(tall, Linear(5), lambda outputs, targets: (outputs - targets).mean())
    with pytest.raises(ValueError, match=r"curvature 0.*curvature=\.\.\."):
        power_iteration(problem, seed=0)
