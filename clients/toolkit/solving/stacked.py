"""Descent of many clients at once: their models in one stack of parameters, their batches in one.

What is computed for a client does not depend on who is beside it, to the last bit, so that it does
not matter which clients a node hosts or a round samples. That takes care in four places:

* A client's samples fill rows whose number is a function of its own batches' sizes (`rows_of`).
* Products are those of a batch of two matrices or more, since one by itself is rounded in another
  way, and all of these begin on a line of the cache.
* PyTorch's vectorised loops end in scalar code, which rounds exp and tanh, and sums of products, in
  another way. A client's parameters are therefore padded to whole vectors, and the last slots of a
  stack belong to nobody.
* Everything is on one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from .chains import Chain, Room
from .objective import LinearTerm, LocalObjective, ProjectedTerm, ProximalTerm
from .sample_losses import CannotStackError, sample_losses
from .solvers import Epoch, LocalProblem, OptimizerFn, one_thread
from .vmapped import AnyModel

_TAIL = 64
"""Numbers at the end of a tensor in which vectorised code may end: 2 vectors of AVX-512, twice."""


@dataclass(frozen=True)
class Step:
    """How a client's optimizer steps: as `torch.optim.SGD`.

    Attributes
    ----------
    lr : float
    momentum, weight_decay : float
    nesterov : bool
    max_grad_norm : float or None
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class Member:
    """A client in a stack.

    Attributes
    ----------
    problem : LocalProblem
        Its model is where it starts from and where it ends.
    parameters : mapping of str to Parameter
        The model's.
    objective : LocalObjective
    epoch : callable
        Returns the samples of the next epoch.
    """

    problem: LocalProblem
    parameters: Mapping[str, nn.Parameter]
    objective: LocalObjective
    epoch: Callable[[], Epoch]


def plain_step(
    lr: float, optimizer_fn: OptimizerFn, scheduler_fn: Any, max_grad_norm: float | None
) -> Step | None:
    """Return how a client steps; None if it is not by SGD with one step size."""
    options: dict[str, Any] = {}
    made: Any = optimizer_fn
    if isinstance(made, partial) and not made.args:
        made, options = made.func, made.keywords
    known = {"momentum", "weight_decay", "nesterov"}
    if made is not torch.optim.SGD or scheduler_fn is not None or not options.keys() <= known:
        return None
    return Step(lr, max_grad_norm=max_grad_norm, **options)


StackedModel = Chain | AnyModel
"""Models of one architecture, whose parameters lie in blocks."""


def rows_of(sizes: Sequence[int], full_batch: bool, unit: int) -> int:
    """Return how many rows a client's largest step fills: up to a quarter more than its samples.

    Not as many as it has samples, so that clients of like size share a stack.
    """
    largest = sum(sizes) if full_batch else max(sizes)
    while largest > 8 * unit:
        unit *= 2
    return -(-largest // unit) * unit


@dataclass(frozen=True)
class Samples:
    """What the first members of a stack take a step on, and nobody's slots.

    Attributes
    ----------
    sizes : Tensor of shape (members,)
    inputs, targets : Tensor of shape (slots, rows, ...)
    weights : Tensor of shape (slots, rows)
        1/n of a client's samples, 0 of what fills its rows up.
    """

    sizes: Tensor
    inputs: Tensor
    targets: Tensor
    weights: Tensor


def steps_of(
    epochs: Sequence[Epoch], whole: bool, rows: int, spare: int, dtype: torch.dtype
) -> Iterator[Samples]:
    """Yield what members take each step of an epoch on, those with the most batches first.

    `whole`: they take one step, each on all of its samples.
    """
    sizes = [[sum(epoch.sizes)] if whole else epoch.sizes for epoch in epochs]
    if max(map(max, sizes)) > rows:  # of a loader whose epochs differ
        raise CannotStackError
    inputs = torch.cat([epoch.inputs for epoch in epochs])
    targets = torch.cat([epoch.targets for epoch in epochs])
    starts = torch.tensor([0, *accumulate(len(epoch.targets) for epoch in epochs)])
    row = torch.arange(rows)
    for number in range(len(sizes[0])):
        counts = torch.tensor([own[number] for own in sizes if number < len(own)])
        members, within = len(counts), row < counts[:, None]
        # What fills the rows up is finite where these are: a sample of the step's own.
        places = torch.empty(members + spare, rows, dtype=torch.int64)
        places[:members] = starts[:members, None] + row.where(within, 0)
        places[members:] = places[members - 1, -1]
        weights = torch.zeros((members + spare, rows), dtype=dtype)
        weights[:members] = within / counts.to(dtype)[:, None]
        starts[:members] += counts
        x, y = (
            values.index_select(0, places.view(-1)).view(-1, rows, *values.shape[1:])
            for values in (inputs, targets)
        )
        yield Samples(counts, x, y, weights)


def spare_slots(rows: int, model: StackedModel) -> int:
    """Return how many slots at the end of a stack are nobody's."""
    return -(-_TAIL // (rows * model.least))


def filled(
    model: StackedModel,
    of_members: Sequence[Mapping[str, Tensor]],
    names: Collection[str],
    spare: int,
) -> dict[str, Tensor]:
    """Return blocks of what each member has for some parameters, and nobody's slots."""
    slots = len(of_members) + spare
    blocks: dict[str, Tensor] = {}
    for name in names:
        block, dtype = model.block_of(name), of_members[0][name].dtype
        if block not in blocks:
            blocks[block] = torch.zeros(slots, *model.blocks[block], dtype=dtype)
        tensors = [own[name].detach() for own in of_members]
        part = model.part(name, blocks[block])
        torch._foreach_copy_(part.unbind(), [*tensors, *[tensors[-1]] * spare])
    return blocks


class _Stack:
    """The parameters of some members, the terms of their objectives, and nobody's slots."""

    def __init__(
        self, members: Sequence[Member], model: StackedModel, spare: int, step: Step
    ) -> None:
        self.model = model
        self.step = step
        self.spare = spare
        self._room = Room()
        self._loss = sample_losses(members[0].problem.loss_fn)
        self._models = [member.parameters for member in members]
        self._names = list(members[0].objective.moving_of(self._models[0]))
        self.moving = list(dict.fromkeys(map(model.block_of, self._names)))
        self.dtype = next(iter(self._models[0].values())).dtype
        self.blocks = filled(model, self._models, self._models[0], spare)
        momentum = self.moving if step.momentum else []
        self.momentum = {name: torch.zeros_like(self.blocks[name]) for name in momentum}
        terms = zip(*(member.objective.pulls for member in members), strict=True)
        self._terms = [self._term(like) for like in terms]

    def _term(self, like: Sequence[Any]) -> Callable[[dict[str, Tensor], dict[str, Tensor]], None]:
        """Return what adds the gradient of one term of all members' objectives."""
        first = like[0]
        weights = torch.tensor([term.weight for term in like], dtype=self.dtype)
        weights = torch.cat([weights, weights[-1:].expand(self.spare)])
        moving = [name for name in first.names if name in self._names]

        def weighted(values: Tensor) -> Tensor:
            return values * weights[: len(values)].view(-1, *[1] * (values.ndim - 1))

        if isinstance(first, LinearTerm):
            slopes = filled(self.model, [term.slope for term in like], moving, self.spare)
            slopes = {name: weighted(slope) for name, slope in slopes.items()}

            def slope(blocks: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
                for name, constant in slopes.items():
                    gradients[name] += constant[: len(gradients[name])]

            return slope
        if isinstance(first, ProximalTerm):
            anchors = filled(self.model, [term.anchor for term in like], moving, self.spare)

            def pull(blocks: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
                for name, anchor in anchors.items():
                    gap = blocks[name] - anchor[: len(blocks[name])]
                    gradients[name] += weighted(gap)

            return pull
        assert isinstance(first, ProjectedTerm)
        if not all(torch.equal(term.projection, first.projection) for term in like):
            raise CannotStackError
        targets = torch.stack([*(term.target for term in like), *[like[-1].target] * self.spare])
        matrices = self._columns(first)
        matrix = torch.cat([columns.flatten(1) for columns in matrices.values()], 1)

        def pull_image(blocks: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
            flat = torch.cat([blocks[name].flatten(1) for name in matrices], 1).to(matrix.dtype)
            each = matrix.expand(len(flat), -1, -1)
            gap = (each @ flat[:, :, None]).squeeze(2) - targets[: len(flat)]
            slopes = weighted((first.slope(gap)[:, None, :] @ each).squeeze(1))
            parts = torch.split(slopes, [m[0].numel() for m in matrices.values()], 1)
            for name, part in zip(matrices, parts, strict=True):
                gradients[name] += part.view_as(gradients[name])

        return pull_image

    def _columns(self, term: ProjectedTerm) -> dict[str, Tensor]:
        """Return the columns of a projection as blocks."""
        shapes = [self._models[0][name].shape for name in term.names]
        parts = torch.split(term.projection, [shape.numel() for shape in shapes], 1)
        blocks: dict[str, Tensor] = {}
        for name, shape, part in zip(term.names, shapes, parts, strict=True):
            block = self.model.block_of(name)
            empty = part.new_zeros(len(part), *self.model.blocks[block])
            self.model.part(name, blocks.setdefault(block, empty)).copy_(part.view(-1, *shape))
        return blocks

    def take(self, samples: Samples) -> Tensor:
        """Take one step of those who have samples; return their losses before it."""
        slots, count = len(samples.inputs), len(samples.sizes)
        blocks = {name: block[:slots] for name, block in self.blocks.items()}
        losses, gradients = self.model.gradients(
            blocks,
            self.moving,
            samples.inputs,
            lambda outputs: self._loss(outputs, samples.targets),
            samples.weights,
            self._room,
        )
        for add in self._terms:
            add(blocks, gradients)
        self._move(gradients, count)
        return (losses * samples.weights).sum(1)[:count]

    def _move(self, gradients: dict[str, Tensor], count: int) -> None:
        """Let the first members step as `torch.optim.SGD` does."""
        step = self.step
        if step.max_grad_norm is not None:
            squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
            # Not a sum over an axis, whose order depends on how many columns there are.
            norms = functools.reduce(torch.add, squares).sqrt()
            factors = (step.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
            for gradient in gradients.values():
                gradient *= factors.view(-1, *[1] * (gradient.ndim - 1))
        for name, gradient in gradients.items():
            moved, along = self.blocks[name][:count], gradient[:count]
            if step.weight_decay:
                along = along.add_(moved, alpha=step.weight_decay)
            if step.momentum:
                velocity = self.momentum[name][:count].mul_(step.momentum).add_(along)
                along = along.add_(velocity, alpha=step.momentum) if step.nesterov else velocity
            moved.add_(along, alpha=-step.lr)

    def put_back(self) -> None:
        """Give the members' models their parameters."""
        with torch.no_grad():
            for name in self._names:
                part = self.model.part(name, self.blocks[self.model.block_of(name)])
                own: list[Tensor] = [parameters[name] for parameters in self._models]
                torch._foreach_copy_(own, part.unbind()[: len(own)])


def descend(
    members: Sequence[Member],
    *,
    model: StackedModel,
    step: Step,
    epochs: int,
    full_batch: bool,
    rows: int,
) -> list[float]:
    """Do for all members what `solvers.gradient_descent` does for one, equal to rounding.

    Parameters
    ----------
    members : sequence of Member
        Of one architecture, loss and kind of objective, with samples of one shape.
    model : StackedModel
        The architecture.
    step : Step
    epochs : int
    full_batch : bool
        As in `gradient_descent`.
    rows : int
        `rows_of` their batches' sizes.

    Returns
    -------
    list of float
        What `gradient_descent` returns, for each.

    Raises
    ------
    CannotStackError
        If samples cannot be told from what fills the rows, or the epochs of a loader differ;
        nothing has changed then, as with every other error.
    """
    with one_thread():
        plans = [member.epoch() for member in members]
        # Those with the most batches come first, so that who takes a step is the first so many.
        order = sorted(range(len(members)), key=lambda place: -len(plans[place].sizes))
        members, plans = [members[place] for place in order], [plans[place] for place in order]
        spare = spare_slots(rows, model)
        stack = _Stack(members, model, spare, step)
        lists = all(isinstance(member.problem.loader, list | tuple) for member in members)
        taken = [0] * len(members)
        firsts: Tensor | None = None
        drawn: Iterable[Samples] = ()
        for epoch in range(epochs):
            if not epoch or not lists:
                plans = plans if not epoch else [member.epoch() for member in members]
                counts = [1 if full_batch else len(plan.sizes) for plan in plans]
                if counts != sorted(counts, reverse=True):
                    raise CannotStackError
                drawn = steps_of(plans, full_batch, rows, spare, stack.dtype)
                if lists and epochs > 1:
                    drawn = list(drawn)
            totals = torch.zeros(len(members), dtype=torch.float64)
            seen = torch.zeros(len(members), dtype=torch.float64)
            for samples in drawn:
                losses, count = stack.take(samples), len(samples.sizes)
                totals[:count] += losses * samples.sizes
                seen[:count] += samples.sizes
                firsts = losses if firsts is None else firsts
            taken = [before + count for before, count in zip(taken, counts, strict=True)]
        stack.put_back()
    assert firsts is not None
    for member, first, steps in zip(members, firsts.tolist(), taken, strict=True):
        member.objective.note_loss(first)
        member.objective.steps = steps
    found = dict(zip(order, (totals / seen).tolist(), strict=True))
    return [found[place] for place in range(len(order))]
