"""Local solvers that the clients share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.batches import (
    Loader,
    SplitBatch,
    answer_of,
    loss_of,
    outputs_of,
    size_of,
    split_batch,
    to_device,
)
from ..data.minibatches import Minibatches
from .objective import LocalObjective

LossFn = Callable[[Any, Any], Tensor]
OptimizerFn = Callable[..., torch.optim.Optimizer]
SchedulerFn = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Batch(NamedTuple):
    """Samples: what the model is called with, their targets, and how many they are."""

    inputs: Any
    targets: Any
    size: int


class Epoch(NamedTuple):
    """The batches of an epoch as one, with their sizes.

    Attributes
    ----------
    inputs : Tensor of shape (n, ...)
    targets : Tensor of shape (n, ...)
    sizes : sequence of int
    """

    inputs: Tensor
    targets: Tensor
    sizes: Sequence[int]


class Drawn(list[Any]):
    """Some batches, as a loader of which ``len(loader.dataset)`` is how many samples they have."""

    def __init__(self, batches: Iterable[Any], num_samples: int) -> None:
        super().__init__(batches)
        self.dataset = range(num_samples)


@dataclass(frozen=True)
class LocalProblem:
    """A client's loss f(u) = mean over its samples of loss(model(u; x), y).

    Attributes
    ----------
    model : nn.Module
        Holds u; on `device`.
    loader : iterable of batches
        The samples; iterated once an epoch.
    loss_fn : callable or None
        ``loss_fn(outputs, targets)``, the MEAN over the batch; None: the model returns its loss.
    split_batch : callable
        Turns what the loader yields into (inputs, targets); inputs is what the model is called
        with: a dict as keyword arguments, a tuple as positional ones.
    device : torch.device
        Where batches are moved to.
    """

    model: nn.Module
    loader: Loader
    loss_fn: LossFn | None
    split_batch: SplitBatch
    device: torch.device

    def batches(self) -> Iterator[Batch]:
        """Yield the batches on the device; there must be one."""
        for batch in self._epoch():
            inputs, targets, size = self._read(batch)
            yield Batch(to_device(inputs, self.device), to_device(targets, self.device), size)

    def epoch(self) -> Epoch:
        """Return the batches of an epoch as one.

        Raises
        ------
        ValueError
            If they are not tensors of samples of one kind.
        """
        if type(self.loader) is Minibatches and self.split_batch is split_batch:
            x, y = self.loader.epoch()
            whole, rest = divmod(x.shape[0], self.loader.batch_size)
            sizes = [self.loader.batch_size] * whole + [rest] * bool(rest)
            return Epoch(x.to(self.device), y.to(self.device), sizes)
        batches = list(self.batches())
        kinds = set()
        for batch in batches:
            for values in (batch.inputs, batch.targets):
                rows = values.shape[:1] if isinstance(values, Tensor) else ()
                if not batch.size or rows != (batch.size,):
                    raise ValueError("A batch is not of tensors with a sample in each row.")
            kinds.add(tuple((v.shape[1:], v.dtype) for v in (batch.inputs, batch.targets)))
        if len(kinds) != 1:
            raise ValueError("The batches have samples of different shapes or types.")
        inputs = torch.cat([batch.inputs for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        return Epoch(inputs, targets, [batch.size for batch in batches])

    def draws(self, count: int) -> Iterator[Drawn]:
        """Yield so many batches at a time, epoch after epoch, without end."""
        batches = chain.from_iterable(self._epoch() for _ in repeat(None))
        while True:
            some = list(islice(batches, count))
            yield Drawn(some, sum(self._read(batch).size for batch in some))

    def _epoch(self) -> Iterator[Any]:
        empty = True
        for batch in self.loader:
            yield batch
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
            return sum(self._read(batch).size for batch in self.loader)

    def _read(self, batch: Any) -> Batch:
        inputs, targets = self.split_batch(batch)
        return Batch(inputs, targets, size_of(inputs if targets is None else targets))

    def loss_and_outputs(self, batch: Batch) -> tuple[Tensor, Any]:
        """Return the mean loss over a batch, and what the model makes of it: its ``logits``."""
        answer = answer_of(self.model, batch.inputs)
        outputs = outputs_of(answer)
        if self.loss_fn is None:
            return loss_of(answer), outputs
        return self.loss_fn(outputs, batch.targets), outputs

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over a batch."""
        return self.loss_and_outputs(batch)[0]

    def set_gradient(self) -> float:
        """Put the full gradient of f into the parameters' ``.grad``; return f.

        Full means: over all the samples that the loader yields.
        """
        self.model.zero_grad()
        value, seen = 0.0, 0
        for batch in self.batches():
            loss = self.loss(batch) * batch.size
            loss.backward()  # type: ignore[no-untyped-call]
            value += loss.item()
            seen += batch.size
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= seen
        return value / seen


@contextmanager
def one_thread() -> Iterator[None]:
    """Let sums have the same last bits wherever this runs: they depend on who shares them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PlainSGD:
    """``torch.optim.SGD(parameters, lr)``, the same bits without the rest of an optimizer.

    The first `torch.optim.Optimizer` of a process imports the compiler (1.3 s and 71 MB with torch
    2.13), in every process that trains.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self._parameters = parameters
        self._lr = lr

    def step(self) -> None:
        """Take u <- u - lr grad."""
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-self._lr)

    def zero_grad(self) -> None:
        """Forget the gradient."""
        for parameter in self._parameters:
            parameter.grad = None


def gradient_descent(
    problem: LocalProblem,
    objective: LocalObjective,
    *,
    lr: float,
    epochs: int,
    full_batch: bool,
    optimizer_fn: OptimizerFn = torch.optim.SGD,
    scheduler_fn: SchedulerFn | None = None,
    max_grad_norm: float | None = None,
) -> float:
    """Take descent steps on f(u) + sum_k (c_k / 2 alpha) ||u - a_k||^2 from the model's parameters.

    The gradient of the proximal terms is added in every step: to the full gradient
    (GD, one step an epoch) or to that of every mini-batch (SGD, one step a batch).

    Parameters
    ----------
    problem : LocalProblem
        f, and the model that is changed in place.
    objective : LocalObjective
        The terms, alpha, and what u consists of.
    lr : float
        Step size.
    epochs : int
        Passes over the data.
    full_batch : bool
        GD or SGD.
    optimizer_fn : callable (default: torch.optim.SGD)
        ``optimizer_fn(parameters, lr=lr)``; the plain SGD step is the papers', and `PlainSGD`'s
        where it is asked for without a schedule.
    scheduler_fn : callable, optional
        ``scheduler_fn(optimizer)``, a schedule of the step size with a step after every epoch.
    max_grad_norm : float, optional
        The norm to which the gradient of the whole objective is clipped in every step.

    Returns
    -------
    float
        GD: f before the last step. SGD: the mean of the batch losses of the last epoch.
    """
    value = float("nan")
    problem.model.train()
    with objective.others_fixed(problem.model) as parameters:
        moving = list(parameters.values())
        optimizer: PlainSGD | torch.optim.Optimizer = PlainSGD(moving, lr=lr)
        scheduler = None
        if optimizer_fn is not torch.optim.SGD or scheduler_fn is not None:
            optimizer = given = optimizer_fn(moving, lr=lr)
            scheduler = None if scheduler_fn is None else scheduler_fn(given)

        def step() -> None:
            objective.complete_gradient(parameters)
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        optimizer.zero_grad()
        for epoch in range(epochs):
            if epoch and scheduler is not None:
                scheduler.step()
            if full_batch:
                value = problem.set_gradient()
                objective.note_loss(value)
                step()
                continue
            value, seen = 0.0, 0
            for batch in problem.batches():
                loss = problem.loss(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                if objective.first_loss is None:
                    objective.note_loss(loss.item())
                step()
                value += loss.item() * batch.size
                seen += batch.size
            value /= seen
    return value


def descend_until(
    problem: LocalProblem,
    objective: LocalObjective,
    *,
    tolerance: float,
    lr: float,
    max_steps: int,
    loss_weight: float = 1.0,
) -> dict[str, Any]:
    """Take full-gradient steps until ||alpha grad f(u) + sum_k c_k (u - a_k)||^2 <= tolerance.

    The accuracy test of the inexact ADMM methods (FedAPM (16), FLAME (17)). The steps are taken
    with the gradient over alpha.

    Parameters
    ----------
    problem, objective, lr
        As in `gradient_descent`.
    tolerance : float
        For the SQUARED norm.
    max_steps : int
        After so many steps the result is returned as it is; its residual says how far it came.
    loss_weight : float (default: 1.0)
        alpha.

    Returns
    -------
    dict
        ``loss``, f at the result; ``residual``, the left side there; ``steps`` taken.
    """
    scale = loss_weight**2
    problem.model.train()
    with objective.others_fixed(problem.model) as parameters:
        optimizer = PlainSGD(list(parameters.values()), lr=lr)
        for steps in range(max_steps + 1):
            loss = problem.set_gradient()
            objective.complete_gradient(parameters)
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            residual = sum(float((gradient.double() ** 2).sum()) for gradient in gradients)
            if residual <= tolerance / scale or steps == max_steps:
                break
            optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss, "residual": residual * scale, "steps": steps}
