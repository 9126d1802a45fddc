"""One step function for a client alone and for a stack, on any device."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients import Minibatches
from clients.toolkit.data.batches import split_batch
from clients.toolkit.solving.alike import stack_of
from clients.toolkit.solving.objective import (
    LinearTerm,
    LocalObjective,
    ProjectedTerm,
    ProximalTerm,
)
from clients.toolkit.solving.solvers import Epoch, LocalProblem, descend
from clients.toolkit.solving.stack import Samples, Stack

FEATURES, CLASSES = 6, 3
SIZES = (13, 7, 1)  # those with the most batches first


def model_of(client: int, device: str = "cpu") -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(client)
        layers = nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, CLASSES)
        return nn.Sequential(*layers).double().to(device)


def data_of(client: int, device: str = "cpu") -> Epoch:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(SIZES[client], FEATURES, generator=generator, dtype=torch.float64).to(device)
    y = torch.arange(SIZES[client]).to(device) % CLASSES
    whole, rest = divmod(SIZES[client], 4)
    return Epoch(x, y, [4] * whole + [rest] * bool(rest), None)


@cache
def matrix_of(count: int, device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 2 * count, dtype=torch.float64, device=device).view(2, -1) / count


def objective_of(client: int, own: dict[str, nn.Parameter], moving: Any = None) -> LocalObjective:
    """Return an objective with terms of every kind, those of a client."""
    anchors = {name: p.detach() + 0.1 for name, p in own.items()}
    slopes = {"0.weight": torch.full_like(anchors["0.weight"], 0.02)}
    count = sum(anchor.numel() for anchor in anchors.values())
    matrix = matrix_of(count, anchors["0.weight"].device)
    target = matrix.new_ones(2) * client
    terms = [
        ProximalTerm(0.5 + client, anchors),
        LinearTerm(0.3 + client, slopes),
        *(ProjectedTerm(0.4, matrix, target, list(anchors), power) for power in (1, 2)),
    ]
    if moving is not None:
        terms = terms[:2]
    return LocalObjective(terms, loss_weight=0.5 + client, moving=moving)


def in_a_stack(device: str, moving: Any = None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    models = [model_of(client, device) for client in range(3)]
    owns = [dict(model.named_parameters()) for model in models]
    objectives = [objective_of(client, own, moving) for client, own in enumerate(owns)]
    parameters = stack_of(owns)
    epochs = [data_of(client, device) for client in range(3)]
    samples = Samples(epochs, options["full_batch"], torch.float64)
    stack = Stack(
        models[0],
        nn.CrossEntropyLoss(),
        parameters,
        [7, 8, 9],
        lambda _: samples.batches([7, 8, 9] if device == "meta" else [None] * 3),
    )
    return parameters, descend(stack, LocalObjective.stacked(objectives), **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": {"full_batch": True},
    "momentum": {"optimizer_fn": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)},
    "clipping": {"max_grad_norm": 0.3},
    "a block": {"moving": ["3.weight", "3.bias"]},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_steps_of_a_stack_are_those_of_each_client(kind: str) -> None:
    options = {"lr": 0.1, "epochs": 3, "full_batch": False, **OPTIONS[kind]}
    found, (firsts, lasts, constants) = in_a_stack("cpu", **options)
    moving = options.pop("moving", None)
    for client in range(3):
        model, epoch = model_of(client), data_of(client)
        own = dict(model.named_parameters())
        before = {name: p.detach().clone() for name, p in own.items()}
        sizes = list(epoch.sizes)
        loader = list(zip(epoch.inputs.split(sizes), epoch.targets.split(sizes), strict=True))
        problem = LocalProblem(
            model, loader, nn.CrossEntropyLoss(), split_batch, torch.device("cpu"), 7 + client
        )
        first, last, constant = descend(problem, objective_of(client, own, moving), **options)
        torch.testing.assert_close(firsts[client], first, rtol=1e-12, atol=0)
        torch.testing.assert_close(lasts[client], last, rtol=1e-12, atol=0)
        torch.testing.assert_close(constants[client], constant, rtol=1e-12, atol=0, equal_nan=True)
        assert constant.isnan() == (options["full_batch"] or SIZES[client] == 1)
        for name, parameter in own.items():
            torch.testing.assert_close(found[name][client], parameter, rtol=1e-11, atol=1e-13)
            moved = moving is None or name in moving
            assert torch.equal(parameter, before[name]) != moved


@pytest.mark.parametrize("full_batch", [False, True])
def test_nothing_leaves_the_device_inside_a_descent(full_batch: bool) -> None:
    """On the device "meta", of whose tensors nothing can be read."""
    options = {"lr": 0.1, "epochs": 2, "full_batch": full_batch, "max_grad_norm": 1.0}
    found, losses = in_a_stack("meta", optimizer_fn=OPTIONS["momentum"]["optimizer_fn"], **options)
    assert all(tensor.is_meta for tensor in [*found.values(), *losses])
    model, (x, y, *_) = model_of(0, "meta"), data_of(0, "meta")
    problem = LocalProblem(
        model, Minibatches(x, y, 4), nn.CrossEntropyLoss(), split_batch, torch.device("meta"), 7
    )
    losses = descend(problem, objective_of(0, dict(model.named_parameters())), **options)
    assert all(tensor.is_meta for tensor in losses)
    with pytest.raises(RuntimeError, match="meta"):
        float(losses[0])
