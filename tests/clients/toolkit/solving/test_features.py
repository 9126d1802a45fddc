"""The outputs of frozen first layers, computed once: same result, and only where that is exact."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from clients import FedAPMClient, Minibatches
from clients.toolkit.data.batches import split_batch
from clients.toolkit.round import torch_client
from clients.toolkit.solving import features
from clients.toolkit.solving.features import frozen_layers_applied
from clients.toolkit.solving.objective import LocalObjective, ProximalTerm
from clients.toolkit.solving.solvers import LocalProblem
from clients.toolkit.solving.steps import Minimisation

N, EPOCHS = 24, 3


def network(*, first: nn.Module | None = None, more: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=first or nn.Conv2d(1, 4, 3), relu=nn.ReLU(), pool=nn.MaxPool2d(2)
    )
    if more is not None:
        layers["more"] = more
    layers |= {"flatten": nn.Flatten(), "fc1": nn.Linear(36, 8), "tanh": nn.Tanh()}
    return nn.Sequential(layers | {"fc2": nn.Linear(8, 3)})


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 1, 8, 8, generator=generator), torch.arange(N) % 3


LOADERS = {
    "list": lambda: [*zip(*(part.split(8) for part in samples()), strict=True)],
    "in memory": lambda: Minibatches(*samples(), 8),
}


def problem(model: nn.Module, loader: Any) -> LocalProblem:
    return LocalProblem(model, loader, nn.CrossEntropyLoss(), split_batch, torch.device("cpu"))


def freeze(model: nn.Module, name: str = "conv") -> nn.Module:
    for parameter in model.get_submodule(name).parameters():
        parameter.requires_grad_(False)
    return model


def v_step(loader: Any, full_batch: bool) -> tuple[list[Tensor], int, Any]:
    """Take FedAPM's v-step; return v, how often the convolution was computed, and the metrics."""
    torch.manual_seed(4)
    calls, conv = [], nn.Conv2d(1, 4, 3)
    forward = conv.forward
    conv.forward = lambda x: calls.append(1) or forward(x)  # type: ignore[func-returns-value,method-assign]
    model = network(first=conv)
    context = Context(1, 2, {}, RecordDict(), {})
    client = FedAPMClient(context, model, loader, nn.CrossEntropyLoss(), full_batch=full_batch)
    personal = {name: p.detach().clone() for name, p in model.named_parameters() if "fc" in name}
    objective = LocalObjective([ProximalTerm(0.5, personal)], moving=[*personal])
    torch.manual_seed(5)
    metrics = client.perform(Minimisation(objective, 0.1, EPOCHS))
    return [model.get_parameter(name).detach() for name in personal], len(calls), metrics


@pytest.mark.parametrize("full_batch", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_the_personal_phase_computes_shared_features_once_and_ends_at_the_same_bits(
    loader: str, full_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, calls, metrics = v_step(LOADERS[loader](), full_batch)
    assert calls == N // 8
    monkeypatch.setattr(torch_client, "frozen_layers_applied", lambda problem: problem)
    old, calls, expected = v_step(LOADERS[loader](), full_batch)
    assert calls == EPOCHS * N // 8
    assert metrics == expected
    assert all(torch.equal(one, other) for one, other in zip(new, old, strict=True))


@pytest.mark.parametrize(
    "model",
    [
        freeze(network(more=nn.Dropout(0.5))),
        freeze(network(more=nn.BatchNorm2d(4, affine=False))),
        freeze(network(first=nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3)))),
        network(),  # all is trained
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),  # nothing to compute in front
        nn.Sequential(OrderedDict(net=freeze(network()))),  # one layer, part of it frozen
    ],
    ids=["dropout", "batch norm", "parametrised", "trained", "no parameters", "nested"],
)
def test_where_it_would_not_be_exact_or_not_pay_nothing_changes(model: nn.Module) -> None:
    for loader in LOADERS.values():
        unchanged(problem(model, loader()))


def unchanged(whole: LocalProblem) -> None:
    assert frozen_layers_applied(whole) is whole


def test_hooks_other_models_other_loaders_and_large_features_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooked = freeze(network())
    hooked.get_submodule("conv").register_forward_hook(lambda *a: None)
    data = torch.utils.data.TensorDataset(*samples())
    unchanged(problem(hooked, LOADERS["list"]()))
    unchanged(problem(nn.DataParallel(freeze(network())), LOADERS["list"]()))
    unchanged(problem(freeze(network()), torch.utils.data.DataLoader(data, 8)))
    in_memory = problem(freeze(network()), LOADERS["in memory"]())
    unchanged(replace(in_memory, split_batch=partial(split_batch)))  # a split of one's own
    monkeypatch.setattr(features, "MOST_BYTES", 1000)
    for loader in LOADERS.values():
        unchanged(problem(freeze(network()), loader()))
