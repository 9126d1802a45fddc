"""Clients of one node that train together: which of them can, and how their round goes."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..models.arrays import tensors_of, to_read
from .chains import Chain, chain_of
from .measured import Tested, measure
from .objective import ProjectedTerm
from .sample_losses import CannotStackError, is_by_sample
from .solvers import Epoch, LocalProblem
from .stacked import Member, StackedModel, descend, plain_step, rows_of
from .steps import Choice, Job, Measurement, Reply, Scalars, Session, in_stacks, run_together
from .vmapped import AnyModel, stacked_forward

LARGEST = 50_000
"""Parameters of a model up to which stacks are faster on a CPU, as measured in docs/scaling.md."""
STACK_BYTES = 2**28
"""Bytes of samples and parameters that one stack holds, unless a client alone has more: 256 MiB."""
_COPIES = 4
"""How often it has the parameters: as they are, their gradient, and what an objective brings."""

# Layers that treat every sample by itself, in training too, and of which stacks have the same bits.
_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid),
)


_OF_ALL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


# ----------------------------------------------------------------------------------------------
# Who can train with whom
# ----------------------------------------------------------------------------------------------


def _value(value: Any) -> Hashable:
    """Return what an attribute is compared by."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return (type(value), value)
    if isinstance(value, FunctionType | BuiltinFunctionType) and "<" not in value.__qualname__:
        return value  # a function of a module: neither a lambda nor a closure
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    raise CannotStackError


def _module(module: nn.Module) -> Hashable:
    """Return what a module is compared by: its class and attributes, and those of its parts."""
    known = type(module) in _LAYERS or _of_unknown_class(module)
    if not known or any(buffer is not None for buffer in module._buffers.values()):
        raise CannotStackError
    before, after = module._forward_pre_hooks, module._forward_hooks
    if before or after or module._backward_pre_hooks or module._backward_hooks:
        raise CannotStackError
    public = {n: v for n, v in vars(module).items() if n not in _OF_ALL and n[0] != "_"}
    settings = tuple((name, _value(value)) for name, value in public.items())
    parts = [(n, _module(part)) for n, part in module._modules.items() if part is not None]
    return type(module), settings, tuple(parts)


def _of_unknown_class(module: nn.Module) -> bool:
    """Return whether a module's class is a user's, of which nothing is known."""
    return not type(module).__module__.startswith("torch.")


class Looks(NamedTuple):
    """What a client is compared by beside its samples and its step.

    Attributes
    ----------
    loss_fn : callable
    key : int
        The same for all that have the like model and loss.
    numbers, bytes : int
        Of the model.
    """

    loss_fn: Any
    key: int
    numbers: int
    bytes: int


def _looks(model: nn.Module, own: Mapping[str, nn.Parameter], loss_fn: Any) -> Looks:
    if not is_by_sample(loss_fn):
        raise CannotStackError
    key = _KEYS.setdefault((_module(model), _parameters(model, own), _loss(loss_fn)), len(_KEYS))
    numbers = sum(parameter.numel() for parameter in own.values())
    return Looks(loss_fn, key, numbers, sum(parameter.nbytes for parameter in own.values()))


_KEYS: dict[Hashable, int] = {}
_CHAINS: dict[Hashable, Chain | None] = {}
_TRIED: dict[Hashable, bool] = {}


def _stacked_model(
    model: nn.Module,
    looks: int,
    inputs: Tensor,
    groups: Iterable[Sequence[str]] = (),
    *,
    training: bool = True,
) -> StackedModel:
    """Return how models stack that give in a stack what they give alone, sample by sample.

    PyTorch's own layers are known to. A user's class is tried out, once in a process.

    Parameters
    ----------
    model : nn.Module
    looks : int
        The key of its `Looks`.
    inputs : Tensor of shape (n, ...)
        Some of its samples.
    groups : iterable of sequence of str
        Parameters that must be told from others: those that move, those of a term.
    training : bool (default: True)
        Whether it is trained or evaluated.

    Raises
    ------
    CannotStackError
        If they give something else.
    """
    key = looks, inputs.shape[1:], inputs.dtype, training
    if key not in _TRIED:
        unknown = any(_of_unknown_class(module) for module in model.modules())
        _TRIED[key] = not unknown or _tried(copy.deepcopy(model), inputs[:3], training)
        _CHAINS[key] = chain_of(model, inputs[:3], training) if _TRIED[key] else None
    if not _TRIED[key]:
        raise CannotStackError
    chain = _CHAINS[key]
    return chain if chain and all(map(chain.whole, groups)) else AnyModel(model, training)


def _tried(model: nn.Module, inputs: Tensor, training: bool) -> bool:
    count = len(inputs)
    model.train(training)
    with torch.random.fork_rng([]), torch.no_grad():
        try:
            expected = model(inputs)
            others = torch.cat([inputs, 2 * inputs[:1], inputs.flip(0)])
            stack = {n: torch.stack([p, p]) for n, p in model.named_parameters()}
            found = [
                model(inputs[:1]),
                model(others)[:count],
                *stacked_forward(model, training)(stack, torch.stack([inputs, inputs])),
            ]
            return all(torch.allclose(f, expected[: len(f)], 1e-3, 1e-4) for f in found)
        except Exception:  # it does not take such inputs, or vmap cannot go through it
            return False


def _parameters(model: nn.Module, own: Mapping[str, nn.Parameter]) -> Hashable:
    if len(tensors_of(model)) != len(own) or len({p.dtype for p in own.values()}) != 1:
        raise CannotStackError  # tied, or mixed
    if next(iter(own.values())).dtype not in (torch.float32, torch.float64):
        raise CannotStackError
    return tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in own.items())


def _loss(loss_fn: Any) -> Hashable:
    if not isinstance(loss_fn, nn.Module):
        return id(loss_fn)
    if tensors_of(loss_fn):
        raise CannotStackError
    public = [(name, value) for name, value in vars(loss_fn).items() if name[0] != "_"]
    return type(loss_fn), tuple((name, _value(value)) for name, value in public)


def _term(term: Any) -> Hashable:
    kind = (term.projection.shape, term.power) if isinstance(term, ProjectedTerm) else None
    return type(term), tuple(term.names), kind


def _kind(epoch: Epoch) -> Hashable:
    """Return shape and dtype of a client's samples."""
    x, y = epoch.inputs, epoch.targets
    return x.shape[1:], x.dtype, y.shape[1:], y.dtype


def _size(epoch: Epoch, looks: Looks) -> int:
    """Return what a client takes of a stack's memory."""
    return epoch.inputs.nbytes + epoch.targets.nbytes + _COPIES * looks.bytes


# ----------------------------------------------------------------------------------------------
# A client on its way through a round
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """How a step is done in a stack; those of one `key` can share it.

    A descent has its optimizer's step, a measurement the models and the data.
    """

    key: Hashable
    model: StackedModel
    rows: int
    bytes: int
    work: Any


_Known = dict[tuple[int, torch.dtype], tuple[NDArray[Any], Tensor]]
"""Arrays by their ids, and as tensors: what all clients receive is one of them."""


_Random = tuple[Tensor, Tensor | None]
"""Where torch's random numbers are, and those of a client's loader."""


class _Cohort:
    """What clients of one message share on their way.

    Attributes
    ----------
    choice : {"auto", True}
    known : dict
        What they have received, as tensors.
    in_turn : _Session or None
        Whose random numbers torch's are.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.known: _Known = {}
        self.in_turn: _Session | None = None


class _Session(Session):
    """A client with a model, and with random numbers that no other client touches.

    Attributes
    ----------
    plan : _Plan or None
        How its step is done in a stack; None if it must be done alone.
    """

    plan: _Plan | None = None
    _random: _Random | None = None
    _at_step: _Random | None = None
    _first: Epoch | None = None

    def __init__(self, cohort: _Cohort, *job: Any, evaluating: bool = False) -> None:
        super().__init__(*job, evaluating=evaluating)
        self._cohort = cohort

    @property
    def _generator(self) -> torch.Generator | None:
        return getattr(self.client.train_problem.loader, "generator", None)

    @cached_property
    def _own(self) -> dict[str, nn.Parameter]:
        own: dict[str, nn.Parameter] = self.client.model_arrays.parameters()
        return own

    def _looks(self, loss_fn: Any) -> Looks:
        """Return what it is compared by; a client that is kept knows it from round to round."""
        looks: Looks | None = self.client.looks
        if looks is None or looks.loss_fn is not loss_fn:
            looks = self.client.looks = _looks(self.client.model, self._own, loss_fn)
        return looks

    def begin(self) -> None:
        """Let a descent have its batches, and plan it."""
        seeded = self.client.begin_descent(self.asked)
        self._at_step = None if seeded else self._numbers_now()
        self.plan = self._planned()

    def advance_alone(self) -> None:
        """Do the descent by itself, as if nothing had been tried before."""
        self._rewind()
        super().advance_alone()

    @property
    def measures(self) -> bool:
        """Whether it waits for a measurement, and not for a descent."""
        return isinstance(self.asked, Measurement)

    def _planned(self) -> _Plan | None:
        problem = self.asked.problem if self.measures else self._problem()
        try:
            looks = self._looks(problem.loss_fn)
            large = self._cohort.choice == "auto" and looks.numbers > LARGEST
            if large or self.client.device.type != "cpu":
                return None
            return (self._measurement if self.measures else self._descent)(problem, looks)
        except Exception:  # it cannot be, or the client's own step raises it again
            return None

    def _descent(self, problem: LocalProblem, looks: Looks) -> _Plan:
        client, asked, objective = self.client, self.asked, self.asked.objective
        step = plain_step(asked.lr, client.optimizer_fn, client.scheduler_fn, client.max_grad_norm)
        unknown = step is None or (objective.wants_step_sum and not client.known_step(asked.lr))
        if unknown or client.own_loop or not asked.epochs:
            raise CannotStackError
        names = tuple(objective.moving_of(self._own))
        first = self._epoch()
        groups = [names, *([n for n in term.names if n in names] for term in objective.pulls)]
        model = _stacked_model(client.model, looks.key, first.inputs, groups)
        rows = rows_of(first.sizes, client.full_batch, model.unit)
        key = (
            *(looks.key, _kind(first), step, rows, names),
            *(asked.epochs, client.full_batch, tuple(map(_term, objective.pulls))),
        )
        self._first = first
        return _Plan(key, model, rows, _size(first, looks), step)

    def _measurement(self, problem: LocalProblem, looks: Looks) -> _Plan:
        client = self.client
        if client.has_own_measure or client.has_running_metrics:
            raise CannotStackError
        epoch = problem.epoch()
        models = [_tensors(a, self._own, self._cohort.known) for a in self.asked.models]
        model = _stacked_model(client.model, looks.key, epoch.inputs, training=False)
        rows = rows_of(epoch.sizes, True, model.unit)
        metrics = tuple((name, id(metric)) for name, metric in client.metrics.items())
        key = looks.key, _kind(epoch), rows, metrics, len(models)
        return _Plan(key, model, rows, _size(epoch, looks), Tested(models, epoch))

    def member(self) -> Member:
        """Return what a stack needs; it may be asked for anew."""
        if self._first is None:
            self._rewind()
        return Member(self._problem(), self._own, self.asked.objective, self._epoch)

    def advance_with(self, found: Any) -> None:
        """Go on after a step that was done in a stack: with the metrics of models, or a loss."""
        if self.measures:
            self.advance(partial(list, found))
        else:
            self.client.note_initial_loss(self.asked.objective)
            self.advance(partial(dict, self.client.step_sum(self.asked, {}), loss=found))

    def _epoch(self) -> Epoch:
        """Return the samples of the next epoch, in the client's own order."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self.take_turn()
        return self._problem().epoch()

    def _problem(self) -> LocalProblem:
        problem: LocalProblem = self.client.problem_of(self.asked)
        return problem

    def _rewind(self) -> None:
        """Let it be where it was at the beginning of its step."""
        self.take_turn()
        self._first = None
        if self._at_step is None:
            self.client.begin_descent(self.asked)
        else:
            self._set_numbers(self._at_step)

    def take_turn(self) -> None:
        """Let torch's random numbers be this client's, from where it last was."""
        if (before := self._cohort.in_turn) is self:
            return
        if before is not None and before.asked is not None:  # it is not through
            before._random = before._numbers_now()
        if self._random is not None:
            self._set_numbers(self._random)
        self._cohort.in_turn = self

    def _numbers_now(self) -> _Random:
        of_loader = None if self._generator is None else self._generator.get_state()
        return torch.get_rng_state(), of_loader

    def _set_numbers(self, random: _Random) -> None:
        torch.set_rng_state(random[0])
        if self._generator is not None and random[1] is not None:
            self._generator.set_state(random[1])


# ----------------------------------------------------------------------------------------------
# The round of all
# ----------------------------------------------------------------------------------------------


def fit_together(jobs: Sequence[Job], choice: Choice) -> list[Reply | BaseException]:
    """Do for several clients what their `fit` does, with one stacked descent for similar clients.

    Parameters
    ----------
    jobs : sequence of (TorchClient, parameters, config)
        The work. A client may appear once.
    choice : {"auto", True}
        Whether only clients whose models gain by it train together.

    Returns
    -------
    list of (arrays, num_examples, metrics) or BaseException
        What `fit` returned or raised, in the order of the jobs.
    """
    return _run(jobs, choice)


def evaluate_together(
    jobs: Sequence[Job], choice: Choice
) -> list[tuple[float, int, Scalars] | BaseException]:
    """Do for several clients what their `evaluate` does, as `fit_together` what their `fit` does.

    Models are measured in stacks, and a model that many clients have in one product for all.
    """
    return _run(jobs, choice, evaluating=True)


def _run(jobs: Sequence[Job], choice: Choice, **what: bool) -> list[Any]:
    """Run all to their ends; torch's random numbers are as they were then."""
    outside, cohort = torch.get_rng_state(), _Cohort(choice)
    try:
        return run_together([_Session(cohort, *job, **what) for job in jobs], _advance)
    finally:
        torch.set_rng_state(outside)


def _advance(waiting: Sequence[_Session]) -> None:
    """Do the next descent or measurement of all."""
    planned = [(session, session.plan) for session in waiting]
    for session, plan in planned:
        if plan is None:
            session.advance_alone()
    members = (((session, plan), plan.key, plan.bytes) for session, plan in planned if plan)
    for stack in in_stacks(members, STACK_BYTES):
        _in_a_stack(stack)


def _in_a_stack(members: Sequence[tuple[_Session, _Plan]]) -> None:
    """Do a step of clients in a stack; if it fails, find the client that made it fail."""
    sessions, plans = zip(*members, strict=True)
    try:
        found = (_measured if sessions[0].measures else _descended)(sessions, plans)
    except Interrupted:
        raise
    except BaseException:
        if len(members) == 1:
            sessions[0].advance_alone()
        else:  # each in a stack of one, which changes no bit
            for member in members:
                _in_a_stack([member])
        return
    for session, result in zip(sessions, found, strict=True):
        session.advance_with(result)


def _measured(sessions: Sequence[_Session], plans: Sequence[_Plan]) -> list[Any]:
    first, session = plans[0], sessions[0]
    tested = [plan.work for plan in plans]
    loss_fn, metrics = session.asked.problem.loss_fn, session.client.metrics
    return measure(tested, first.model, first.rows, loss_fn, metrics)


def _descended(sessions: Sequence[_Session], plans: Sequence[_Plan]) -> list[Any]:
    return descend(
        [session.member() for session in sessions],
        model=plans[0].model,
        step=plans[0].work,
        epochs=sessions[0].asked.epochs,
        full_batch=sessions[0].client.full_batch,
        rows=plans[0].rows,
    )


def _tensors(arrays: Arrays, own: Mapping[str, nn.Parameter], known: _Known) -> dict[str, Tensor]:
    """Return all parameters of a model that travelled; those that do not are the client's own."""
    if arrays.keys() != {name for name, parameter in own.items() if parameter.requires_grad}:
        raise CannotStackError
    tensors: dict[str, Tensor] = {}
    for name, parameter in own.items():
        tensors[name] = parameter.detach()
        if name in arrays:
            array, key = arrays[name], (id(arrays[name]), parameter.dtype)
            if key not in known:
                known[key] = array, to_read(array).to(parameter.dtype)
            tensors[name] = known[key][1]
        if tensors[name].shape != parameter.shape:
            raise CannotStackError
    return tensors
