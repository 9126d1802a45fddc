"""The outputs of frozen first layers, computed once: same result, and only where that is exact."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clients import FedAPMClient, Minibatches
from clients.toolkit.data.batches import split_batch
from clients.toolkit.round import torch_client
from clients.toolkit.solving import features
from clients.toolkit.solving.features import frozen_layers_applied
from clients.toolkit.solving.objective import LocalObjective, ProximalTerm
from clients.toolkit.solving.solvers import LocalProblem
from clients.toolkit.solving.steps import Minimisation
from tests.clients.methods.lines import new_context

N, EPOCHS = 24, 3


def network(*more: nn.Module, first: nn.Module | None = None, frozen: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    first = first or nn.Conv2d(1, 4, 3)
    for parameter in first.parameters():
        parameter.requires_grad_(not frozen)
    tail = (nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), *more, *tail)


def in_memory() -> Minibatches:
    generator = torch.Generator().manual_seed(1)
    return Minibatches(torch.randn(N, 1, 8, 8, generator=generator), torch.arange(N) % 3, 8)


def v_step(full_batch: bool) -> tuple[list[Tensor], int, Any]:
    """Take FedAPM's v-step; return v, how often the convolution was computed, and the metrics."""
    torch.manual_seed(4)
    calls, conv = [], nn.Conv2d(1, 4, 3)
    forward = conv.forward
    model = network(first=conv, frozen=False)
    conv.forward = lambda x: calls.append(1) or forward(x)  # type: ignore[func-returns-value,method-assign]
    client = FedAPMClient(
        new_context(), model, in_memory(), nn.CrossEntropyLoss(), full_batch=full_batch
    )
    personal = {name: p.detach().clone() for name, p in [*model.named_parameters()][2:]}
    objective = LocalObjective([ProximalTerm(0.5, personal)], moving=[*personal])
    torch.manual_seed(5)
    metrics = client.perform(Minimisation(objective, 0.1, EPOCHS))
    return [model.get_parameter(name).detach() for name in personal], len(calls), metrics


@pytest.mark.parametrize("full_batch", [False, True])
def test_the_personal_phase_computes_shared_features_once(
    full_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, calls, metrics = v_step(full_batch)
    assert calls == N // 8
    monkeypatch.setattr(torch_client, "frozen_layers_applied", lambda problem: problem)
    old, calls, expected = v_step(full_batch)
    assert calls == EPOCHS * N // 8
    assert metrics == pytest.approx(expected, rel=1e-6)
    for one, other in zip(new, old, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda *_: None)
    return model


UNCHANGED: dict[str, Any] = {
    "dropout": {"model": network(nn.Dropout(0.5))},
    "batch norm": {"model": network(nn.BatchNorm2d(4, affine=False))},
    "trained": {"model": network(frozen=False)},
    "nothing to compute": {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 3))},
    "nested": {"model": nn.Sequential(network())},
    "hooks": {"model": hooked()},
    "another class": {"model": nn.DataParallel(network())},
    "a DataLoader": {"loader": DataLoader(in_memory().dataset, 8)},
    "a split of its own": {"split_batch": partial(split_batch)},
}


@pytest.mark.parametrize("kind", UNCHANGED)
def test_where_it_is_not_exact_or_does_not_pay_nothing_changes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"model": network(), "loader": in_memory(), "split_batch": split_batch}
    device, loss_fn = torch.device("cpu"), nn.CrossEntropyLoss()
    problem = LocalProblem(loss_fn=loss_fn, device=device, **(given | UNCHANGED[kind]))
    assert frozen_layers_applied(problem) is problem
    applied = frozen_layers_applied(LocalProblem(loss_fn=loss_fn, device=device, **given))
    assert len(applied.model) == 3  # type: ignore[arg-type]
    monkeypatch.setattr(features, "MOST_BYTES", 1000)
    problem = LocalProblem(loss_fn=loss_fn, device=device, **given)
    assert frozen_layers_applied(problem) is problem
