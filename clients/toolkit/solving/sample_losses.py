"""The losses of single samples, of which stacks take each client's mean."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .solvers import LossFn

SampleLosses = Callable[[Tensor, Tensor], Tensor]
"""Of outputs, shape (clients, rows, ...), and targets: the losses, shape (clients, rows)."""


class CannotStackError(Exception):
    """These clients cannot be trained in one stack; alone they may."""


_MEANS = (
    *(nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
)
_FUNCTIONS = (
    *(F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss),
    *(F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)


def is_by_sample(loss_fn: LossFn | None) -> bool:
    """Return whether a loss function is known to be the mean of its samples' losses.

    Known are PyTorch's losses with ``reduction="mean"``, classes derived from them and the
    functions of the same names, but not with weights of classes, which make the mean another.
    """
    if isinstance(loss_fn, _MEANS):
        return loss_fn.reduction == "mean" and getattr(loss_fn, "weight", None) is None
    return any(loss_fn is function for function in _FUNCTIONS)


def _by_sample(loss_fn: Any) -> LossFn:
    """Return what gives the loss of every sample."""
    if not isinstance(loss_fn, nn.Module):
        return partial(loss_fn, reduction="none")
    single: Any = copy.copy(loss_fn)
    single.reduction = "none"
    found: LossFn = single
    return found


def sample_losses(loss_fn: LossFn | None) -> SampleLosses:
    """Return the losses of stacked samples as a function, of a loss that `is_by_sample`.

    The function raises `CannotStackError` where samples would not count alike.
    """
    loss = _by_sample(loss_fn)
    ignored = _ignored(loss)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        classes = outputs.ndim == 3 and targets.ndim == 2 and not targets.is_floating_point()
        if classes and ignored is not None:
            if bool((targets == ignored).any()):
                raise CannotStackError
            # Samples last: three times faster than classes last.
            return loss(outputs.transpose(1, 2), targets)
        if not classes and outputs.shape != targets.shape:  # would be broadcast over the batch
            raise CannotStackError
        values = loss(outputs.flatten(0, 1), targets.flatten(0, 1))
        if values.ndim == 0 or len(values) != outputs.shape[0] * outputs.shape[1]:
            raise CannotStackError
        return values.view(*outputs.shape[:2], -1).mean(2)

    return losses


def _ignored(loss: LossFn) -> int | None:
    """Return the target that a loss leaves out of its mean."""
    if isinstance(loss, partial):
        return -100 if "ignore_index" in inspect.signature(loss.func).parameters else None
    return getattr(loss, "ignore_index", None)
