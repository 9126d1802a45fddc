"""The gradient of a stack of chains of linear layers, in products of batches of matrices.

Most small models are chains: linear layers with functions of single entries between them. For these
the forward and the backward pass of all clients are a product or two a layer, on blocks that hold
the weights and the biases of one layer of all clients: [W b], shape (clients, outputs, columns).
Samples stand in columns, below them a row of ones for the biases. What stands between the layers,
and the loss, is PyTorch's, with its gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ..models.arrays import parameters_of
from .vmapped import LINE, SHAPES, SINGLE, WHOLE

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """A linear layer, and the functions of single entries that follow it.

    Attributes
    ----------
    weight : str
        The name of its weight, and of its block.
    bias : str or None
    inputs, outputs : int
    after : list of callable
    """

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    after: list[Function] = field(default_factory=list)

    @property
    def used(self) -> int:
        """How many columns of its block are used."""
        return self.inputs + (self.bias is not None)

    @property
    def columns(self) -> int:
        """The columns of its block, of which a client's numbers are whole vectors."""
        multiple = WHOLE // math.gcd(WHOLE, self.outputs)
        return -(-self.used // multiple) * multiple


class Room:
    """Memory that one step after another uses: to get it anew each time takes as long as a step."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, purpose: str, like: Tensor, *shape: int) -> Tensor:
        """Return memory for a purpose, with what is left in it."""
        size = math.prod(shape)
        if purpose not in self._held or len(self._held[purpose]) < size:
            self._held[purpose] = like.new_empty(size)
        return self._held[purpose][:size].view(shape)


class Chain:
    """Models that are a chain, as `vmapped.AnyModel` has any models.

    Parameters
    ----------
    layers : sequence of Layer
    itemsize : int
        Bytes of a number.
    """

    def __init__(self, layers: Sequence[Layer], itemsize: int) -> None:
        self.layers = layers
        self.blocks: dict[str, tuple[int, ...]] = {
            layer.weight: (layer.outputs, layer.columns) for layer in layers
        }
        self.least = min(layer.outputs for layer in layers)
        entries = LINE // itemsize
        self.unit = entries // math.gcd(entries, *(layer.outputs for layer in layers))
        self._place: dict[str, tuple[str, Any]] = {}
        for layer in layers:
            self._place[layer.weight] = layer.weight, slice(layer.inputs)
            if layer.bias is not None:
                self._place[layer.bias] = layer.weight, layer.inputs

    def block_of(self, name: str) -> str:
        """Return the block that a parameter is in."""
        return self._place[name][0]

    def part(self, name: str, block: Tensor) -> Tensor:
        """Return a parameter of all clients, as a view of its block."""
        return block[:, :, self._place[name][1]]

    def whole(self, names: Collection[str]) -> bool:
        """Return whether parameters are those of whole blocks."""
        blocks = {self.block_of(name) for name in names}
        return {name for name in self._place if self.block_of(name) in blocks} == set(names)

    def outputs(self, blocks: Mapping[str, Tensor], inputs: Tensor, room: Room) -> Tensor:
        """Return what the models make of samples, shape (clients, rows, outputs)."""
        return self._forward(blocks, inputs, room)[-1].after.transpose(1, 2)

    def gradients(
        self,
        blocks: Mapping[str, Tensor],
        moving: Collection[str],
        inputs: Tensor,
        losses: Callable[[Tensor], Tensor],
        weights: Tensor,
        room: Room,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the samples' losses, and the gradient of their weighted sums.

        Parameters are those of `vmapped.AnyModel.gradients`.
        """
        passes = self._forward(blocks, inputs, room)
        values = losses(passes[-1].after.transpose(1, 2))
        (slope,) = torch.autograd.grad(values, passes[-1].before, weights)
        gradients: dict[str, Tensor] = {}
        for layer, (columns, before, after) in zip(self.layers[::-1], passes[::-1], strict=True):
            name = layer.weight
            if after is not before and layer is not self.layers[-1]:
                (slope,) = torch.autograd.grad(after, before, slope)
            if name in moving:
                gradients[name] = room(f"gradient of {name}", inputs, *blocks[name].shape)
                torch.bmm(slope, columns.transpose(1, 2), out=gradients[name])
            if len(gradients) == len(moving):
                break
            weight = blocks[name][:, :, : layer.inputs].transpose(1, 2)
            below = room(f"slope below {name}", inputs, *weight.shape[:2], slope.shape[2])
            slope = torch.bmm(weight, slope, out=below)
        return values.detach(), gradients

    def _forward(self, blocks: Mapping[str, Tensor], inputs: Tensor, room: Room) -> list[_Pass]:
        """Return what comes into every layer and out of it."""
        slots, rows = inputs.shape[:2]
        first = self.layers[0]
        samples = room("samples", inputs, slots, rows, first.columns)
        samples[:, :, : first.inputs] = inputs.flatten(2)
        columns = with_ones(samples.transpose(1, 2), first)
        passes: list[_Pass] = []
        for layer in self.layers:
            name, used = layer.weight, slice(layer.used)
            if passes:
                columns = room(f"columns of {name}", inputs, slots, layer.columns, rows)
                columns[:, : layer.inputs] = passes[-1].after.detach()
                with_ones(columns, layer)
            before = room(f"outputs of {name}", inputs, slots, layer.outputs, rows)
            torch.bmm(blocks[name][:, :, used], columns[:, used], out=before)
            after = before.requires_grad_(torch.is_grad_enabled())
            for function in layer.after:
                after = function(after)
            passes.append(_Pass(columns, before, after))
        return passes


class _Pass(NamedTuple):
    """What comes into a layer, out of its product, and out of the functions after it."""

    columns: Tensor
    before: Tensor
    after: Tensor


def with_ones(columns: Tensor, layer: Layer) -> Tensor:
    """Set what is below the inputs of a layer: ones for its bias, zeros up to its columns."""
    columns[:, layer.inputs :] = 0
    if layer.bias is not None:
        columns[:, layer.inputs] = 1
    return columns


# ----------------------------------------------------------------------------------------------
# Which models are chains
# ----------------------------------------------------------------------------------------------


class _Calls(TorchFunctionMode):
    """Notes the calls of a model that return a tensor: function, arguments, result."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append((func, args, kwargs or {}, result))
        return result


def chain_of(model: nn.Module, inputs: Tensor, training: bool = True) -> Chain | None:
    """Return a model as a chain; None if it is none.

    Parameters
    ----------
    model : nn.Module
    inputs : Tensor of shape (n, ...)
        Some samples, on which a copy of the model is called.
    training : bool (default: True)
        In which mode.
    """
    twin, value = copy.deepcopy(model).train(training), inputs.clone()
    with torch.random.fork_rng([]), torch.no_grad(), _Calls() as calls:
        outputs = twin(value)
    parameters = parameters_of(twin)
    names = {id(parameter): name for name, parameter in parameters.items()}
    layers: list[Layer] = []
    for func, (given, *others), kwargs, result in calls.made:
        called = getattr(func, "__name__", "")
        if given is not value:
            return None
        if func is F.linear:
            weight, bias = (*others, *kwargs.values(), None)[:2]
            if value.ndim != 2 or id(weight) not in names:
                return None
            of_bias = None if bias is None else names.get(id(bias))
            layers.append(Layer(names[id(weight)], of_bias, weight.shape[1], weight.shape[0]))
        elif called in SINGLE and layers:
            kwargs = {name: option for name, option in kwargs.items() if name != "inplace"}
            if not all(
                isinstance(option, int | float | str) for option in (*others, *kwargs.values())
            ):
                return None
            layers[-1].after.append(partial(_with, func, others, kwargs))
        elif called not in SHAPES or not torch.equal(result, value.flatten(1)):
            return None
        value = result
    held = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    if outputs is not value or sorted(held) != sorted(parameters):
        return None
    return Chain(layers, inputs.itemsize)


def _with(func: Any, others: Sequence[Any], kwargs: Mapping[str, Any], values: Tensor) -> Tensor:
    result: Tensor = func(values, *others, **kwargs)
    return result
