"""Clients of one node that train together: which share a stack, and how their round goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import astuple
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..models.arrays import to_read
from .alike import can_stack, signature, stack_of
from .objective import LocalObjective
from .solvers import Epoch, LocalProblem, descend, sgd_of
from .stack import CannotStackError, Samples, Stack, StackBatch
from .steps import Choice, Job, Measurement, Steps

LARGEST_CNN_BATCH = 8_000
"""Numbers in a batch of inputs up to which "auto" stacks a model with convolutions on a CPU.

A stack takes .2 of the time of clients alone with 640 of them (10 images of 8 x 8), .85 with 7,840
(10 of 28 x 28) and 1.12 with 15,680. Other models gain at any size.
"""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
STACK_BYTES = 2**28
"""Bytes of samples and parameters that one stack holds, unless a client alone has more: 256 MiB."""
_BYTES = 32
"""Of a parameter: in double precision, as it is, its gradient, and what an objective brings."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples of which the largest output is the target class."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def train_together(jobs: Sequence[Job], choice: Choice, evaluating: bool = False) -> list[Any]:
    """Do for several clients what their `fit` does, or `evaluate`, with stacks of similar clients.

    Parameters
    ----------
    jobs : sequence of (TorchClient, parameters, config)
        The work. A client may appear once.
    choice : {"auto", True}
        "auto": without the models that are slower in a stack.
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
            while waiting := [session for session in sessions if session.step is not None]:
                for stack in _stacks(waiting):
                    _advance(stack)
        finally:
            for session in sessions:
                session.steps.close()
    return [session.outcome for session in sessions]


def _stacks(waiting: Sequence[_Session]) -> list[list[_Session]]:
    """Return sessions of the same kind together, in stacks of at most `STACK_BYTES`."""
    groups: dict[Hashable, list[_Session]] = {}
    for session in waiting:
        groups.setdefault(session.kind or session, []).append(session)
    stacks: list[list[_Session]] = []
    for like in groups.values():
        most = max(1, STACK_BYTES // like[0].bytes)
        stacks += [like[first : first + most] for first in range(0, len(like), most)]
    return stacks


def _advance(stack: Sequence[_Session]) -> None:
    """Do the next descent or measurement of clients, in a stack if they are several."""
    found: list[Any] = []
    if len(stack) > 1:
        try:
            measures = isinstance(stack[0].step, Measurement)
            found = (_measured if measures else _descended)(stack)
        except Interrupted:
            raise
        except BaseException:  # the step of one of them, which raises it again by itself
            found = []
    for place, session in enumerate(stack):
        client, step = session.client, session.step
        if found:
            session.advance(partial(client.after_step, step, found[place]))
        else:
            session.advance(partial(client.perform, step))


class _Session:
    """A client in the middle of its round.

    Attributes
    ----------
    client : TorchClient
    steps : generator
        Its round.
    outcome : tuple or BaseException
        What its `fit`, or its `evaluate`, would have returned or raised, once it is through.
    step : Minimisation, Measurement or None
        The step that it waits for; None once it is through.
    kind : hashable
        What clients of a stack have in common; None if the step must be done alone.
    problem : LocalProblem
        The loss of the step, if it can be done in a stack.
    epochs : list of Epoch
        The client's samples in each epoch; in all, if there is one.
    bytes : int
        What the client takes of the memory of a stack.
    """

    def __init__(
        self, choice: Choice, evaluating: bool, client: Any, parameters: Any, config: Any
    ) -> None:
        self.client = client
        run = client.run_evaluation if evaluating else client.run_round
        self.steps: Steps[Any] = run(parameters, config)
        self.outcome: Any = RuntimeError("The round is not over.")
        self.step: Any = None
        self.kind: Hashable = None
        self.problem: LocalProblem
        self.epochs: list[Epoch]
        self.bytes = 1
        self._choice = choice

    def advance(self, perform: Callable[[], Any] | None = None) -> None:
        """Do what the client waits for, and go on to its next step or to its end."""
        self.step = self.kind = None
        try:
            self.step = self.steps.send(None if perform is None else perform())
            self.kind = self._kind()
        except StopIteration as done:
            self.outcome = done.value
        except Interrupted:
            raise
        except BaseException as error:
            self.outcome = error

    @cached_property
    def own(self) -> dict[str, nn.Parameter]:
        """The parameters of its model."""
        own: dict[str, nn.Parameter] = self.client.model_arrays.parameters()
        return own

    def _kind(self) -> Hashable:
        """Draw the samples of the step, if it can be done in a stack; return its kind."""
        client, step = self.client, self.step
        problem: LocalProblem = client.problem_of(step)
        known = client.stack_signature  # a client that is kept knows it from round to round
        if known is None or known[0] is not problem.loss_fn:
            convolves = any(isinstance(module, CONVOLUTIONS) for module in client.model.modules())
            known = problem.loss_fn, signature(client.model, problem.loss_fn), convolves
            client.stack_signature = known
        _, same, convolves = known
        if same is None or client.model_arrays.prefix:
            return None
        measures = isinstance(step, Measurement)
        details = self._of_measurement() if measures else self._of_descent()
        if details is None:
            return None
        whole = measures or client.full_batch
        try:
            if convolves and self._is_slower_stacked(problem, whole):
                return None
            client.begin_descent(step)
            epochs = problem.epochs(1 if measures else step.epochs)
            if not can_stack(same, problem, epochs[0]):
                return None
        except Exception:  # the client's own step raises it again
            return None
        inputs, targets, sizes, drawn = epochs[0]
        self.problem, self.epochs = problem, epochs
        samples = (inputs.nbytes + targets.nbytes) * (len(epochs) if drawn is None else 1)
        self.bytes = samples + _BYTES * sum(parameter.numel() for parameter in self.own.values())
        rows = len(targets) if whole else max(sizes)
        shapes = inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype
        # With like numbers of samples, so that no row is mostly filled up.
        return same, shapes, len(epochs), drawn is None, whole, rows.bit_length(), details

    def _is_slower_stacked(self, problem: LocalProblem, whole: bool) -> bool:
        """Return whether convolutions take longer in a stack, by the first batch alone."""
        if self._choice != "auto" or self.client.device.type != "cpu":
            return False
        batch = next(problem.batches())
        rows = problem.num_examples() if whole else batch.size
        return bool(rows * batch.inputs[0].numel() > LARGEST_CNN_BATCH)

    def _of_descent(self) -> Hashable:
        """Return what of a descent all clients of a stack share; None if it is done alone."""
        client, step, objective = self.client, self.step, self.step.objective
        sgd = sgd_of(step.lr, client.optimizer_fn, client.scheduler_fn)
        measured = objective.wants_step_sum and client.known_step(step.lr) is None
        if sgd is None or client.own_loop or measured or not step.epochs:
            return None
        terms = tuple((type(t), tuple(t.names), getattr(t, "power", 0)) for t in objective.pulls)
        moving = tuple(objective.moving_of(self.own))
        return astuple(sgd), client.max_grad_norm, step.epochs, moving, terms

    def _of_measurement(self) -> Hashable:
        """Return the same of a measurement."""
        client, models = self.client, self.step.models
        if client.has_own_measure or client.has_running_metrics:
            return None
        trained = {name: p.shape for name, p in self.own.items() if p.requires_grad}
        if any({name: array.shape for name, array in one.items()} != trained for one in models):
            return None
        return len(models), *((name, id(metric)) for name, metric in client.metrics.items())


def _samples(epochs: Sequence[Epoch], whole: bool, like: _Session) -> Samples:
    """Return the samples of some clients; those that the loss leaves out are refused."""
    samples = Samples(epochs, whole, next(iter(like.own.values())).dtype)
    ignored = getattr(like.problem.loss_fn, "ignore_index", -100)
    if not samples.targets.is_floating_point() and bool((samples.targets == ignored).any()):
        raise CannotStackError("the loss is not the mean of all samples")
    return samples


def _descended(sessions: Sequence[_Session]) -> list[float]:
    """Do the descents of clients in a stack; return what `gradient_descent` returns for each."""
    # Those with the most batches come first, so that the first so many clients take a step.
    ordered = sorted(sessions, key=lambda session: -len(session.epochs[0].sizes))
    client, step = ordered[0].client, ordered[0].step
    objective = LocalObjective.stacked([session.step.objective for session in ordered])
    parameters = stack_of([session.own for session in ordered])
    first = _samples([session.epochs[0] for session in ordered], client.full_batch, ordered[0])

    def batches(epoch: int) -> Iterator[StackBatch]:
        drawn = [session.epochs[epoch % len(session.epochs)] for session in ordered]
        fixed = epoch == 0 or len(ordered[0].epochs) == 1 or drawn[0].key is not None
        samples = first if fixed else _samples(drawn, client.full_batch, ordered[0])
        return samples.batches([one.key for one in drawn])

    seeds = [session.problem.seed or 0 for session in ordered]
    firsts, losses, constants = descend(
        Stack(client.model, ordered[0].problem.loss_fn, parameters, seeds, batches),
        objective,
        lr=step.lr,
        epochs=step.epochs,
        full_batch=client.full_batch,
        optimizer_fn=client.optimizer_fn,
        max_grad_norm=client.max_grad_norm,
    )
    with torch.no_grad():
        for name in objective.moving_of(ordered[0].own):
            own: list[Tensor] = [session.own[name] for session in ordered]
            torch._foreach_copy_(own, parameters[name].unbind())
    for session, *noted in zip(ordered, firsts.tolist(), constants.tolist(), strict=True):
        batches_of_epoch = 1 if client.full_batch else len(session.epochs[0].sizes)
        session.step.objective.steps = step.epochs * batches_of_epoch
        session.step.objective.note_loss(*noted)
    found = dict(zip(ordered, losses.tolist(), strict=True))
    return [found[session] for session in sessions]


def _measured(sessions: Sequence[_Session]) -> list[list[dict[str, float]]]:
    """Return what `TorchClient.measure` does for each model of each client."""
    client, own = sessions[0].client, sessions[0].own
    epochs = [session.epochs[0] for session in sessions]
    (batch,) = _samples(epochs, True, sessions[0]).batches([None])
    stack = Stack(client.model.eval(), sessions[0].problem.loss_fn, {**own})
    found: list[list[dict[str, float]]] = [[] for _ in sessions]
    with torch.no_grad():
        for kind in range(len(sessions[0].step.models)):
            outputs = stack.outputs(_models(sessions, kind), batch)
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


def _models(sessions: Sequence[_Session], kind: int) -> dict[str, Tensor]:
    """Return the parameters of a model of all clients; those that do not travel are their own."""
    parameters: dict[str, Tensor] = {}
    for name, like in sessions[0].own.items():
        arrays = [session.step.models[kind].get(name) for session in sessions]
        if arrays[0] is None:
            parameters[name] = torch.stack([session.own[name].detach() for session in sessions])
        elif all(array is arrays[0] for array in arrays):
            parameters[name] = to_read(arrays[0]).to(like).expand(len(sessions), *like.shape)
        else:
            parameters[name] = torch.stack([to_read(array) for array in arrays]).to(like)
    return parameters
