"""Clients of one node that train together: who can, and the round of all of them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..errors import plain_errors
from ..models.arrays import parameters_of
from .objective import LocalObjective, ProjectedTerm
from .solvers import Batch, LocalProblem, OptimizerFn
from .stacked import Member, Step, by_sample, descend, plain_step, rows_of, stacked_forward
from .steps import Minimisation, Steps

Scalars = dict[str, Any]
Result = tuple[list[NDArray[Any]], int, Scalars]
Choice = Literal["auto"] | bool

LARGEST = 30_000
"""Parameters of a model up to which stacks are faster on a processor; see docs/scaling.md."""
STACK_BYTES = 2**28
"""Of samples that one stack holds, unless a client alone has more."""

# Layers that treat every sample by itself, in training too, and of which stacks have the same bits.
_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid),
)


class Trains(Protocol):
    """What is asked of a client: a `TorchClient`."""

    model: nn.Module
    train_problem: LocalProblem
    full_batch: bool
    optimizer_fn: OptimizerFn
    scheduler_fn: Any
    max_grad_norm: float | None
    device: torch.device

    @property
    def own_loop(self) -> bool:
        """Whether its round is not that of the methods here."""

    def taking_part(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Result]:
        """Return its round in steps."""

    def solution(self, asked: Minimisation) -> Scalars:
        """Do a step alone."""

    def problem_of(self, asked: Minimisation) -> LocalProblem:
        """Return the loss that a step is taken on."""

    def note_first_loss(self, objective: LocalObjective) -> None:
        """Keep the loss before the first step."""


# ----------------------------------------------------------------------------------------------
# Who can train with whom
# ----------------------------------------------------------------------------------------------


class _OwnValueError(Exception):
    """Something that cannot be compared between clients."""


def _value(value: Any) -> Hashable:
    """Return what an attribute is compared by."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return (type(value), value)
    if isinstance(value, FunctionType | BuiltinFunctionType) and "<" not in value.__qualname__:
        return value  # of a module: not a lambda, nor one with variables of its own
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    raise _OwnValueError


def _module(module: nn.Module) -> Hashable:
    """Return what a module is compared by: its class and attributes, and those of its parts."""
    if not (type(module) in _LAYERS or _own_class(module)) or list(module.buffers(recurse=False)):
        raise _OwnValueError
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(vars(module)[name] for name in hooks):
        raise _OwnValueError
    public = {n: v for n, v in vars(module).items() if not n.startswith("_") and n != "training"}
    own = tuple((name, _value(value)) for name, value in sorted(public.items()))
    return type(module), own, tuple((n, _module(part)) for n, part in module.named_children())


def _own_class(module: nn.Module) -> bool:
    """Return whether a module's class is somebody's own, of which nothing is known."""
    return not type(module).__module__.startswith("torch.")


_TRIED: dict[Hashable, bool] = {}


def _stacks(model: nn.Module, looks: Hashable, inputs: Tensor) -> bool:
    """Return whether a model gives in a stack what it gives by itself, sample by sample.

    Of PyTorch's own layers that is known. A class of somebody's own is tried out, once a process.
    """
    if not any(_own_class(module) for module in model.modules()):
        return True
    key = looks, tuple(inputs.shape[1:]), inputs.dtype
    if key not in _TRIED:
        _TRIED[key] = _tried(copy.deepcopy(model).train(), inputs[:3])
    return _TRIED[key]


def _tried(model: nn.Module, inputs: Tensor) -> bool:
    count = len(inputs)
    with torch.random.fork_rng([]), torch.no_grad():
        try:
            expected = model(inputs)
            others = torch.cat([inputs, 2 * inputs[:1], inputs.flip(0)])
            stack = {n: torch.stack([p, p]) for n, p in model.named_parameters()}
            found = [
                model(inputs[:1]),
                model(others)[:count],
                *stacked_forward(model)(stack, torch.stack([inputs, inputs])),
            ]
            return all(torch.allclose(f, expected[: len(f)], 1e-3, 1e-4) for f in found)
        except Exception:  # it does not take such inputs, or vmap cannot go through it
            return False


def _parameters(model: nn.Module) -> Hashable:
    named = list(model.named_parameters(remove_duplicate=False))
    if len(named) != len(parameters_of(model)) or len({p.dtype for _, p in named}) != 1:
        raise _OwnValueError  # tied, or mixed
    if not all(p.dtype in (torch.float32, torch.float64) for _, p in named):
        raise _OwnValueError
    return tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named)


def _loss(loss_fn: Any) -> Hashable:
    if not isinstance(loss_fn, nn.Module):
        return id(loss_fn)
    if next(loss_fn.buffers(), None) is not None or next(loss_fn.parameters(), None) is not None:
        raise _OwnValueError
    public = {n: v for n, v in vars(loss_fn).items() if not n.startswith("_")}
    return type(loss_fn), tuple((n, _value(v)) for n, v in sorted(public.items()))


def _term(term: Any) -> Hashable:
    own = (term.projection.shape, term.power) if isinstance(term, ProjectedTerm) else None
    return type(term), tuple(term.names), own


def _samples(batches: Sequence[Batch]) -> Hashable:
    """Return shape and dtype of a client's samples."""
    kinds = set()
    for batch in batches:
        for values in (batch.inputs, batch.targets):
            if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != batch.size:
                raise _OwnValueError
        x, y = batch.inputs, batch.targets
        kinds.add((tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype))
    if len(kinds) != 1 or not all(batch.size for batch in batches):
        raise _OwnValueError
    return kinds.pop()


def _worth_it(model: nn.Module) -> bool:
    """Return whether stacks are faster, by what was measured: docs/scaling.md."""
    return sum(parameter.numel() for parameter in model.parameters()) <= LARGEST


# ----------------------------------------------------------------------------------------------
# A client on its way through a round
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """How a descent is done in a stack; those of one `key` can share it."""

    key: Hashable
    step: Step
    length: int
    bytes: int


class _Session:
    """A client that takes part in a round, with its random numbers, which only it uses."""

    def __init__(self, client: Trains, parameters: list[NDArray[Any]], config: Scalars) -> None:
        self.client = client
        self._steps = client.taking_part(parameters, config)
        self._generator = getattr(client.train_problem.loader, "generator", None)
        self._random: tuple[Tensor, Tensor | None] | None = None
        self._first: list[Batch] | None = None
        self.asked: Minimisation | None = None
        self.result: Result | BaseException | None = None

    def advance(self, metrics: Scalars | None) -> None:
        """Go on to the next descent, or to the end."""
        self.asked = None
        try:
            with plain_errors(), self._own_random():
                try:
                    # Typed for what is sent to a generator that runs; this may be its first step.
                    self.asked = self._steps.send(metrics)  # type: ignore[arg-type]
                except StopIteration as done:
                    self.result = done.value
            self._at_step = self._random
        except Interrupted:
            raise
        except BaseException as error:
            self.result = error

    def close(self) -> None:
        """Leave the contexts of a method that did not come to its end, and nothing else changed."""
        with self._own_random():
            self._steps.close()

    def outcome(self) -> Result | BaseException:
        """Return what came of it."""
        assert self.result is not None
        return self.result

    def alone(self) -> None:
        """Do the descent by itself, as if nothing had been tried before."""
        assert self.asked is not None
        self._rewind()
        try:
            with plain_errors(), self._own_random():
                metrics = self.client.solution(self.asked)
        except Interrupted:
            raise
        except BaseException as error:
            self.asked, self.result = None, error
        else:
            self.advance(metrics)

    def plan(self, choice: Choice) -> _Plan | None:
        """Return how its descent goes in a stack; None if it cannot, or must not."""
        assert self.asked is not None
        client, problem, objective = self.client, self._problem(), self.asked.objective
        if client.own_loop or client.device.type != "cpu" or by_sample(problem.loss_fn) is None:
            return None
        if not self.asked.epochs or (choice == "auto" and not _worth_it(client.model)):
            return None
        step = plain_step(
            self.asked.lr, client.optimizer_fn, client.scheduler_fn, client.max_grad_norm
        )
        if step is None:
            return None
        try:
            looks = _module(client.model), _parameters(client.model), _loss(problem.loss_fn)
            with objective.others_fixed(client.model) as moving:
                names = tuple(moving)
            self._rewind()
            first = self._epoch()
            key = (
                *looks,
                *(_samples(first), step, self.asked.epochs, client.full_batch, names),
                tuple(map(_term, objective.pulls)),
                rows_of(first, client.full_batch),
            )
        except Exception:  # whatever it is, alone it is raised again
            return None
        self._first = first
        if not _stacks(client.model, key[:2], first[0].inputs):
            return None
        size = sum(batch.inputs.nbytes + batch.targets.nbytes for batch in first)
        return _Plan(key, step, rows_of(first, client.full_batch), size)

    def member(self) -> Member:
        """Return what a stack needs; it may be asked for anew."""
        assert self.asked is not None
        if self._first is None:
            self._rewind()
        return Member(self._problem(), self.asked.objective, self._epoch)

    def done(self, loss: float) -> None:
        """Go on after a descent that was done in a stack."""
        assert self.asked is not None
        self.client.note_first_loss(self.asked.objective)
        self.advance({"loss": loss})

    def _epoch(self) -> list[Batch]:
        """Return the batches of the next epoch, in the client's own order."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        with self._own_random():
            return list(self._problem().batches())

    def _problem(self) -> LocalProblem:
        assert self.asked is not None
        return self.client.problem_of(self.asked)

    def _rewind(self) -> None:
        self._random, self._first = self._at_step, None

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let torch's random numbers be this client's, from where it last was."""
        outside = torch.get_rng_state()
        if self._random is not None:
            torch.set_rng_state(self._random[0])
            if self._generator is not None and self._random[1] is not None:
                self._generator.set_state(self._random[1])
        try:
            yield
        finally:
            own = None if self._generator is None else self._generator.get_state()
            self._random = torch.get_rng_state(), own
            torch.set_rng_state(outside)


# ----------------------------------------------------------------------------------------------
# The round of all
# ----------------------------------------------------------------------------------------------


def fit_together(
    jobs: Sequence[tuple[Any, list[NDArray[Any]], Scalars]], choice: Choice
) -> list[Result | BaseException]:
    """Do for several clients what their `fit` does, with one stacked descent where they are alike.

    Parameters
    ----------
    jobs : sequence of (TorchClient, parameters, config)
        Who is to do what. A client may be there once.
    choice : {"auto", True}
        Whether only those train together whose models gain by it.

    Returns
    -------
    list of (arrays, num_examples, metrics) or BaseException
        What `fit` returned or raised, in the order of the jobs.
    """
    sessions = [_Session(*job) for job in jobs]
    try:
        for session in sessions:
            session.advance(None)
        while waiting := [session for session in sessions if session.asked is not None]:
            _answer(waiting, choice)
    finally:
        for session in sessions:
            session.close()
    return [session.outcome() for session in sessions]


def _answer(waiting: Sequence[_Session], choice: Choice) -> None:
    """Do the next descent of all."""
    groups: OrderedDict[Hashable, list[tuple[_Session, _Plan]]] = OrderedDict()
    for session in waiting:
        plan = session.plan(choice)
        if plan is None:
            session.alone()
        else:
            groups.setdefault(plan.key, []).append((session, plan))
    for group in groups.values():
        for part in _parts(group):
            _descend(part, group[0][1])


def _parts(group: Sequence[tuple[_Session, _Plan]]) -> Iterator[list[_Session]]:
    """Cut a group so that the samples of a part fit in memory."""
    part: list[_Session] = []
    size = 0
    for session, plan in group:
        if part and size + plan.bytes > STACK_BYTES:
            yield part
            part, size = [], 0
        part.append(session)
        size += plan.bytes
    yield part


def _descend(part: Sequence[_Session], plan: _Plan) -> None:
    """Do a descent in a stack; who makes it fail is found out, and fails or goes on alone."""
    asked = part[0].asked
    assert asked is not None
    try:
        losses = descend(
            [session.member() for session in part],
            step=plan.step,
            epochs=asked.epochs,
            full_batch=part[0].client.full_batch,
            length=plan.length,
        )
    except Interrupted:
        raise
    except BaseException:
        if len(part) == 1:
            part[0].alone()
        else:  # each in a stack of its own, which changes no bit
            for session in part:
                _descend([session], plan)
        return
    for session, loss in zip(part, losses, strict=True):
        session.done(loss)


Driver = Callable[
    [Sequence[tuple[Any, list[NDArray[Any]], Scalars]], Choice], list[Result | BaseException]
]
