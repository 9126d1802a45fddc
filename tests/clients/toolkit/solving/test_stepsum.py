"""The sum of a round's step sizes: by hand, measured in loops of one's own, and in a stack."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FedADMMClient
from clients.toolkit.solving.cohort import train_together
from clients.toolkit.solving.stepsum import sum_of_steps
from fl_admm_strategies.algorithms.fedadmm import FedADMMRule
from fl_admm_strategies.algorithms.shared.consensus import ProximalInstruction
from tests.clients.methods.lines import new_context
from tests.clients.methods.messages import received

LR, EPOCHS, BATCHES = 0.05, 4, 5
COUNT = EPOCHS * BATCHES


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loader(batches: int = BATCHES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8 * batches, 5, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def job(
    client_class: Any = FedADMMClient,
    *,
    wanted: bool = True,
    rho: float = 0.1,
    batches: int = BATCHES,
    **options: Any,
) -> Any:
    """Return a client, and the first message of a strategy that seeks rho."""
    client = client_class(
        new_context(), network(), loader(batches), nn.CrossEntropyLoss(), **options
    )
    asked = ProximalInstruction(
        model=client.arrays(),
        start={},
        rule=FedADMMRule(published=False, rho=rho, share=1.0).text(),
        duals="strategy",
        optimised=list(client.arrays()),
        lr=LR,
        local_epochs=EPOCHS,
        wants_step_sum=wanted,
    )
    return client, *received(asked)


def reported(client_class: Any = FedADMMClient, **options: Any) -> float:
    client, arrays, config = job(client_class, **options)
    metrics = client.fit(arrays, config)[2]
    return float(metrics.get("step-sum", math.nan))


class OwnLoop(FedADMMClient):
    """A loop of one's own, with momentum if it is told."""

    momentum = 0.0
    scale = 1.0

    def minimise(self, objective: Any, *, lr: float, epochs: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=self.momentum)
        for _ in range(epochs):
            for x, y in self.train_loader:
                optimizer.zero_grad()
                self.step(objective, nn.functional.cross_entropy(self.model(x), y))
                optimizer.step()
        return {}

    def step(self, objective: Any, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        objective.add_gradient(self.model)


class WithPenalty(OwnLoop):
    """It adds the penalty to its loss, which it scales as a `GradScaler` does."""

    def step(self, objective: Any, loss: torch.Tensor) -> None:
        total = self.scale * (loss + objective.penalty(self.model))
        total.backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            parameter.grad /= self.scale


class Scaled(WithPenalty):
    scale = 2.0**10


def test_the_sum_by_hand() -> None:
    # A gradient of 1 in each of three steps of .1: momentum 1/2 carries the first one .1 + .05 +
    # .025 far, the second .15 and the last .1.
    assert sum_of_steps(0.1, 0.0, 3) == pytest.approx(0.3)
    assert sum_of_steps(0.1, 0.5, 3) == pytest.approx(0.175 + 0.15 + 0.1)
    assert sum_of_steps(0.1, 0.9, 10_000) == pytest.approx(10_000, rel=0.01)


def test_a_client_says_it_where_it_is_asked() -> None:
    assert reported() == pytest.approx(LR * COUNT)
    assert reported(full_batch=True) == pytest.approx(LR * EPOCHS)
    heavy = partial(torch.optim.SGD, momentum=0.9)
    assert reported(optimizer_fn=heavy) == pytest.approx(sum_of_steps(LR, 0.9, COUNT))
    assert math.isnan(reported(wanted=False))


@pytest.mark.parametrize("own", [OwnLoop, WithPenalty, Scaled])
def test_it_is_measured_in_a_loop_of_ones_own(own: Any) -> None:
    assert reported(own) == pytest.approx(LR * COUNT, rel=1e-4)


@pytest.mark.parametrize("own", [OwnLoop, Scaled])
def test_momentum_is_measured_with_it(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The gradients fall in the round and the early ones count most, so it is somewhat more.
    monkeypatch.setattr(own, "momentum", 0.9)
    assert reported(own) == pytest.approx(sum_of_steps(LR, 0.9, COUNT), rel=0.3)


def test_steps_that_are_no_plain_ones_are_measured() -> None:
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    expected = LR * BATCHES * (1 + 0.5 + 0.25 + 0.125)
    assert reported(scheduler_fn=halved) == pytest.approx(expected, rel=0.1)
    assert 0 < reported(max_grad_norm=0.01) < 0.5 * LR * COUNT
    assert reported(optimizer_fn=torch.optim.Adam) > 0


@pytest.mark.parametrize(
    "options", [{}, {"optimizer_fn": partial(torch.optim.SGD, momentum=0.9)}, {"max_grad_norm": 1}]
)
def test_in_a_stack_it_is_what_it_is_alone(options: dict[str, Any]) -> None:
    jobs = [job(**options), job(batches=3, **options), job(**options)]
    sums = [reply[2]["step-sum"] for reply in train_together(jobs, True)]
    expected = [reported(batches=batches, **options) for batches in (BATCHES, 3, BATCHES)]
    assert sums == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("client_class", [FedADMMClient, OwnLoop, WithPenalty])
def test_a_loop_of_ones_own_takes_the_same_steps_whatever_measures_it(client_class: Any) -> None:
    client, arrays, config = job(client_class)
    other, *message = job(wanted=False)
    for one, theirs in zip(client.fit(arrays, config)[0], other.fit(*message)[0], strict=True):
        assert one == pytest.approx(theirs, abs=1e-6)
