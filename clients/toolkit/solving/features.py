"""The outputs of a model's frozen first layers, computed once for several epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    no parameter with ``requires_grad`` and are all `STATELESS`, and the data are in memory: a list
    of batches, whose features have the same bits as ever, or `Minibatches`, whose features are
    computed in other batches, so that their last bits may differ (with PyTorch's convolutions on a
    CPU they do for a batch of one sample). Otherwise the problem is returned as it is.

    The layers are the model's own: to train them is to train it.
    """
    model, loader = problem.model, problem.loader
    if type(model) is not nn.Sequential or not isinstance(loader, (list, Minibatches)):
        return problem
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in model]
    frozen = trains.index(True) if any(trains) else 0
    head, rest = model[:frozen], model[frozen:]
    if not any(True for _ in head.parameters()) or not all(map(_stateless, head.modules())):
        return problem
    if isinstance(loader, list):
        parts = loader
    elif problem.split_batch is batches.split_batch:
        tensors = (torch.split(values, loader.batch_size) for values in loader.dataset.tensors)
        parts = list(zip(*tensors, strict=True))
    else:
        return problem
    made: Any = []
    size = 0
    with torch.no_grad():
        for batch in replace(problem, loader=parts).batches():
            if not isinstance(batch.inputs, Tensor):
                return problem
            made.append((head(batch.inputs), batch.targets))
            size += made[-1][0].nbytes
            if size > MOST_BYTES:
                return problem
    if isinstance(loader, Minibatches):
        inputs, targets = (torch.cat(values) for values in zip(*made, strict=True))
        made = Minibatches(inputs, targets, loader.batch_size)
    return replace(problem, model=rest, loader=made, split_batch=batches.split_batch)


def _stateless(layer: nn.Module) -> bool:
    return type(layer) in STATELESS and not (layer._forward_hooks or layer._forward_pre_hooks)
