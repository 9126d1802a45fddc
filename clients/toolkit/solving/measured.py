"""Loss and metrics of many models at once, each on its client's data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chains import Room
from .sample_losses import sample_losses
from .solvers import Epoch, LossFn, one_thread
from .stacked import StackedModel, filled, spare_slots, steps_of

Metrics = Mapping[str, Callable[[Any, Any], Any]]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target class."""
    return (outputs.argmax(dim=1) == targets).float().mean()


@dataclass(frozen=True)
class Tested:
    """A client whose models are measured.

    Attributes
    ----------
    models : sequence of mapping of str to Tensor
        All parameters of each.
    epoch : Epoch
        Its data.
    """

    models: Sequence[Mapping[str, Tensor]]
    epoch: Epoch


def measure(
    clients: Sequence[Tested], model: StackedModel, rows: int, loss_fn: LossFn, metrics: Metrics
) -> list[list[dict[str, float]]]:
    """Return what `TorchClient.measure` does for each model of each client, equal to rounding.

    A model that all clients have, one object, is in memory once.

    Parameters
    ----------
    clients : sequence of Tested
        As many models of each, of one architecture, and samples of one shape.
    model : StackedModel
        The architecture, in evaluation.
    rows : int
        `rows_of` a client's samples, all in one step.
    loss_fn : callable
    metrics : mapping of str to callable
        By name; those of all samples at once.
    """
    first = clients[0].models[0]
    dtype = next(iter(first.values())).dtype
    spare, room, loss = spare_slots(rows, model), Room(), sample_losses(loss_fn)
    found: list[list[dict[str, float]]] = [[] for _ in clients]
    with one_thread(), torch.no_grad():
        (samples,) = steps_of([client.epoch for client in clients], True, rows, spare, dtype)
        sizes = samples.sizes.tolist()
        for kind in range(len(clients[0].models)):
            models = [client.models[kind] for client in clients]
            if all(one[n] is t for one in models for n, t in models[0].items()):
                blocks = filled(model, models[:1], first, 0)
                slots = {n: b.expand(len(sizes) + spare, *b.shape[1:]) for n, b in blocks.items()}
            else:
                slots = filled(model, models, first, spare)
            outputs = model.outputs(slots, samples.inputs, room)
            losses = (loss(outputs, samples.targets) * samples.weights).sum(1).tolist()
            hits: list[float] = []
            if accuracy in metrics.values() and outputs.ndim == 3:
                right = (outputs.argmax(2) == samples.targets) & (samples.weights > 0)
                hits = (right[: len(sizes)].sum(1) / samples.sizes).tolist()
            for client, size in enumerate(sizes):
                values = {"loss": losses[client]}
                for name, metric in metrics.items():
                    if metric is accuracy and hits:
                        values[name] = hits[client]
                    else:
                        mine = outputs[client, :size], samples.targets[client, :size]
                        values[name] = float(metric(*mine))
                found[client].append(values)
    return found
