"""Local solvers that the clients share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple
from weakref import WeakSet

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
from ..data.draws import bits
from ..data.minibatches import Minibatches
from .calls import ClientCalls
from .objective import LocalObjective, rows, times

LossFn = Callable[[Any, Any], Tensor]
OptimizerFn = Callable[..., torch.optim.Optimizer]
SchedulerFn = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


UNKNOWN = torch.tensor(torch.nan)
"""A loss that was not measured."""


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
    key : int or None
        Of the random order in which the samples are to be taken; None where they are in it already.
    """

    inputs: Tensor
    targets: Tensor
    sizes: Sequence[int]
    key: int | None = None


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
    seed : int or None (default: None)
        Of the round: what dropout draws in a descent is a hash of it, of the epoch and the step.
        Without it, dropout draws from torch's generator.
    """

    model: nn.Module
    loader: Loader
    loss_fn: LossFn | None
    split_batch: SplitBatch
    device: torch.device
    seed: int | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield the batches on the device; there must be one."""
        for batch in self._epoch():
            inputs, targets, size = self._read(batch)
            yield Batch(to_device(inputs, self.device), to_device(targets, self.device), size)

    def epochs(self, count: int) -> list[Epoch]:
        """Return so many epochs, each with its batches as one; a list's are all the same one.

        Raises
        ------
        ValueError
            If they are not tensors with a sample in each row.
        """
        loader = self.loader
        if type(loader) is Minibatches and self.split_batch is split_batch:
            inputs, targets = loader.on(self.device).dataset.tensors
            return [Epoch(inputs, targets, loader.sizes, loader.draw()) for _ in range(count)]
        if isinstance(loader, list | tuple):
            count = 1
        return [self._joined(list(self.batches())) for _ in range(count)]

    @staticmethod
    def _joined(batches: Sequence[Batch]) -> Epoch:
        inputs, targets, sizes = zip(*batches, strict=True)
        for values, size in zip((*inputs, *targets), (*sizes, *sizes), strict=True):
            if not isinstance(values, Tensor) or not values.shape[:1] == (size,) > (0,):
                raise ValueError("A batch is not of tensors with a sample in each row.")
        if len(sizes) == 1:
            return Epoch(inputs[0], targets[0], sizes)
        return Epoch(torch.cat(inputs), torch.cat(targets), sizes)

    def draws(self, count: int) -> Iterator[Drawn]:
        """Yield so many batches at a time, epoch after epoch, without end."""
        batches = chain.from_iterable(self._epoch() for _ in repeat(None))
        while True:
            some = list(islice(batches, count))
            yield Drawn(some, sum(self._read(batch).size for batch in some))

    def _epoch(self) -> Iterator[Any]:
        empty, loader = True, self.loader
        for batch in loader.on(self.device) if isinstance(loader, Minibatches) else loader:
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

    def constant_loss(self, batch: Batch, outputs: Any) -> Tensor:
        """Return the loss of a constant prediction, the batch's mean output.

        NaN of a single sample, of which every prediction is constant, and without an output.
        """
        if self.loss_fn is None or not isinstance(outputs, Tensor) or batch.size == 1:
            return UNKNOWN
        mean = outputs.detach().mean(0, keepdim=True)
        return self.loss_fn(mean.expand_as(outputs), batch.targets).detach()

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over a batch."""
        return self.loss_and_outputs(batch)[0]

    def set_gradient(self) -> float:
        """Put the full gradient of f into the parameters' ``.grad``; return f.

        Full means: over all the samples that the loader yields.
        """
        self.model.zero_grad()
        return float(self._full_gradient()[0])

    def _full_gradient(self, epoch: int = 0) -> tuple[Tensor, int]:
        """Add the full gradient to the parameters' ``.grad``; return f, and how many samples."""
        value, seen = torch.zeros(()), 0
        for batch in self.batches():
            loss = self._in_training(batch, epoch, seen)[0] * batch.size
            loss.backward()  # type: ignore[no-untyped-call]
            value = value.to(loss) + loss.detach()
            seen += batch.size
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= seen
        return value / seen, seen

    @contextmanager
    def moving(self, objective: LocalObjective) -> Iterator[dict[str, nn.Parameter]]:
        """Freeze all parameters that are not in u; yield those that move, without a gradient."""
        with objective.others_fixed(self.model) as moving:
            for parameter in moving.values():
                parameter.grad = None
            yield moving

    def gradients(
        self, moving: dict[str, nn.Parameter], epoch: int, full_batch: bool
    ) -> Iterator[Gradient]:
        """Yield the gradient of every step of an epoch, which is in the parameters' ``.grad``."""
        if full_batch:
            yield Gradient(moving, *self._full_gradient(epoch))
            return
        seen = 0
        for batch in self.batches():
            loss, outputs = self._in_training(batch, epoch, seen)
            loss.backward()  # type: ignore[no-untyped-call]
            constants = self.constant_loss(batch, outputs) if epoch == seen == 0 else UNKNOWN
            yield Gradient(moving, loss.detach(), batch.size, constants)
            seen += batch.size

    def _in_training(self, batch: Batch, epoch: int, first: int) -> tuple[Tensor, Any]:
        """Return `loss_and_outputs` of a batch; `first` is its first sample's place in an epoch."""
        if self.seed is None or self.model in _WITHOUT_DROPOUT:
            return self.loss_and_outputs(batch)
        with ClientCalls(bits(self.seed, epoch), first) as calls:
            found = self.loss_and_outputs(batch)
        if not calls.dropouts:
            _WITHOUT_DROPOUT.add(self.model)
        return found


_WITHOUT_DROPOUT: WeakSet[nn.Module] = WeakSet()
"""Models that called none in a step: to watch their calls takes time."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let sums have the same last bits wherever this runs: they depend on who shares them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Gradient(NamedTuple):
    """What a step goes along: in the ``.grad`` of what moves, that of the losses.

    Attributes
    ----------
    moving : dict of str to Tensor
        In a stack those of its first clients, all that have another batch.
    losses : Tensor of shape (), or (clients,)
        Means over the batches.
    sizes : int, or Tensor of shape (clients,)
        Samples of the batches.
    constants : Tensor as `losses`
        Before the first step, the losses of a constant prediction; else `UNKNOWN`.
    """

    moving: dict[str, Any]
    losses: Tensor
    sizes: int | Tensor
    constants: Tensor = UNKNOWN


@dataclass
class SGD:
    """The steps of `torch.optim.SGD`, for one model or a stack of them.

    The first `torch.optim.Optimizer` of a process imports the compiler (1.3 s and 71 MB with torch
    2.13), in every process that trains.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        self._velocity: dict[str, Tensor] = {}

    def step(self, moving: Mapping[str, Tensor]) -> None:
        """Take u <- u - lr grad, with momentum and weight decay, and forget the gradient."""
        with torch.no_grad():
            for name, parameter in moving.items():
                if parameter.grad is None:
                    continue
                along = parameter.grad
                parameter.grad = None
                if self.weight_decay:
                    along = along.add_(parameter, alpha=self.weight_decay)
                if self.momentum:
                    along = self._with_momentum(name, along)
                parameter.add_(along, alpha=-self.lr)

    def _with_momentum(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._velocity:
            velocity = self._velocity[name] = gradient.clone()
        else:
            velocity = rows(self._velocity[name], gradient).mul_(self.momentum).add_(gradient)
        return gradient.add_(velocity, alpha=self.momentum) if self.nesterov else velocity


def sgd_of(lr: float, optimizer_fn: OptimizerFn, scheduler_fn: Any = None) -> SGD | None:
    """Return the steps that an optimizer takes; None if it is not SGD with one step size."""
    options: dict[str, Any] = {}
    made: Any = optimizer_fn
    if isinstance(made, partial) and not made.args:
        made, options = made.func, made.keywords
    known = {"momentum", "weight_decay", "nesterov"}
    if made is not torch.optim.SGD or scheduler_fn is not None or not options.keys() <= known:
        return None
    return SGD(lr, **options)


def _clip(moving: Mapping[str, Tensor], most: float, clients: int) -> None:
    """Clip the norm of every client's gradient; `clients` is the number of axes for them."""
    gradients = [p.grad for p in moving.values() if p.grad is not None]
    squares = [gradient.flatten(clients).square().sum(-1) for gradient in gradients]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.copy_(times(factors, gradient))


def descend(
    problem: Any,
    objective: LocalObjective,
    *,
    lr: float,
    epochs: int,
    full_batch: bool,
    optimizer_fn: OptimizerFn = torch.optim.SGD,
    scheduler_fn: SchedulerFn | None = None,
    max_grad_norm: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take descent steps on f(u) + sum_k (c_k / 2 alpha) ||u - a_k||^2 from the model's parameters.

    The gradient of the proximal terms is added in every step: to the full gradient
    (GD, one step an epoch) or to that of every mini-batch (SGD, one step a batch).

    Parameters
    ----------
    problem : LocalProblem or Stack
        f of one client or of a stack of clients, and the models that are changed in place.
    objective : LocalObjective
        The terms, alpha, and what u consists of.
    lr : float
        Step size.
    epochs : int
        Passes over the data.
    full_batch : bool
        GD or SGD.
    optimizer_fn : callable (default: torch.optim.SGD)
        ``optimizer_fn(parameters, lr=lr)``; the plain SGD step is the papers'.
    scheduler_fn : callable, optional
        ``scheduler_fn(optimizer)``, a schedule of the step size with a step after every epoch.
    max_grad_norm : float, optional
        The norm to which the gradient of the whole objective is clipped in every step.

    Returns
    -------
    first, last, constant : Tensor of shape (), or (clients,)
        f before the first step on its batch, the mean over the last epoch of the batches' f, each
        before its step, and a constant prediction's f on the first batch, of mini-batches. NaN
        without an epoch.
    """
    first = last = constant = UNKNOWN
    problem.model.train()
    with problem.moving(objective) as parameters:
        optimizer: Any = sgd_of(lr, optimizer_fn, scheduler_fn)
        scheduler = None
        if optimizer is None:
            optimizer = _Given(optimizer_fn(list(parameters.values()), lr=lr))
            scheduler = None if scheduler_fn is None else scheduler_fn(optimizer.given)
        for epoch in range(epochs):
            if epoch and scheduler is not None:
                scheduler.step()
            steps = enumerate(problem.gradients(parameters, epoch, full_batch))
            for number, (moving, losses, sizes, constants) in steps:
                objective.complete_gradient(moving)
                if max_grad_norm is not None:
                    _clip(moving, max_grad_norm, losses.ndim)
                optimizer.step(moving)
                if epoch == number == 0:
                    first, constant = losses, constants.to(losses).expand_as(losses)
                if epoch == epochs - 1:
                    if number == 0:
                        total, seen = torch.zeros_like(losses), torch.zeros_like(losses)
                    rows(total, losses).add_(losses * sizes)
                    rows(seen, losses).add_(sizes)
        if epochs:
            last = total / seen
    return first, last, constant


class _Given:
    """The steps of an optimizer of PyTorch's."""

    def __init__(self, given: torch.optim.Optimizer) -> None:
        self.given = given

    def step(self, moving: Mapping[str, Tensor]) -> None:
        self.given.step()
        self.given.zero_grad()


def gradient_descent(problem: LocalProblem, objective: LocalObjective, **how: Any) -> float:
    """Take the steps of `descend`, of a client alone; note its first loss and return its last."""
    first, last, constant = descend(problem, objective, **how)
    if how["epochs"]:
        objective.note_loss(float(first), float(constant))
    return float(last)


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
        sgd = SGD(lr)
        for steps in range(max_steps + 1):
            loss = problem.set_gradient()
            objective.complete_gradient(parameters)
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            residual = sum(float((gradient.double() ** 2).sum()) for gradient in gradients)
            if residual <= tolerance / scale or steps == max_steps:
                break
            sgd.step(parameters)
        problem.model.zero_grad()
    return {"loss": loss, "residual": residual * scale, "steps": steps}
