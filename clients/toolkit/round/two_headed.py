"""Clients with a model that has a personal head beside the shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from ..models.heads import TwoHeaded
from ..solving.solvers import LocalProblem, LossFn
from .base import Asked
from .split_model import SplitClient


class TwoHeadedClient(SplitClient[Asked]):
    """Base of the clients with a `TwoHeaded` model: its personal head stays with them.

    They train with a loss of the method's own, made of theirs, on more than the model's logits.
    """

    heads: ClassVar[type[TwoHeaded]]
    """The model that they take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name, kind = type(self).__name__, self.heads.__name__
        if not isinstance(self.model, self.heads):
            raise TypeError(
                f"{name} got a {type(self.model).__name__}, expected a model with two heads: give "
                f"it {kind}.of(model), or {kind}(base, head), and start the strategy with the "
                "arrays of such a model."
            )
        if (loss_fn := self.train_problem.loss_fn) is None:
            raise ValueError(
                f"{name} has no loss_fn, expected one of logits and targets, such as "
                "nn.CrossEntropyLoss(): the method has a loss of its own, made of it."
            )
        self.loss_fn: LossFn = loss_fn

    def problem_with(self, model: nn.Module, loss_fn: LossFn) -> LocalProblem:
        """Return the training data with another loss, of what a module over the model returns."""
        return replace(self.train_problem, model=model, loss_fn=loss_fn)
