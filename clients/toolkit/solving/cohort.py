"""Clients of one node that train together: which share a stack, and how their round goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..errors import as_plain
from ..models.arrays import to_read
from .alike import signature, stack_of, work_in_stacks
from .objective import LocalObjective
from .solvers import Epoch, LocalProblem, descend, sgd_of
from .stack import CannotStackError, Samples, Stack, StackBatch
from .steps import Choice, Job, Measurement, Steps

LARGEST = 50_000
"""Parameters, and multiplications for a sample, up to which stacks are faster on a CPU."""
STACK_BYTES = 2**28
"""Bytes of samples and parameters that one stack holds, unless a client alone has more: 256 MiB."""
_COPIES, _LARGE = 4, 8
"""How often it has the parameters: as they are, their gradient, and what an objective brings; and
the bytes of a number in double precision."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target class."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def train_together(jobs: Sequence[Job], choice: Choice, evaluating: bool = False) -> list[Any]:
    """Do for several clients what their `fit` does, or `evaluate`, with stacks of similar clients.

    Parameters
    ----------
    jobs : sequence of (TorchClient, parameters, config)
        The work. A client may appear once.
    choice : {"auto", True}
        Whether only clients whose models gain by it train together.
    evaluating : bool (default: False)

    Returns
    -------
    list
        What `fit`, or `evaluate`, returned or raised, in the order of the jobs.
    """
    with torch.random.fork_rng([]):
        sessions = [_Session(choice, evaluating, *job) for job in jobs]
        try:
            for session in sessions:
                session.advance()
            while waiting := [session for session in sessions if session.asked is not None]:
                for stack in _stacks(waiting):
                    _advance(stack)
        finally:
            for session in sessions:
                session.steps.close()
    return [session.outcome for session in sessions]


def _stacks(waiting: Sequence[_Session]) -> list[list[_Session]]:
    """Return those with the same plan together, in stacks of at most `STACK_BYTES`."""
    groups: dict[Hashable, list[_Session]] = {}
    for session in waiting:
        groups.setdefault(session if session.plan is None else session.plan.key, []).append(session)
    stacks: list[list[_Session]] = []
    for like in groups.values():
        most = max(1, STACK_BYTES // (like[0].plan.bytes if like[0].plan else 1))
        stacks += [like[first : first + most] for first in range(0, len(like), most)]
    return stacks


def _advance(stack: Sequence[_Session]) -> None:
    """Do the next descent or measurement of clients, in a stack if they are several."""
    found: list[Any] = []
    if len(stack) > 1:
        try:
            measures = isinstance(stack[0].asked, Measurement)
            found = (_measured if measures else _descended)(stack)
        except Interrupted:
            raise
        except BaseException:  # the step of one of them, which raises it again by itself
            found = []
    for place, session in enumerate(stack):
        client, asked = session.client, session.asked
        if found:
            session.advance(partial(client.after_step, asked, found[place]))
        else:
            session.advance(partial(client.perform, asked))


class _Plan(NamedTuple):
    """How a step is done in a stack.

    Attributes
    ----------
    key : hashable
        Clients with the same one can share a stack.
    bytes : int
        What a client takes of its memory.
    epochs : list of Epoch
        The client's samples in each epoch; in all, if there is one.
    problem : LocalProblem
    """

    key: Hashable
    bytes: int
    epochs: list[Epoch]
    problem: LocalProblem


class _Session:
    """A client in the middle of its round.

    Attributes
    ----------
    client : TorchClient
    steps : generator
        Its round.
    asked : Minimisation, Measurement or None
        The step that it waits for; None once it is through.
    outcome : tuple or BaseException
        What its `fit`, or its `evaluate`, would have returned or raised, once it is through.
    plan : _Plan or None
        How its step is done in a stack; None if it must be done alone.
    """

    def __init__(
        self, choice: Choice, evaluating: bool, client: Any, parameters: Any, config: Any
    ) -> None:
        self.client = client
        run = client.run_evaluation if evaluating else client.run_round
        self.steps: Steps[Any] = run(parameters, config)
        self.asked: Any = None
        self.outcome: Any = RuntimeError("The round is not over.")
        self.plan: Any = None
        self._choice = choice

    def advance(self, perform: Callable[[], Any] | None = None) -> None:
        """Do what the client waits for, and go on to its next step or to its end."""
        self.asked = None
        try:
            self.asked = self.steps.send(None if perform is None else perform())
            self.plan = self._planned()
        except StopIteration as done:
            self.outcome = done.value
        except Interrupted:
            raise
        except BaseException as error:
            self.outcome = as_plain(error)

    @cached_property
    def own(self) -> dict[str, nn.Parameter]:
        """The parameters of its model."""
        own: dict[str, nn.Parameter] = self.client.model_arrays.parameters()
        return own

    def _planned(self) -> _Plan | None:
        """Return how the step is done in a stack, if it can be."""
        client, asked = self.client, self.asked
        problem: LocalProblem = client.problem_of(asked)
        known = client.stack_signature  # a client that is kept knows it from round to round
        if known is None or known[0] is not problem.loss_fn:
            numbers = sum(parameter.numel() for parameter in self.own.values())
            known = problem.loss_fn, signature(client.model, problem.loss_fn), numbers
            client.stack_signature = known
        _, same, numbers = known
        most = LARGEST if self._choice == "auto" and client.device.type == "cpu" else math.inf
        if same is None or client.model_arrays.prefix or numbers > most:
            return None
        measures = isinstance(asked, Measurement)
        step = self._of_measurement() if measures else self._of_descent()
        if step is None:
            return None
        try:
            client.begin_descent(asked)
            epochs = problem.epochs(1 if measures else asked.epochs)
            work = work_in_stacks(same, problem, epochs[0])
        except Exception:  # the client's own step raises it again
            return None
        if math.isinf(work) or work > most:
            return None
        inputs, targets, sizes, drawn = epochs[0]
        samples = (inputs.nbytes + targets.nbytes) * (len(epochs) if drawn is None else 1)
        whole = measures or client.full_batch
        rows = len(targets) if whole else max(sizes)
        shapes = inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype
        # With like numbers of samples, so that no row is mostly filled up.
        key = same, shapes, len(epochs), drawn is None, whole, rows.bit_length(), step
        return _Plan(key, samples + _COPIES * numbers * _LARGE, epochs, problem)

    def _of_descent(self) -> Hashable:
        """Return what of a descent all clients of a stack share; None if it is done alone."""
        client, asked, objective = self.client, self.asked, self.asked.objective
        sgd = sgd_of(asked.lr, client.optimizer_fn, client.scheduler_fn)
        measured = objective.wants_step_sum and client.known_step(asked.lr) is None
        if sgd is None or client.own_loop or measured or not asked.epochs:
            return None
        terms = tuple((type(t), tuple(t.names), getattr(t, "power", 0)) for t in objective.pulls)
        steps = sgd.lr, sgd.momentum, sgd.weight_decay, sgd.nesterov, client.max_grad_norm
        return steps, asked.epochs, tuple(objective.moving_of(self.own)), terms

    def _of_measurement(self) -> Hashable:
        """Return the same of a measurement."""
        client, models = self.client, self.asked.models
        if client.has_own_measure or client.has_running_metrics:
            return None
        trained = {name: p.shape for name, p in self.own.items() if p.requires_grad}
        if any({name: array.shape for name, array in one.items()} != trained for one in models):
            return None
        return len(models), *((name, id(metric)) for name, metric in client.metrics.items())


def _samples(epochs: Sequence[Epoch], whole: bool, like: _Session) -> Samples:
    """Return the samples of some clients; those that the loss leaves out are refused."""
    dtype = next(iter(like.own.values())).dtype
    samples = Samples(epochs, whole, dtype)
    ignored = getattr(like.plan.problem.loss_fn, "ignore_index", -100)
    if not samples.targets.is_floating_point() and bool((samples.targets == ignored).any()):
        raise CannotStackError("the loss is not the mean of all samples")
    return samples


def _descended(sessions: Sequence[_Session]) -> list[float]:
    """Do the descents of clients in a stack; return what `gradient_descent` returns for each."""
    # Those with the most batches come first, so that the first so many clients take a step.
    counts = [len(session.plan.epochs[0].sizes) for session in sessions]
    places = sorted(range(len(sessions)), key=lambda place: -counts[place])
    ordered = [sessions[place] for place in places]
    client, asked = ordered[0].client, ordered[0].asked
    objective = LocalObjective.stacked([session.asked.objective for session in ordered])
    parameters = stack_of([session.own for session in ordered])
    first = _samples([one.plan.epochs[0] for one in ordered], client.full_batch, ordered[0])

    def batches(epoch: int) -> Iterator[StackBatch]:
        drawn = [session.plan.epochs[epoch % len(session.plan.epochs)] for session in ordered]
        fixed = epoch == 0 or len(ordered[0].plan.epochs) == 1 or drawn[0].key is not None
        samples = first if fixed else _samples(drawn, client.full_batch, ordered[0])
        return samples.batches([one.key for one in drawn])

    seeds = [session.plan.problem.seed or 0 for session in ordered]
    firsts, losses = descend(
        Stack(client.model, ordered[0].plan.problem.loss_fn, parameters, seeds, batches),
        objective,
        lr=asked.lr,
        epochs=asked.epochs,
        full_batch=client.full_batch,
        optimizer_fn=client.optimizer_fn,
        max_grad_norm=client.max_grad_norm,
    )
    with torch.no_grad():
        for name in objective.moving_of(ordered[0].own):
            own: list[Tensor] = [session.own[name] for session in ordered]
            torch._foreach_copy_(own, parameters[name].unbind())
    for place, loss in zip(places, firsts.tolist(), strict=True):
        one = sessions[place].asked.objective
        one.steps = asked.epochs * (1 if client.full_batch else counts[place])
        one.note_loss(loss)
    found = dict(zip(places, losses.tolist(), strict=True))
    return [found[place] for place in range(len(sessions))]


def _measured(sessions: Sequence[_Session]) -> list[list[dict[str, float]]]:
    """Return what `TorchClient.measure` does for each model of each client."""
    client, own = sessions[0].client, sessions[0].own
    epochs = [session.plan.epochs[0] for session in sessions]
    (batch,) = _samples(epochs, True, sessions[0]).batches([None])
    stack = Stack(client.model.eval(), sessions[0].plan.problem.loss_fn, {**own})
    found: list[list[dict[str, float]]] = [[] for _ in sessions]
    with torch.no_grad():
        for kind in range(len(sessions[0].asked.models)):
            parameters, shared = _models(sessions, kind)
            outputs = stack.outputs(parameters, batch, shared=shared)
            columns = {"loss": stack.losses(outputs, batch).tolist()}
            for name, metric in client.metrics.items():
                if metric is accuracy and outputs.ndim == 3:
                    right = (outputs.argmax(2) == batch.targets) & (batch.weights > 0)
                    columns[name] = (right.sum(1) / batch.sizes).tolist()
                else:
                    sizes = [len(epoch.targets) for epoch in epochs]
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
