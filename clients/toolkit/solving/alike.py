"""Which clients can share a stack: a signature of their models, and one trial of each."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..models.arrays import tensors_of
from .objective import LocalObjective
from .solvers import Epoch, LocalProblem, descend
from .stack import CannotStackError, Samples, Stack

_OF_ALL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


_KEYS: dict[Hashable, int] = {}


def signature(model: nn.Module, loss_fn: Any) -> int | None:
    """Return a number for the models and losses that are the same in every setting and shape.

    None is for a client that cannot be told from others, or not be stacked.
    """
    try:
        return _KEYS.setdefault((_of_model(model), _of_loss(loss_fn)), len(_KEYS))
    except CannotStackError:
        return None


def _of_model(model: nn.Module) -> Hashable:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not parameters or any(
        p.dtype not in (torch.float32, torch.float64) for p in parameters.values()
    ):
        raise CannotStackError("its parameters are not in single or double precision")
    first: dict[int, str] = {}
    of_parameters = tuple(
        (first.setdefault(id(p), name), p.shape, p.dtype, p.requires_grad)
        for name, p in parameters.items()
    )
    modules = tuple((name, _of_module(module)) for name, module in model.named_modules())
    return modules, of_parameters


def _of_module(module: nn.Module) -> Hashable:
    if any(buffer is not None for buffer in module._buffers.values()):
        # Batch norm's move with every batch, in place, and make samples depend on each other.
        raise CannotStackError("it has buffers, such as those of batch norm")
    before, after = module._forward_pre_hooks, module._forward_hooks
    if before or after or module._backward_pre_hooks or module._backward_hooks:
        raise CannotStackError("it has hooks")
    return _settings(module)


def _settings(module: nn.Module) -> Hashable:
    public = {n: v for n, v in vars(module).items() if n not in _OF_ALL and n[0] != "_"}
    return type(module), tuple((name, _value(value)) for name, value in public.items())


def _value(value: Any) -> Hashable:
    """Return what an attribute is compared by."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return (type(value), value)
    if isinstance(value, FunctionType | BuiltinFunctionType) and "<" not in value.__qualname__:
        return value  # a function of a module: neither a lambda nor a closure
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    raise CannotStackError(f"a setting is a {type(value).__name__}, which cannot be compared")


def _of_loss(loss_fn: Any) -> Hashable:
    if loss_fn is None:
        raise CannotStackError("it returns its loss")
    if not isinstance(loss_fn, nn.Module):
        return _value(loss_fn)
    if tensors_of(loss_fn):
        raise CannotStackError("its loss has weights")
    return _settings(loss_fn)


_TRIED: dict[Hashable, bool] = {}


def can_stack(key: Hashable, problem: LocalProblem, epoch: Epoch) -> bool:
    """Return whether clients with a signature get in a stack what each gets alone.

    It is tried once in a process for each signature and kind of samples: a step of two models, one
    of them on fewer samples, so that its rows are filled up.

    Raises
    ------
    Exception
        What the client raises alone, which says nothing about others.
    """
    key = key, epoch.inputs.shape[1:], epoch.inputs.dtype, epoch.targets.dtype
    if key not in _TRIED:
        devices = [problem.device] if problem.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            _TRIED[key] = _trial(problem, epoch.inputs[:4], epoch.targets[:4])
    return _TRIED[key]


def _trial(problem: LocalProblem, inputs: Tensor, targets: Tensor) -> bool:
    problem = replace(problem, loss_fn=_without_hooks(problem.loss_fn))
    if len(targets) == 1:
        inputs, targets = torch.cat([inputs, inputs]), torch.cat([targets, targets])
    less = len(targets) - 1
    epochs = [Epoch(inputs, targets, [less + 1]), Epoch(inputs[:less], targets[:less], [less])]
    models = [copy.deepcopy(problem.model) for _ in epochs]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.5)
    begin = stack_of([dict(model.named_parameters()) for model in models])
    found = {name: tensor.clone() for name, tensor in begin.items()}
    step = partial(descend, objective=LocalObjective(), lr=1.0, epochs=1, full_batch=False)
    losses = [
        step(replace(problem, model=model, loader=[epoch[:2]], seed=1))[0]
        for model, epoch in zip(models, epochs, strict=True)
    ]
    after = stack_of([dict(model.named_parameters()) for model in models])
    if not all(torch.isfinite(tensor).all() for tensor in (*losses, *after.values())):
        raise ValueError("A step of the client ends in numbers that are not finite.")
    batches = Samples(epochs, False, losses[0].dtype).batches
    stack = Stack(models[0], problem.loss_fn, found, [1, 1], lambda _: batches([None]))
    try:
        theirs, *_ = step(stack)
    except Exception:  # vmap cannot go through it
        return False
    pairs = [(found[name] - begin[name], after[name] - begin[name]) for name in begin]
    return all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-7)
        for one, other in [*pairs, (theirs, torch.stack(losses))]
    )


def _without_hooks(loss_fn: Any) -> Any:
    """Return a loss that calls no hook: a trial is no step of the client."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    plain = copy.copy(loss_fn)
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
        setattr(plain, name, OrderedDict())
    return plain


def stack_of(clients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return named tensors of several clients, each as one tensor."""
    return {name: torch.stack([own[name].detach() for own in clients]) for name in clients[0]}
