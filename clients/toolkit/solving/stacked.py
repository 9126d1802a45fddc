"""Descent of many clients at once: their models in one stack of parameters, their batches in one.

What is computed for a client does not depend on who is beside it, to the last bit, so that it does
not matter which clients a node hosts or a round samples. That takes care in three places:

* A client's rows stand in blocks whose length is a function of its own batches (`CHUNK`), and all
  products are those of a batch of matrices, one for each block, that all begin on a line of the
  cache. Linear layers and functions of single entries are known to allow that.
* PyTorch's vectorised loops end in scalar code, which rounds exp and tanh in another way. The last
  slots of a stack are therefore padding, which belongs to no client.
* Everything is on one thread.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ..models.arrays import parameters_of
from .objective import LinearTerm, LocalObjective, ProjectedTerm, ProximalTerm
from .solvers import Batch, LocalProblem, LossFn, OptimizerFn, one_thread

CHUNK = 64
"""The most rows of a block; a step of a client with more samples has several blocks."""
_LINE = 64
"""Bytes of a line of the cache."""
_ROWS = 16
"""Blocks have a multiple of so many rows, so that those of numbers in float32 fill lines."""
_TAIL = 64
"""Entries at the end of a tensor in which vectorised code may end: 2 vectors of AVX-512, twice."""


class CannotStackError(Exception):
    """These clients cannot be trained in one stack; alone they may."""


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
    objective : LocalObjective
    epoch : callable
        Returns the batches of the next epoch.
    """

    problem: LocalProblem
    objective: LocalObjective
    epoch: Callable[[], Sequence[Batch]]


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


# ----------------------------------------------------------------------------------------------
# Losses by sample
# ----------------------------------------------------------------------------------------------

_MEANS = (
    *(nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
)
_FUNCTIONS = (
    *(F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss),
    *(F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)


def by_sample(loss_fn: LossFn | None) -> LossFn | None:
    """Return what gives the loss of every sample, where the mean of these is a loss function.

    Known are PyTorch's losses with ``reduction="mean"``, classes derived from them and the
    functions of the same names. None for all others, and for weights of classes, with which the
    mean is another.
    """
    known: Any = loss_fn
    if isinstance(known, _MEANS):
        if known.reduction != "mean" or getattr(known, "weight", None) is not None:
            return None
        single = copy.copy(known)
        single.reduction = "none"
        return single
    if any(known is function for function in _FUNCTIONS):
        return partial(known, reduction="none")
    return None


def _ignored(loss: LossFn) -> int | None:
    """Return the target that a loss leaves out of its mean."""
    if isinstance(loss, partial):
        return -100 if "ignore_index" in inspect.signature(loss.func).parameters else None
    return getattr(loss, "ignore_index", None)


def _sample_losses(loss: LossFn, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of stacked samples, shape (blocks, rows)."""
    classes = outputs.ndim == 3 and targets.ndim == 2 and not targets.is_floating_point()
    if (ignored := _ignored(loss)) is not None and classes and bool((targets == ignored).any()):
        raise CannotStackError
    if classes and ignored is not None:
        # Samples last: three times faster than classes last.
        return loss(outputs.transpose(1, 2), targets)
    if not classes and outputs.shape != targets.shape:  # would be broadcast over the batch
        raise CannotStackError
    values = loss(outputs.flatten(0, 1), targets.flatten(0, 1))
    if values.ndim == 0 or len(values) != outputs.shape[0] * outputs.shape[1]:
        raise CannotStackError
    return values.view(*outputs.shape[:2], -1).mean(2)


# ----------------------------------------------------------------------------------------------
# Models
# ----------------------------------------------------------------------------------------------


_ALONE = frozenset(
    (
        *("relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "tanh", "sigmoid", "hardtanh"),
        *("flatten", "view", "reshape", "squeeze", "unsqueeze", "__get__", "__len__", "size"),
        *("add", "sub", "mul", "div", "neg", "__add__", "__sub__", "__mul__", "__truediv__"),
    )
)
"""Functions whose results are those of every entry by itself, wherever it stands."""


class _SameBits(TorchFunctionMode):
    """Lets a model do what gives a client the same bits in every stack, and nothing else."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if getattr(func, "__name__", "") not in _ALONE:
            raise CannotStackError
        return func(*args, **kwargs)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``inputs @ weight.T + bias`` of one block of samples.

    How a product is rounded depends on where its matrices begin in memory, so these have sizes of
    which every one begins on a line of the cache. The weight is on the left, which is faster.
    """
    if inputs.ndim != 2:
        raise CannotStackError
    outputs, entries = len(weight), _LINE // weight.itemsize
    multiple = entries // math.gcd(entries, weight.shape[1])
    if fill := -outputs % multiple:
        weight = F.pad(weight, (0, 0, 0, fill))
    product = (weight @ inputs.t())[:outputs]
    return (product if bias is None else product + bias[:, None]).t()


def stacked_forward(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """Return a model as a function of stacked parameters and blocks of samples."""
    twin = copy.deepcopy(model).train()

    def call(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        with _SameBits():
            outputs: Tensor = functional_call(twin, parameters, (inputs,))
        return outputs

    return vmap(call)


class _Stack:
    """The parameters of some members, the terms of their objectives, and nobody's slots."""

    def __init__(self, members: Sequence[Member], spare: int, step: Step) -> None:
        self.members = members
        self.step = step
        self.forward = stacked_forward(members[0].problem.model)
        self.loss = by_sample(members[0].problem.loss_fn)
        models = [parameters_of(member.problem.model) for member in members]
        with members[0].objective.others_fixed(members[0].problem.model) as moving:
            self.moving = list(moving)
        self.spare = spare
        self.parameters = {
            name: self._stacked([parameters[name].detach() for parameters in models])
            for name in models[0]
        }
        self.momentum = (
            {name: torch.zeros_like(self.parameters[name]) for name in self.moving}
            if step.momentum
            else {}
        )
        terms = zip(*(member.objective.pulls for member in members), strict=True)
        self.terms = [self._term(like) for like in terms]

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([*tensors, *[tensors[-1]] * self.spare])

    def _term(self, like: Sequence[Any]) -> Callable[[dict[str, Tensor], Any], dict[str, Tensor]]:
        """Return the gradient of one term of all members' objectives."""
        first = like[0]
        dtype = next(iter(self.parameters.values())).dtype
        weights = self._stacked([torch.tensor(term.weight, dtype=dtype) for term in like])

        def weighted(gradient: Tensor, rows: Any) -> Tensor:
            return gradient * weights[rows].view(-1, *[1] * (gradient.ndim - 1))

        def by_name(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            names = [name for name in first.names if name in self.moving]
            return {name: self._stacked([of[name] for of in tensors]) for name in names}

        if isinstance(first, LinearTerm):
            slopes = by_name([term.slope for term in like])

            def slope(parameters: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
                return {name: weighted(stack[rows], rows) for name, stack in slopes.items()}

            return slope
        if isinstance(first, ProximalTerm):
            anchors = by_name([term.anchor for term in like])

            def pull(parameters: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
                return {n: weighted(parameters[n] - a[rows], rows) for n, a in anchors.items()}

            return pull
        assert isinstance(first, ProjectedTerm)
        if not all(torch.equal(term.projection, first.projection) for term in like):
            raise CannotStackError
        targets = self._stacked([term.target for term in like])
        names = list(first.names)

        def pull_image(parameters: dict[str, Tensor], rows: Any) -> dict[str, Tensor]:
            flat = torch.cat([parameters[name].flatten(1) for name in names], 1)
            matrix = first.projection.expand(len(flat), -1, -1)
            gap = (matrix @ flat.to(matrix.dtype)[:, :, None]).squeeze(2) - targets[rows]
            psi = first.slope(gap)
            gradient = weighted((psi[:, None, :] @ matrix).squeeze(1), rows).to(flat.dtype)
            parts = torch.split(gradient, [parameters[n][0].numel() for n in names], 1)
            return {n: part.view_as(parameters[n]) for n, part in zip(names, parts, strict=True)}

        return pull_image

    def take(self, block: _Block) -> Tensor:
        """Take one step of those who have rows in a block; return their losses before it."""
        assert self.loss is not None
        active = block.rows
        parameters = {name: stack[active] for name, stack in self.parameters.items()}
        used = parameters
        if block.owner is not None:
            used = {name: stack[block.owner] for name, stack in parameters.items()}
        leaves = {n: t.detach().requires_grad_(n in self.moving) for n, t in used.items()}
        losses = _sample_losses(self.loss, self.forward(leaves, block.inputs), block.targets)
        found = torch.autograd.grad(
            losses, [leaves[name] for name in self.moving], block.weights, allow_unused=True
        )
        gradients = {
            name: torch.zeros_like(parameters[name]) if gradient is None else block.summed(gradient)
            for name, gradient in zip(self.moving, found, strict=True)
        }
        with torch.no_grad():
            for term in self.terms:
                for name, gradient in term(parameters, active).items():
                    gradients[name] += gradient
            self._move(parameters, gradients, active)
            return block.summed((losses * block.weights).sum(1))

    def _move(self, parameters: dict[str, Tensor], gradients: dict[str, Tensor], rows: Any) -> None:
        """Step as `torch.optim.SGD` does; products apart from sums, which a tail might fuse."""
        step = self.step
        if step.max_grad_norm is not None:
            squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
            # Not a sum over an axis, whose order depends on how many columns there are.
            norms = functools.reduce(torch.add, squares).sqrt()
            factors = (step.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
            for gradient in gradients.values():
                gradient *= factors.view(-1, *[1] * (gradient.ndim - 1))
        for name, gradient in gradients.items():
            if step.weight_decay:
                gradient = gradient + step.weight_decay * parameters[name]
            if step.momentum:
                velocity = self.momentum[name][rows] * step.momentum + gradient
                self.momentum[name][rows] = velocity
                gradient = gradient + step.momentum * velocity if step.nesterov else velocity
            self.parameters[name][rows] = parameters[name] - gradient * step.lr

    def put_back(self) -> None:
        """Give the members' models their parameters."""
        with torch.no_grad():
            for slot, member in enumerate(self.members):
                parameters = parameters_of(member.problem.model)
                for name in self.moving:
                    parameters[name].copy_(self.parameters[name][slot])


# ----------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------


def rows_of(batches: Sequence[Batch], full_batch: bool) -> int:
    """Return the length of a client's blocks: that of its largest step, but not above `CHUNK`."""
    sizes = [batch.size for batch in batches]
    largest = sum(sizes) if full_batch else max(sizes)
    return min(-(-largest // _ROWS) * _ROWS, CHUNK)


@dataclass(frozen=True)
class _Block:
    """What one step of some members is taken on.

    Attributes
    ----------
    rows : slice or Tensor
        Whose step it is, by slot, nobody's at the end.
    owner : Tensor of shape (blocks,), or None
        To whom of these a block belongs; None where each has one.
    inputs, targets : Tensor of shape (blocks, rows, ...)
    weights : Tensor of shape (blocks, rows)
        1/n of a client's samples, 0 of what fills a block up.
    """

    rows: Any
    owner: Tensor | None
    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def summed(self, of_blocks: Tensor) -> Tensor:
        """Return the sum of something over every member's blocks."""
        if self.owner is None:
            return of_blocks
        count = int(self.owner[-1]) + 1
        total = torch.zeros((count, *of_blocks.shape[1:]), dtype=of_blocks.dtype)
        return total.index_add_(0, self.owner, of_blocks)


def _block(
    steps: Sequence[tuple[int, Sequence[Batch]]], slots: int, length: int, spare: int, like: Tensor
) -> _Block:
    """Stack what some members, given by slot, take their step on."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    owner: list[int] = []
    counts: list[tuple[int, int]] = []
    for place, (_, batches) in enumerate(steps):
        size = sum(batch.size for batch in batches)
        blocks = -(-size // length)
        for tensors, whole in (
            ([batch.inputs for batch in batches], inputs),
            ([batch.targets for batch in batches], targets),
        ):
            whole += tensors
            if fill := blocks * length - size:  # with rows of its own: finite where these are
                whole.append(tensors[0][:1].expand(fill, *tensors[0].shape[1:]))
        owner += [place] * blocks
        counts.append((size, blocks * length - size))
    extra = spare * length
    for whole in (inputs, targets):
        whole.append(whole[-1][-1:].expand(extra, *whole[-1].shape[1:]))
    owner += range(len(steps), len(steps) + spare)
    weights = torch.zeros(len(owner) * length, dtype=like.dtype)
    at = 0
    for size, fill in counts:
        weights[at : at + size] = 1 / size
        at += size + fill
    everybody = len(steps) == slots
    rows = [slot for slot, _ in steps] + list(range(slots, slots + spare))

    def folded(parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts)
        return whole.view(len(owner), length, *whole.shape[1:])

    return _Block(
        slice(None) if everybody else torch.tensor(rows),
        None if len(owner) == len(steps) + spare else torch.tensor(owner),
        folded(inputs),
        folded(targets),
        weights.view(-1, length),
    )


def descend(
    members: Sequence[Member], *, step: Step, epochs: int, full_batch: bool, length: int
) -> list[float]:
    """Do for all members what `solvers.gradient_descent` does for one, equal to rounding.

    Parameters
    ----------
    members : sequence of Member
        Of one architecture, loss and kind of objective, with samples of one shape.
    step : Step
    epochs : int
    full_batch : bool
        As in `gradient_descent`.
    length : int
        `rows_of` their batches.

    Returns
    -------
    list of float
        What `gradient_descent` returns, for each.

    Raises
    ------
    CannotStackError
        If samples cannot be told from what fills the blocks; nothing has changed then, as with
        every other error.
    """
    with one_thread():
        spare = -(-_TAIL // length)
        stack = _Stack(members, spare, step)
        like = next(iter(stack.parameters.values()))
        slots = len(members)
        firsts: list[float] = []
        taken = [0] * slots
        whole: _Block | None = None
        lists = all(isinstance(member.problem.loader, list | tuple) for member in members)
        for _ in range(epochs):
            totals, seen = [0.0] * slots, [0] * slots
            if full_batch:
                if whole is None or not lists:
                    parts = [(slot, member.epoch()) for slot, member in enumerate(members)]
                    whole = _block(parts, slots, length, spare, like)
                totals, seen = stack.take(whole).tolist()[:slots], [1] * slots
                firsts = firsts or totals
                taken = [count + 1 for count in taken]
                continue
            plans = [member.epoch() for member in members]
            taken = [count + len(plan) for count, plan in zip(taken, plans, strict=True)]
            for number in range(max(map(len, plans))):
                now = [(s, [plan[number]]) for s, plan in enumerate(plans) if number < len(plan)]
                losses = stack.take(_block(now, slots, length, spare, like)).tolist()
                firsts = firsts or losses[:slots]
                for (slot, (batch,)), loss in zip(now, losses, strict=False):
                    totals[slot] += loss * batch.size
                    seen[slot] += batch.size
        stack.put_back()
    for member, first, steps in zip(members, firsts, taken, strict=False):
        member.objective.note_loss(first)
        member.objective.steps = steps
    if not epochs:
        return [float("nan")] * slots
    return [total / count for total, count in zip(totals, seen, strict=True)]
