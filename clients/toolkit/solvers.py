"""Local solvers that the clients share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
Loader = Iterable[Batch]
LossFn = Callable[[Tensor, Tensor], Tensor]
OptimizerFn = Callable[..., torch.optim.Optimizer]
SplitBatch = Callable[[Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ProximalTerm:
    """A term (c/2) ||u - a||^2 of a local objective.

    Attributes
    ----------
    weight : float
        c > 0.
    anchor : mapping of str to Tensor
        a, by parameter name; parameters that it does not name are not in u.
    """

    weight: float
    anchor: Mapping[str, Tensor]

    def add_gradient(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Add c (u - a) to the parameters' ``.grad``."""
        for name, anchor in self.anchor.items():
            if (parameter := moving.get(name)) is not None:
                _add(parameter, parameter - anchor, self.weight)


@dataclass(frozen=True)
class ProjectedTerm:
    """A term (c/2) ||P u - a||^2 of a local objective, of some linear features of u.

    Attributes
    ----------
    weight : float
        c > 0.
    projection : Tensor of shape (k, d)
        P; its columns are the entries of the named parameters, one parameter after another.
    target : Tensor of shape (k,)
        a.
    names : sequence of str
        The parameters that u consists of; all of them must move.
    """

    weight: float
    projection: Tensor
    target: Tensor
    names: Sequence[str]

    def image(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return P u, shape (k,)."""
        return self.projection @ torch.cat([parameters[name].flatten() for name in self.names])

    def add_gradient(self, moving: Mapping[str, nn.Parameter]) -> None:
        """Add c P^T (P u - a) to the parameters' ``.grad``."""
        gradient = (self.image(moving) - self.target) @ self.projection
        sizes = [moving[name].numel() for name in self.names]
        for name, part in zip(self.names, torch.split(gradient, sizes), strict=True):
            _add(moving[name], part.view_as(moving[name]), self.weight)


Term = ProximalTerm | ProjectedTerm


def _add(parameter: nn.Parameter, gradient: Tensor, weight: float) -> None:
    if parameter.grad is None:  # a parameter the loss does not reach
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.add_(gradient, alpha=weight)


@dataclass(frozen=True)
class LocalProblem:
    """A client's loss f(u) = mean over its samples of loss(model(u; x), y).

    Attributes
    ----------
    model : nn.Module
        Holds u; on `device`.
    loader : iterable of batches
        The samples; iterated once an epoch.
    loss_fn : callable
        ``loss_fn(outputs, targets)``, the MEAN over the batch.
    split_batch : callable
        Turns what the loader yields into (inputs, targets).
    device : torch.device
        Where batches are moved to.
    """

    model: nn.Module
    loader: Loader
    loss_fn: LossFn
    split_batch: SplitBatch
    device: torch.device

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches on the device; there must be one."""
        empty = True
        for batch in self.loader:
            inputs, targets = self.split_batch(batch)
            yield inputs.to(self.device), targets.to(self.device)
            empty = False
        if empty:
            raise ValueError(
                f"The loader of {self.num_examples()} samples yields no batch; with drop_last=True "
                "a batch must not be larger than the data set."
            )

    def num_examples(self) -> int:
        """Return n, the number of samples."""
        try:
            return len(self.loader.dataset)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):  # a list of batches, an IterableDataset
            return sum(len(self.split_batch(batch)[1]) for batch in self.loader)

    def set_gradient(self) -> float:
        """Put the full gradient of f into the parameters' ``.grad``; return f.

        Full means: over all the samples that the loader yields.
        """
        self.model.zero_grad()
        value, seen = 0.0, 0
        for inputs, targets in self.batches():
            loss = self.loss_fn(self.model(inputs), targets) * len(targets)
            loss.backward()  # type: ignore[no-untyped-call]
            value += loss.item()
            seen += len(targets)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= seen
        return value / seen


@dataclass(frozen=True)
class Descent:
    """What `descend_until` reached.

    Attributes
    ----------
    loss : float
        f at the result.
    residual : float
        Squared norm of the gradient of the whole objective there.
    steps : int
        Steps taken.
    """

    loss: float
    residual: float
    steps: int


@contextmanager
def _moving(model: nn.Module, names: Collection[str] | None) -> Iterator[dict[str, nn.Parameter]]:
    """Freeze all parameters but the named; yield those that move."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moving = {name: p for name, p in own.items() if names is None or name in names}
    frozen = [p for name, p in own.items() if name not in moving]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
            parameter.grad = None
        yield moving
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _complete_gradient(
    moving: Mapping[str, nn.Parameter], terms: Sequence[Term], loss_weight: float
) -> None:
    """Turn grad f, in the parameters' ``.grad``, into that of the whole objective."""
    with torch.no_grad():
        if loss_weight != 1.0:
            for parameter in moving.values():
                if parameter.grad is not None:
                    parameter.grad *= loss_weight
        for term in terms:
            term.add_gradient(moving)


def gradient_descent(
    problem: LocalProblem,
    terms: Sequence[Term],
    *,
    lr: float,
    epochs: int,
    full_batch: bool,
    optimizer_fn: OptimizerFn = torch.optim.SGD,
    loss_weight: float = 1.0,
    moving: Collection[str] | None = None,
) -> float:
    """Take descent steps on alpha f(u) + sum_k (c_k/2) ||u - a_k||^2 from the model's parameters.

    The gradient of the proximal terms, c_k (u - a_k), is added in every step: to the full gradient
    (GD, one step an epoch) or to that of every mini-batch (SGD, one step a batch).

    Parameters
    ----------
    problem : LocalProblem
        f, and the model that is changed in place.
    terms : sequence of ProximalTerm or ProjectedTerm
        The proximal terms.
    lr : float
        Step size.
    epochs : int
        Passes over the data.
    full_batch : bool
        GD or SGD.
    optimizer_fn : callable (default: torch.optim.SGD)
        ``optimizer_fn(parameters, lr=lr)``; the plain SGD step is the papers'.
    loss_weight : float (default: 1.0)
        alpha, the client's weight in the sum over clients.
    moving : collection of str, optional
        The parameters that u consists of; the others are held fixed. By default all.

    Returns
    -------
    float
        GD: f before the last step. SGD: the mean of the batch losses of the last epoch.
    """
    value = float("nan")
    problem.model.train()
    with _moving(problem.model, moving) as parameters:
        optimizer = optimizer_fn(list(parameters.values()), lr=lr)
        optimizer.zero_grad()
        for _ in range(epochs):
            if full_batch:
                value = problem.set_gradient()
                _complete_gradient(parameters, terms, loss_weight)
                optimizer.step()
                optimizer.zero_grad()
                continue
            value, seen = 0.0, 0
            for inputs, targets in problem.batches():
                loss = problem.loss_fn(problem.model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                _complete_gradient(parameters, terms, loss_weight)
                optimizer.step()
                optimizer.zero_grad()
                value += loss.item() * len(targets)
                seen += len(targets)
            value /= seen
    return value


def descend_until(
    problem: LocalProblem,
    terms: Sequence[Term],
    *,
    tolerance: float,
    lr: float,
    max_steps: int,
    loss_weight: float = 1.0,
    moving: Collection[str] | None = None,
) -> Descent:
    """Take full-gradient steps until ||alpha grad f(u) + sum_k c_k (u - a_k)||^2 <= tolerance.

    The accuracy test of the inexact ADMM methods (FedAPM (16), FLAME (17)).

    Parameters
    ----------
    problem, terms, lr, loss_weight, moving
        As in `gradient_descent`.
    tolerance : float
        For the SQUARED norm.
    max_steps : int
        After so many steps the result is returned as it is; its residual says how far it came.
    """
    problem.model.train()
    with _moving(problem.model, moving) as parameters:
        optimizer = torch.optim.SGD(list(parameters.values()), lr=lr)
        for steps in range(max_steps + 1):
            loss = problem.set_gradient()
            _complete_gradient(parameters, terms, loss_weight)
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            residual = sum(float((gradient.double() ** 2).sum()) for gradient in gradients)
            if residual <= tolerance or steps == max_steps:
                break
            optimizer.step()
        optimizer.zero_grad()
    return Descent(loss, residual, steps)
