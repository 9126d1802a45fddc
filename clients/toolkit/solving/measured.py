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

    A model that several clients have is in memory once.

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
            models, owners = _distinct([client.models[kind] for client in clients])
            blocks = filled(model, models, first, 0)
            if len(models) == 1:
                slots = {n: b.expand(len(sizes) + spare, *b.shape[1:]) for n, b in blocks.items()}
            else:
                places = torch.tensor(owners + owners[-1:] * spare)
                slots = {name: block[places] for name, block in blocks.items()}
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


def _distinct(
    models: Sequence[Mapping[str, Tensor]],
) -> tuple[list[Mapping[str, Tensor]], list[int]]:
    """Return models without those that are there twice, and which of them each is."""
    known: dict[Any, list[int]] = {}
    places: dict[tuple[int, ...], int] = {}
    distinct: list[Mapping[str, Tensor]] = []
    owners: list[int] = []
    for model in models:
        objects = tuple(map(id, model.values()))
        if objects in places:
            owners.append(places[objects])
            continue
        # Few numbers tell nearly all models apart; equal they are only if all are.
        looks = tuple(float(tensor.view(-1)[-1]) for tensor in model.values())
        same = known.setdefault(looks, [])
        for place in same:
            if all(torch.equal(distinct[place][name], t) for name, t in model.items()):
                owners.append(place)
                break
        else:
            same.append(len(distinct))
            owners.append(len(distinct))
            distinct.append(model)
        places[objects] = owners[-1]
    return distinct, owners
