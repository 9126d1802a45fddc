"""Local solvers that the clients share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def gradient_descent(
    problem: LocalProblem,
    terms: Sequence[ProximalTerm],
    *,
    lr: float,
    epochs: int,
    full_batch: bool,
    optimizer_fn: OptimizerFn = torch.optim.SGD,
) -> float:
    """Take descent steps on f(u) + sum_k (c_k/2) ||u - a_k||^2 from the model's present parameters.

    The gradient of the proximal terms, c_k (u - a_k), is added in every step: to the full gradient
    (GD, one step an epoch) or to that of every mini-batch (SGD, one step a batch).

    Parameters
    ----------
    problem : LocalProblem
        f, and the model that is changed in place.
    terms : sequence of ProximalTerm
        The proximal terms.
    lr : float
        Step size.
    epochs : int
        Passes over the data.
    full_batch : bool
        GD or SGD.
    optimizer_fn : callable (default: torch.optim.SGD)
        ``optimizer_fn(parameters, lr=lr)``; the plain SGD step is the papers'.

    Returns
    -------
    float
        GD: f before the last step. SGD: the mean of the batch losses of the last epoch.
    """
    parameters = dict(problem.model.named_parameters())
    optimizer = optimizer_fn([p for p in parameters.values() if p.requires_grad], lr=lr)
    pulls = [
        (parameters[name], term.weight, anchor)
        for term in terms
        for name, anchor in term.anchor.items()
    ]

    def step() -> None:
        with torch.no_grad():
            for parameter, weight, anchor in pulls:
                if parameter.grad is None:  # a parameter the loss does not reach
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(parameter - anchor, alpha=weight)
        optimizer.step()
        optimizer.zero_grad()

    value = float("nan")
    problem.model.train()
    optimizer.zero_grad()
    for _ in range(epochs):
        if full_batch:
            value = problem.set_gradient()
            step()
        else:
            value, seen = 0.0, 0
            for inputs, targets in problem.batches():
                loss = problem.loss_fn(problem.model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                step()
                value += loss.item() * len(targets)
                seen += len(targets)
            value /= seen
    return value
