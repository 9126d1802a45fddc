"""The gradient of a stack of any models that give a client the same bits in every stack."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ..models.arrays import parameters_of
from .sample_losses import CannotStackError

LINE = 64
"""Bytes of a line of the cache."""
WHOLE = 32
"""Numbers of which vectorised code leaves none to scalar code: two vectors of AVX-512."""

SINGLE = frozenset(
    (
        *("relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "tanh", "sigmoid", "hardtanh"),
        *("add", "sub", "mul", "div", "neg", "__add__", "__sub__", "__mul__", "__truediv__"),
    )
)
"""Functions whose results are those of every entry by itself, wherever it stands."""
SHAPES = frozenset(
    ("flatten", "view", "reshape", "squeeze", "unsqueeze", "__get__", "__len__", "size")
)


class _SameBits(TorchFunctionMode):
    """Lets a model do what gives a client the same bits in every stack, and nothing else."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if getattr(func, "__name__", "") not in SINGLE | SHAPES:
            raise CannotStackError
        return func(*args, **kwargs)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``inputs @ weight.T + bias`` of the samples of one client.

    How a product is rounded depends on where its matrices begin in memory, so these have sizes of
    which every one begins on a line of the cache. The weight is on the left, which is faster.
    """
    if inputs.ndim != 2:
        raise CannotStackError
    outputs, entries = len(weight), LINE // weight.itemsize
    multiple = entries // math.gcd(entries, weight.shape[1])
    if fill := -outputs % multiple:
        weight = F.pad(weight, (0, 0, 0, fill))
    product = (weight @ inputs.t())[:outputs]
    return (product if bias is None else product + bias[:, None]).t()


def stacked_forward(
    model: nn.Module, training: bool
) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    """Return a model as a function of stacked parameters and stacked samples."""
    twin = copy.deepcopy(model).train(training)

    def call(parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        with _SameBits():
            outputs: Tensor = functional_call(twin, dict(parameters), (inputs,))
        return outputs

    return vmap(call)


class AnyModel:
    """Models of one architecture, each parameter of all of them in one block.

    Attributes
    ----------
    blocks : dict of str to tuple of int
        Shapes of what a client has in each block: whole vectors of numbers.
    unit : int
        A client's rows are a multiple of it.
    least : int
        The fewest numbers for a row of samples that anything is computed with.
    """

    unit, least = 16, 1

    def __init__(self, model: nn.Module, training: bool = True) -> None:
        self._shapes = {name: p.shape for name, p in parameters_of(model).items()}
        self.blocks: dict[str, tuple[int, ...]] = {
            n: (-(-s.numel() // WHOLE) * WHOLE,) for n, s in self._shapes.items()
        }
        self._forward = stacked_forward(model, training)

    def block_of(self, name: str) -> str:
        """Return the block that a parameter is in."""
        return name

    def part(self, name: str, block: Tensor) -> Tensor:
        """Return a parameter of all clients, as a view of its block."""
        shape = self._shapes[name]
        return block[:, : shape.numel()].view(len(block), *shape)

    def outputs(self, blocks: Mapping[str, Tensor], inputs: Tensor, room: object) -> Tensor:
        """Return what the models make of samples, shape (clients, rows, ...)."""
        return self._forward({n: self.part(n, b) for n, b in blocks.items()}, inputs)

    def gradients(
        self,
        blocks: Mapping[str, Tensor],
        moving: Collection[str],
        inputs: Tensor,
        losses: Callable[[Tensor], Tensor],
        weights: Tensor,
        room: object,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the samples' losses, and the gradient of their weighted sums.

        Parameters
        ----------
        blocks : mapping of str to Tensor
            The clients' parameters.
        moving : collection of str
            The blocks that move, for which the gradient is returned.
        inputs : Tensor of shape (clients, rows, ...)
        losses : callable
            Of the models' outputs, shape (clients, rows, ...).
        weights : Tensor of shape (clients, rows)
        room : Room
            Memory for what is computed; these models leave it alone.
        """
        used = {n: self.part(n, b).detach().requires_grad_(n in moving) for n, b in blocks.items()}
        values = losses(self._forward(used, inputs))
        found = torch.autograd.grad(values, [used[n] for n in moving], weights, allow_unused=True)
        gradients = {name: torch.zeros_like(blocks[name]) for name in moving}
        for name, gradient in zip(moving, found, strict=True):
            if gradient is not None:
                self.part(name, gradients[name]).copy_(gradient)
        return values.detach(), gradients
