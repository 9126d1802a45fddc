"""Clients of one node that train together: which share a stack, and how their round goes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..models.arrays import to_read
from .alike import signature, stack_of, work_in_stacks
from .objective import LocalObjective
from .solvers import Epoch, LocalProblem, descend, sgd_of
from .stack import CannotStackError, Samples, Stack, StackBatch
from .steps import Choice, Job, Measurement, Reply, Scalars, Session, in_stacks, run_together

LARGEST = 50_000
"""Parameters, and multiplications for a sample, up to which stacks are faster on a CPU."""
STACK_BYTES = 2**28
"""Bytes of samples and parameters that one stack holds, unless a client alone has more: 256 MiB."""
_COPIES = 4
"""How often it has the parameters: as they are, their gradient, and what an objective brings."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target class."""
    return (outputs.argmax(dim=1) == targets).float().mean()


class Looks(NamedTuple):
    """What a client is compared by beside its samples and its step.

    Attributes
    ----------
    loss_fn : callable
    key : int or None
        The same for all that have the like model and loss; None for one that cannot be stacked.
    numbers, bytes : int
        Of the model.
    """

    loss_fn: Any
    key: int | None
    numbers: int
    bytes: int


_KEYS: dict[Hashable, int] = {}


def _looks(model: nn.Module, own: Mapping[str, nn.Parameter], loss_fn: Any) -> Looks:
    numbers = sum(parameter.numel() for parameter in own.values())
    num_bytes = sum(parameter.nbytes for parameter in own.values())
    try:
        key = _KEYS.setdefault(signature(model, loss_fn), len(_KEYS))
    except CannotStackError:
        return Looks(loss_fn, None, numbers, num_bytes)
    return Looks(loss_fn, key, numbers, num_bytes)


@dataclass(frozen=True)
class _Plan:
    """How a step is done in a stack; those of one `key` can share it.

    Attributes
    ----------
    key : hashable
    bytes : int
        What a client takes of the stack's memory.
    epoch : Epoch
        Its first.
    """

    key: Hashable
    bytes: int
    epoch: Epoch


_Random = tuple[Tensor, Tensor | None]
"""Where torch's random numbers are, and those of a client's loader."""


class _Session(Session):
    """A client with a model, and with random numbers that no other client touches.

    Attributes
    ----------
    plan : _Plan or None
        How its step is done in a stack; None if it must be done alone.
    """

    def __init__(self, choice: Choice, *job: Any, evaluating: bool = False) -> None:
        super().__init__(*job, evaluating=evaluating)
        self.plan: _Plan | None = None
        self._choice = choice
        self._random: _Random | None = None
        self._at_step: _Random | None = None

    @cached_property
    def own(self) -> dict[str, nn.Parameter]:
        """The parameters of its model."""
        own: dict[str, nn.Parameter] = self.client.model_arrays.parameters()
        return own

    @property
    def problem(self) -> LocalProblem:
        """The loss of its step."""
        asked = self.asked
        found: LocalProblem = asked.problem if self.measures else self.client.problem_of(asked)
        return found

    @property
    def measures(self) -> bool:
        """Whether it waits for a measurement, and not for a descent."""
        return isinstance(self.asked, Measurement)

    def begin(self) -> None:
        """Let a descent have its batches, and plan it."""
        self.client.begin_descent(self.asked)
        self._at_step = self._numbers_now()
        try:
            self.plan = self._planned()
        except Exception:  # it cannot be, or the client's own step raises it again
            self.plan = None

    def advance_alone(self) -> None:
        """Do the step by itself, as if nothing had been tried before."""
        self._random = self._at_step
        super().advance_alone()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let torch's random numbers be this client's, from where it last was."""
        if self._random is not None:
            torch.set_rng_state(self._random[0])
            if (generator := self._generator) is not None and self._random[1] is not None:
                generator.set_state(self._random[1])
        yield
        self._random = self._numbers_now()

    @property
    def _generator(self) -> torch.Generator | None:
        return getattr(self.client.train_problem.loader, "generator", None)

    def _numbers_now(self) -> _Random:
        of_loader = None if self._generator is None else self._generator.get_state()
        return torch.get_rng_state(), of_loader

    def epoch(self) -> Epoch:
        """Return the samples of the next epoch."""
        with self.turn():
            return self.problem.epoch()

    def _planned(self) -> _Plan | None:
        client, problem = self.client, self.problem
        looks: Looks | None = client.looks  # a client that is kept knows it from round to round
        if looks is None or looks.loss_fn is not problem.loss_fn:
            looks = client.looks = _looks(client.model, self.own, problem.loss_fn)
        most = LARGEST if self._choice == "auto" and client.device.type == "cpu" else math.inf
        if looks.key is None or client.model_arrays.prefix or looks.numbers > most:
            return None
        step = self._of_measurement() if self.measures else self._of_descent(problem)
        if step is None:
            return None
        epoch = problem.epoch()
        x, y = epoch.inputs, epoch.targets
        whole = self.measures or client.full_batch
        rows = len(y) if whole else max(epoch.sizes)
        kind = x.shape[1:], x.dtype, y.shape[1:], y.dtype, type(problem.loader), whole
        # With like numbers of samples, so that no row is mostly filled up.
        key = looks.key, kind, rows.bit_length(), step
        work = work_in_stacks(looks.key, problem, epoch)
        if math.isinf(work) or work > most or _has_ignored(problem.loss_fn, y):
            return None
        return _Plan(key, x.nbytes + y.nbytes + _COPIES * looks.bytes, epoch)

    def _of_descent(self, problem: LocalProblem) -> Hashable:
        """Return what of a descent all clients of a stack share; None if it is done alone."""
        client, asked, objective = self.client, self.asked, self.asked.objective
        sgd = sgd_of(asked.lr, client.optimizer_fn, client.scheduler_fn)
        measured = objective.wants_step_sum and not client.known_step(asked.lr)
        if sgd is None or client.own_loop or measured or not asked.epochs:
            return None
        terms = tuple((type(t), tuple(t.names), getattr(t, "power", 0)) for t in objective.pulls)
        steps = sgd.lr, sgd.momentum, sgd.weight_decay, sgd.nesterov, client.max_grad_norm
        return steps, asked.epochs, tuple(objective.moving_of(self.own)), terms

    def _of_measurement(self) -> Hashable:
        """Return the same of a measurement."""
        client = self.client
        if client.has_own_measure or client.has_running_metrics:
            return None
        trained = {name for name, parameter in self.own.items() if parameter.requires_grad}
        if any(arrays.keys() != trained for arrays in self.asked.models):
            return None
        if any(a.shape != self.own[n].shape for one in self.asked.models for n, a in one.items()):
            return None
        metrics = tuple((name, id(metric)) for name, metric in client.metrics.items())
        return len(self.asked.models), metrics

    def advance_with(self, found: Any) -> None:
        """Go on after a step that was done in a stack: with the metrics of models, or a loss."""
        if self.measures:
            self.advance(partial(list, found))
        else:
            self.client.note_initial_loss(self.asked.objective)
            self.advance(partial(dict, self.client.step_sum(self.asked, {}), loss=found))


def _has_ignored(loss_fn: Any, targets: Tensor) -> bool:
    """Return whether a loss leaves targets out of its mean, which is then not that of all."""
    ignored = getattr(loss_fn, "ignore_index", -100)
    return not targets.is_floating_point() and bool((targets == ignored).any())


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

    Models are measured in stacks, and a model that many clients have is called once for all.
    """
    return _run(jobs, choice, evaluating=True)


def _run(jobs: Sequence[Job], choice: Choice, **what: bool) -> list[Any]:
    """Run all to their ends; torch's random numbers are as they were then."""
    with torch.random.fork_rng([]):
        return run_together([_Session(choice, *job, **what) for job in jobs], _advance)


def _advance(waiting: Sequence[_Session]) -> None:
    """Do the next descent or measurement of all."""
    planned = [
        (session, session.plan.key, session.plan.bytes) for session in waiting if session.plan
    ]
    for session in waiting:
        if session.plan is None:
            session.advance_alone()
    for stack in in_stacks(planned, STACK_BYTES):
        found: list[Any] = []
        if len(stack) > 1:
            try:
                found = (_measured if stack[0].measures else _descended)(stack)
            except Interrupted:
                raise
            except BaseException:  # the step of one of them, which raises it again by itself
                found = []
        for place, session in enumerate(stack):
            if found:
                session.advance_with(found[place])
            else:
                session.advance_alone()


def _descended(sessions: Sequence[_Session]) -> list[float]:
    """Do the descents of clients in a stack; return what `gradient_descent` returns for each."""
    client, asked, problem = sessions[0].client, sessions[0].asked, sessions[0].problem
    places = sorted(range(len(sessions)), key=lambda place: -len(_epoch_of(sessions[place]).sizes))
    ordered = [sessions[place] for place in places]
    objective = LocalObjective.stacked([session.asked.objective for session in ordered])
    parameters = stack_of([session.own for session in ordered])
    dtype = next(iter(parameters.values())).dtype
    samples, first = None, [_epoch_of(session) for session in ordered]
    kept = isinstance(problem.loader, list | tuple)

    def batches(epoch: int) -> Iterator[StackBatch]:
        nonlocal samples
        drawn = first if kept or not epoch else [session.epoch() for session in ordered]
        if samples is None or not (kept or drawn[0].key is not None):
            samples = Samples(drawn, client.full_batch, dtype)
        return samples.batches([one.key for one in drawn])

    seeds = [session.problem.seed or 0 for session in ordered]
    firsts, losses = descend(
        Stack(client.model, problem.loss_fn, parameters, seeds, batches),
        objective,
        lr=asked.lr,
        epochs=asked.epochs,
        full_batch=client.full_batch,
        optimizer_fn=client.optimizer_fn,
        max_grad_norm=client.max_grad_norm,
    )
    with torch.no_grad():
        for name in objective.moving_of(sessions[0].own):
            torch._foreach_copy_(
                [session.own[name] for session in ordered], parameters[name].unbind()
            )
    for session, loss in zip(ordered, firsts.tolist(), strict=True):
        own = session.asked.objective
        own.note_loss(loss)
        own.steps = asked.epochs * (1 if client.full_batch else len(_epoch_of(session).sizes))
    found = dict(zip(places, losses.tolist(), strict=True))
    return [found[place] for place in range(len(sessions))]


def _epoch_of(session: _Session) -> Epoch:
    assert session.plan is not None
    return session.plan.epoch


def _measured(sessions: Sequence[_Session]) -> list[list[dict[str, float]]]:
    """Return what `TorchClient.measure` does for each model of each client."""
    problem, metrics = sessions[0].problem, sessions[0].client.metrics
    dtype = next(iter(sessions[0].own.values())).dtype
    samples = Samples([_epoch_of(session) for session in sessions], True, dtype)
    (batch,) = samples.batches([None])
    sizes = [len(_epoch_of(session).targets) for session in sessions]
    model = sessions[0].client.model.eval()
    stack = Stack(model, problem.loss_fn, dict(sessions[0].own), [0], lambda _: iter(()))
    found: list[list[dict[str, float]]] = [[] for _ in sessions]
    with torch.no_grad():
        for kind in range(len(sessions[0].asked.models)):
            parameters, shared = _models(sessions, kind)
            outputs = stack.outputs(parameters, batch, shared=shared)
            columns = {"loss": stack.losses(outputs, batch).tolist()}
            for name, metric in metrics.items():
                if metric is accuracy and outputs.ndim == 3:
                    right = (outputs.argmax(2) == batch.targets) & (batch.weights > 0)
                    columns[name] = (right.sum(1) / batch.sizes).tolist()
                else:
                    parts = zip(outputs, batch.targets, sizes, strict=True)
                    columns[name] = [float(metric(out[:n], y[:n])) for out, y, n in parts]
            for place, values in enumerate(zip(*columns.values(), strict=True)):
                found[place].append(dict(zip(columns, values, strict=True)))
    return found


def _models(sessions: Sequence[_Session], kind: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the parameters of a model of all clients, and the names of those that they share.

    Parameters that do not travel are the client's own.
    """
    parameters: dict[str, Tensor] = {}
    shared: list[str] = []
    for name, like in sessions[0].own.items():
        arrays = [session.asked.models[kind].get(name) for session in sessions]
        if arrays[0] is None:
            parameters[name] = torch.stack([session.own[name].detach() for session in sessions])
        elif all(array is arrays[0] for array in arrays):
            shared.append(name)
            parameters[name] = to_read(arrays[0]).to(like)
        else:
            parameters[name] = torch.stack([to_read(array) for array in arrays]).to(like)
    return parameters, shared
