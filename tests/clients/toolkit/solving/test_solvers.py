"""The proximal solver against steps done by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from clients.toolkit.data.batches import split_batch
from clients.toolkit.solving.objective import LocalObjective, ProximalTerm
from clients.toolkit.solving.solvers import (
    SGD,
    LocalProblem,
    descend_until,
    gradient_descent,
    sgd_of,
)
from tests.clients.methods.lines import half_square
from tests.support.federation import dataset, make_model
from tests.support.refusals import refused


class Scalar(nn.Module):
    """u * x, and a second parameter that the loss does not reach."""

    def __init__(self, u: float, idle: float = 0.0) -> None:
        super().__init__()
        self.u, self.idle = nn.Parameter(column(u)), nn.Parameter(column(idle))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.u * inputs


def problem_of(model: nn.Module, loader, loss_fn=half_square) -> LocalProblem:
    return LocalProblem(model, loader, loss_fn, split_batch, torch.device("cpu"))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def term(weight: float, **anchor: float) -> ProximalTerm:
    return ProximalTerm(weight, {name: column(value) for name, value in anchor.items()})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    ],
)
def test_steps_of_sgd_have_the_bits_of_torchs(options: dict[str, Any]) -> None:
    def torchs(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, **options)

    results = []
    for optimizer_fn in (partial(torch.optim.SGD, **options), torchs):
        model = make_model()
        loss = gradient_descent(
            problem_of(model, DataLoader(dataset(0), 8), nn.CrossEntropyLoss()),
            LocalObjective([ProximalTerm(0.3, {n: p + 1 for n, p in model.named_parameters()})]),
            lr=0.07,
            epochs=3,
            full_batch=False,
            optimizer_fn=optimizer_fn,
        )
        results.append([torch.tensor(loss), *model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert isinstance(sgd_of(0.1, partial(torch.optim.SGD, **options)), SGD)
    assert sgd_of(0.1, torchs) is None


@pytest.mark.parametrize("batch_size", [3, 2, 1])
def test_gradient_descent_takes_the_hand_computed_steps(batch_size: int) -> None:
    # x = (1, 1, 2), y = (1, 4, 2): f(u) = [(u-1)^2 + (u-4)^2 + (2u-2)^2] / 6,
    # f'(u) = (6u - 9) / 3 = 2u - 3. With (2/2)(u - 5)^2 the step is u - 0.1 (2u - 3 + 2u - 10)
    # = 0.6 u + 1.3: from 0 to 1.3, then to 2.08. f(1.3) = (0.09 + 7.29 + 0.36) / 6 = 1.29 is
    # reported: before the last step. A batch of any size must give the full gradient.
    data = TensorDataset(column(1, 1, 2), column(1, 4, 2))
    # f(0) = (1 + 16 + 4) / 6 = 3.5 is noted: before the first step.
    model, objective = Scalar(0.0), LocalObjective([term(2.0, u=5.0)])
    problem = problem_of(model, DataLoader(data, batch_size=batch_size))
    value = gradient_descent(problem, objective, lr=0.1, epochs=2, full_batch=True)
    assert model.u.item() == pytest.approx(2.08, abs=1e-14)
    assert value == pytest.approx(1.29, abs=1e-14)
    assert objective.first_loss == pytest.approx(3.5, abs=1e-14)


def test_mini_batches_take_a_proximal_step_each() -> None:
    # Batches (x, y) = (1, 1) and (2, 2), anchor 5 of weight 2, lr 0.1, from 0. Gradients u - 1 and
    # 2(2u - 2): u <- u - 0.1 (u - 1 + 2u - 10) = 0.7 u + 1.1 = 1.1 with loss 1/2 before it;
    # u <- u - 0.1 (4u - 4 + 2u - 10) = 0.4 u + 1.4 = 1.84 with loss (2.2 - 2)^2 / 2 = 0.02.
    model = Scalar(0.0)
    value = gradient_descent(
        problem_of(model, [(column(1), column(1)), (column(2), column(2))]),
        LocalObjective([term(2.0, u=5.0)]),
        lr=0.1,
        epochs=1,
        full_batch=False,
    )
    assert model.u.item() == pytest.approx(1.84, abs=1e-14)
    assert value == pytest.approx(0.26, abs=1e-14)


@pytest.mark.parametrize(
    ("full_batch", "size", "constant"),
    # From u = 2 the outputs are (2, 6), their mean 4, and the loss of 4 [(4 - 1)^2 + 0] / 4.
    [(False, 2, 2.25), (False, 1, math.nan), (True, 2, math.nan)],
)
def test_the_loss_of_a_constant_is_noted_before_the_first_step(
    full_batch: bool, size: int, constant: float
) -> None:
    loader = DataLoader(TensorDataset(column(1, 3, 5, 9), column(1, 4, 1, 1)), size)
    objective = LocalObjective()
    options = {"lr": 0.1, "epochs": 2, "full_batch": full_batch}
    gradient_descent(problem_of(Scalar(2.0), loader), objective, **options)
    assert objective.constant_loss == pytest.approx(constant, nan_ok=True)


@pytest.mark.parametrize("full_batch", [True, False])
def test_a_parameter_without_gradient_gets_only_the_pull(full_batch: bool) -> None:
    # idle: 3 -> 3 - 0.1 * 2 * (3 - 1) = 2.6 -> 2.6 - 0.2 * 1.6 = 2.28. Without a term it stays.
    for terms, expected in (([term(2.0, idle=1.0)], 2.28), ([], 3.0)):
        model = Scalar(0.0, idle=3.0)
        problem = problem_of(model, [(column(1), column(1))])
        gradient_descent(problem, LocalObjective(terms), lr=0.1, epochs=2, full_batch=full_batch)
        assert model.idle.item() == pytest.approx(expected, abs=1e-14)


def test_gradients_left_from_before_do_not_count() -> None:
    model = Scalar(0.0)
    model.u.grad = column(1000)
    problem = problem_of(model, [(column(1), column(1))])
    gradient_descent(problem, LocalObjective(), lr=0.1, epochs=1, full_batch=True)
    assert model.u.item() == pytest.approx(0.1, abs=1e-15)  # 0 - 0.1 (0 - 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(1.0, 1.0), (1.0, 4.0), (2.0, 2.0)])


def test_the_samples_of_a_loader_are_counted_and_one_that_yields_none_is_refused() -> None:
    data = TensorDataset(column(1, 2, 3), column(1, 2, 3))
    pairs = [(column(1, 2), column(1, 2)), (column(3), column(3))]
    for loader in (DataLoader(data, batch_size=2), DataLoader(Stream(), batch_size=2), pairs):
        assert problem_of(Scalar(0), loader).num_examples() == 3
    assert problem_of(Scalar(0), []).num_examples() == 0
    nothing = problem_of(Scalar(0), DataLoader(data, batch_size=4, drop_last=True))
    for full_batch in (True, False):
        with refused(ValueError, "drop_last=True"):
            gradient_descent(nothing, LocalObjective(), lr=0.1, epochs=1, full_batch=full_batch)


def test_the_full_gradient_is_that_of_the_samples_the_loader_yields() -> None:
    # drop_last leaves (1, 1), (1, 4): f(u) = [(u-1)^2 + (u-4)^2] / 4, f'(0) = -2.5, f(0) = 4.25.
    loader = DataLoader(
        TensorDataset(column(1, 1, 2), column(1, 4, 2)), batch_size=2, drop_last=True
    )
    model = Scalar(0.0)
    assert problem_of(model, loader).set_gradient() == pytest.approx(4.25)
    assert model.u.grad.item() == pytest.approx(-2.5)


# --- A weight of the loss, a block that moves, and the accuracy test ----------------------------


class Sum(nn.Module):
    """(u + v) x; the loss reaches both."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(column(1.0))
        self.v = nn.Parameter(column(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.u + self.v) * inputs


@pytest.mark.parametrize("full_batch", [True, False])
def test_only_the_block_that_moves_moves(full_batch: bool) -> None:
    # u = 1 stays; v <- v - 0.1 (1 + v - 5) = .9 v + .4 = 2.2 from 2. No term, and no momentum of
    # the optimiser's, moves u, and u can be trained again afterwards.
    model = Sum()
    problem = problem_of(model, [(column(1), column(5))])
    objective = LocalObjective([term(3.0, u=9.0)], moving=["v"])
    gradient_descent(problem, objective, lr=0.1, epochs=1, full_batch=full_batch)
    assert model.v.item() == pytest.approx(2.2, abs=1e-14)
    assert model.u.item() == 1.0
    assert model.u.grad is None
    assert model.u.requires_grad
    # u <- 1 - 0.1 (3.2 - 5) = 1.18; v at 2.2 stays.
    objective = LocalObjective(moving={"u"})
    gradient_descent(problem, objective, lr=0.1, epochs=1, full_batch=full_batch)
    assert (model.u.item(), model.v.item()) == pytest.approx((1.18, 2.2), abs=1e-14)


def test_a_frozen_parameter_stays_frozen_and_the_others_are_released_after_an_error() -> None:
    model = Sum()
    model.u.requires_grad_(False)
    problem = problem_of(model, [(column(1), column(5))])
    objective = LocalObjective(moving=["u", "v"])
    gradient_descent(problem, objective, lr=0.1, epochs=1, full_batch=True)
    assert model.u.item() == 1.0
    assert not model.u.requires_grad
    model.u.requires_grad_(True)
    objective = LocalObjective(moving=["v"])
    with pytest.raises(ValueError):  # noqa: PT011
        gradient_descent(problem_of(model, []), objective, lr=0.1, epochs=1, full_batch=True)
    assert model.u.requires_grad


def test_descend_until_the_gradient_of_the_whole_objective_is_small() -> None:
    # Over alpha = 1/4: f' + 8 (u - 5) = 9 u - 43, a step of .05 leaves .55 of it; the squares
    # over 16 are 115.5625 * .3025^k = 115.6, 34.96, 10.57, 3.199, .968 from u = 0: 1 after 4.
    def descend(model: Scalar, max_steps: int) -> dict[str, float]:
        problem = problem_of(model, [(column(1), column(3))])
        objective = LocalObjective([term(2.0, u=5.0)], loss_weight=0.25)
        return descend_until(problem, objective, tolerance=16.0, lr=0.05, max_steps=max_steps)

    model = Scalar(0.0)
    descent = descend(model, 50)
    u = 10.75 / 2.25 * (1 - 0.55**4)
    assert descent["steps"] == 4
    assert model.u.item() == pytest.approx(u, rel=1e-14)
    assert descent["residual"] == pytest.approx(16 * 115.5625 * 0.3025**4, rel=1e-12)
    assert descent["loss"] == pytest.approx((u - 3) ** 2 / 2, rel=1e-12)  # where it ended
    # What is good enough already is left as it is, and 2 steps get no further than they get.
    assert descend(model, 50)["steps"] == 0
    assert model.u.item() == pytest.approx(u, rel=1e-14)
    few = descend(Scalar(0.0), 2)
    assert (few["steps"], few["residual"]) == (2, pytest.approx(16 * 115.5625 * 0.3025**2))


def test_the_accuracy_test_looks_at_the_block_that_moves() -> None:
    # In v alone the gradient is 1 + v - 5, 0 at v = 4; the gradient in u does not count.
    model = Sum()
    problem = problem_of(model, [(column(1), column(5))])
    objective = LocalObjective([term(1.0, u=50.0)], moving=["v"])
    descent = descend_until(problem, objective, tolerance=1e-20, lr=1.0, max_steps=5)
    assert (descent["steps"], model.v.item(), model.u.item()) == (1, 4.0, 1.0)
