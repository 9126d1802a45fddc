"""The outputs of a model's frozen first layers, computed once for several epochs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..data import batches
from ..data.minibatches import Minibatches
from .solvers import LocalProblem

STATELESS: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten),
        *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
        *(nn.LayerNorm, nn.GroupNorm),
    }
)
"""Layers with the same output for a sample every time: no dropout, no batch statistics."""
MOST_BYTES = 256 * 2**20
"""Features that would take more memory (256 MiB) are computed again in every epoch."""


def frozen_layers_applied(problem: LocalProblem) -> LocalProblem:
    """Return the problem of a model's remaining layers, on what its frozen first layers make.

    That is done where it is exact and cheap: the model is an `nn.Sequential`, its first layers have
    no parameter with ``requires_grad`` and are all `STATELESS`, and the data are `Minibatches`.
    Features may differ from those of an epoch's batches in the last bits. Otherwise the problem is
    returned as it is.

    The layers are the model's own: to train them is to train it.
    """
    model, loader = problem.model, problem.loader
    if type(model) is not nn.Sequential or not isinstance(loader, Minibatches):
        return problem
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in model]
    frozen = trains.index(True) if any(trains) else 0
    head, rest = model[:frozen], model[frozen:]
    if (
        not any(True for _ in head.parameters())
        or not all(map(_stateless, head.modules()))
        or problem.split_batch is not batches.split_batch
    ):
        return problem
    inputs, targets = loader.on(problem.device).dataset.tensors
    made: list[Tensor] = []
    with torch.no_grad():
        for part in torch.split(inputs, loader.batch_size):
            made.append(head(part))
            if made[0].nbytes * len(loader) > MOST_BYTES:
                return problem
    features = Minibatches(torch.cat(made), targets, loader.batch_size)
    return replace(problem, model=rest, loader=features)


def _stateless(layer: nn.Module) -> bool:
    return type(layer) in STATELESS and not (layer._forward_hooks or layer._forward_pre_hooks)
