"""How a method asks for its descents, and who takes them: one client's driver or that of many.

A client's `run_round` is a generator. It yields what is to be done, such as a `Minimisation`, and
is sent the metrics of that. `take_steps` drives one client. `run_together` drives several, so that
steps of the same kind can be taken in one computation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Literal, TypeVar

from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..errors import as_plain

T = TypeVar("T")
Scalars = dict[str, Any]
Reply = tuple[list[NDArray[Any]], int, Scalars]
"""What `fit` returns: arrays, the number of examples, metrics."""
Evaluation = tuple[float, int, Scalars]
"""What `evaluate` returns: loss, the number of examples, metrics."""
Steps = Generator[Any, Any, T]
"""Yields what is to be done, is sent the metrics of that, and returns a result."""
MethodSteps = Steps[tuple[Arrays, Scalars]]
"""A method's part of a round, which results in an upload and metrics."""
Job = tuple[Any, list[NDArray[Any]], Scalars]
"""A client, and the parameters and configuration that its `fit` would get."""
Choice = Literal["auto"] | bool
"""Whether clients train together: "auto" if they gain by it."""
Driver = Callable[[Sequence[Job], Choice], list[Any]]
"""Does for several clients what their `fit` or `evaluate` does, in the order of the jobs: a list of
what it returned or raised."""


@dataclass(frozen=True)
class Minimisation:
    """What a method wants done: train the client's model, from where it is, on an objective.

    Attributes
    ----------
    objective : LocalObjective
    lr : float
        The step size.
    epochs : int
        Local epochs.
    loader : iterable of batches, optional
        What it is trained on, where that is not all of the client's training data.
    """

    objective: Any
    lr: float
    epochs: int
    loader: Any = None


@dataclass(frozen=True)
class Measurement:
    """What a method wants measured: some models on the same data.

    It is sent back a list of metrics by name, those of each model.

    Attributes
    ----------
    problem : LocalProblem
        The data, and the model that the arrays are loaded into.
    models : sequence of Arrays
        What travels of each.
    """

    problem: Any
    models: Sequence[Arrays]


def take_steps(steps: Steps[T], perform: Callable[[Any], Any]) -> T:
    """Take all steps, one after another; `perform` does what a step asks for.

    An error of `perform` is raised inside the method, at its step. The method therefore leaves its
    contexts, such as the client's random numbers, at once, and not when it is garbage-collected.
    """
    try:
        asked = next(steps)
        while True:
            try:
                metrics = perform(asked)
            except BaseException as error:
                asked = steps.throw(error)
            else:
                asked = steps.send(metrics)
    except StopIteration as done:
        result: T = done.value
        return result


class Session:
    """A client in the middle of its round.

    Attributes
    ----------
    client : MethodClient
    asked : Any
        The step that it waits for; None once it is through.
    outcome : tuple or BaseException
        What its `fit`, or its `evaluate`, would have returned or raised, once it is through.
    """

    def __init__(
        self,
        client: Any,
        parameters: list[NDArray[Any]],
        config: Scalars,
        *,
        evaluating: bool = False,
    ) -> None:
        self.client = client
        self.asked: Any = None
        self.outcome: Any = RuntimeError("The round is not over.")
        run = client.run_evaluation if evaluating else client.run_round
        self._steps: Steps[Any] = run(parameters, config)

    def advance(self, perform: Callable[[], Any] | None = None) -> None:
        """Do what the client waits for, and go on to its next step or to its end."""
        self.asked = None
        try:
            with self.turn():
                metrics = None if perform is None else perform()
                try:
                    self.asked = self._steps.send(metrics)
                except StopIteration as done:
                    self.outcome = done.value
                else:
                    self.begin()
        except Interrupted:
            raise
        except BaseException as error:
            self.asked, self.outcome = None, as_plain(error)

    def begin(self) -> None:
        """Prepare for the step that it now waits for."""

    def advance_alone(self) -> None:
        """Go on with the client's step taken by itself."""
        self.advance(partial(self.client.perform, self.asked))

    def turn(self) -> AbstractContextManager[Any]:
        """Go on in place of another client."""
        return nullcontext()

    def close(self) -> None:
        """Leave the contexts of a round that did not come to its end."""
        if getgeneratorstate(self._steps) != GEN_CLOSED:
            with self.turn():
                self._steps.close()


AnySession = TypeVar("AnySession", bound=Session)


def run_together(
    sessions: Sequence[AnySession], advance: Callable[[Sequence[AnySession]], None]
) -> list[Any]:
    """Run the rounds of several clients; `advance` takes the next step of all that wait."""
    try:
        for session in sessions:
            session.advance()
        while waiting := [session for session in sessions if session.asked is not None]:
            advance(waiting)
    finally:
        for session in sessions:
            session.close()
    return [session.outcome for session in sessions]


def in_stacks(members: Iterable[tuple[T, Hashable, int]], most: int) -> list[list[T]]:
    """Return members with the same key together, in stacks of a limited size.

    Parameters
    ----------
    members : iterable of (member, key, size)
    most : int
        The sum of the sizes in a stack, unless one member alone has more.
    """
    stacks: list[list[T]] = []
    last: dict[Hashable, tuple[list[T], int]] = {}
    for member, key, size in members:
        stack, filled = last.get(key, ([], 0))
        if not stack or filled + size > most:
            stack, filled = [], 0
            stacks.append(stack)
        stack.append(member)
        last[key] = stack, filled + size
    return stacks
