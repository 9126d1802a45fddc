"""The sum of the step sizes of a client's round: how far a gradient of 1 would move its model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def sum_of_steps(lr: float, momentum: float, count: int) -> float:
    """Return S of so many steps of SGD.

    With a momentum b a gradient moves the model by lr in its own step and by b, b^2, ... times that
    in the next ones, until the round ends: by lr (1 - b^j)/(1 - b) where j steps are left, its own
    among them. For many steps the sum is nearly lr count/(1 - b).
    """
    return lr * sum((1 - momentum**left) / (1 - momentum) for left in range(1, count + 1))


class StepMeter:
    """Measures S of a training loop: K ||u - u before|| / ||sum of the K steps' gradients||.

    Parameters
    ----------
    moving : mapping of str to nn.Parameter
        u before the first step, of which a copy is kept.
    """

    def __init__(self, moving: Mapping[str, nn.Parameter]) -> None:
        self._before = {name: p.detach().clone() for name, p in moving.items()}
        self._sums: dict[str, Tensor] = {}
        self._probe: Tensor | None = None
        self._hooks: list[Any] = []

    def add(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Take in the gradients of a step, which are in the parameters' ``.grad``."""
        for name, parameter in moving.items():
            self._take(name, parameter)

    def follow(self, moving: Mapping[str, nn.Parameter]) -> Tensor:
        """Take in the gradients of every backward pass from now on.

        Returns
        -------
        Tensor of shape ()
            0, to be added to every loss: its own gradient says how the loss is scaled.
        """
        if self._probe is None:
            self._probe = torch.zeros((), requires_grad=True)
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._take, name))  # type: ignore[no-untyped-call]
                for name, parameter in moving.items()
            ]
        return self._probe

    def _take(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            sums, gradient = self._sums, parameter.grad.detach()
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()

    def measured(self, moving: Mapping[str, nn.Parameter], steps: int) -> float:
        """Return S after so many steps, and measure no more; NaN where there is nothing to go by.

        Parameters
        ----------
        moving : mapping of str to nn.Parameter
            u after the last step.
        steps : int
            K.
        """
        for hook in self._hooks:
            hook.remove()
        scale = 1.0
        if self._probe is not None:
            scale = math.nan if self._probe.grad is None else float(self._probe.grad) / steps
        before = self._before
        moved = _norm(p.detach().to(before[name]) - before[name] for name, p in moving.items())
        force = _norm(self._sums.values()) / scale if scale else math.nan
        return steps * moved / force if force else math.nan


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
