"""How a method asks for its descents, and who takes them: one client's driver or that of many.

A client's `run_round` is a generator. It yields what is to be done, such as a `Minimisation`, and
is sent the metrics of that. `take_steps` drives one client. `run_together` drives several, so that
steps of the same kind can be taken in one computation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.common.interrupts import Interrupted

from ..errors import plain_errors

T = TypeVar("T")
Scalars = dict[str, Any]
Reply = tuple[list[NDArray[Any]], int, Scalars]
"""What `fit` returns: arrays, the number of examples, metrics."""
Steps = Generator[Any, Scalars, T]
"""Yields what is to be done, is sent the metrics of that, and returns a result."""
MethodSteps = Steps[tuple[Arrays, Scalars]]
"""A method's part of a round, which results in an upload and metrics."""
Job = tuple[Any, list[NDArray[Any]], Scalars]
"""A client, and the parameters and configuration that its `fit` would get."""
Choice = Literal["auto"] | bool
"""Whether clients train together: "auto" if they gain by it."""
Driver = Callable[[Sequence[Job], Choice], list[Reply | BaseException]]
"""Does for several clients what their `fit` does, in the order of the jobs."""


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


def take_steps(steps: Steps[T], perform: Callable[[Any], Scalars]) -> T:
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
        What its `fit` would have returned or raised, once it is through.
    """

    def __init__(self, client: Any, parameters: list[NDArray[Any]], config: Scalars) -> None:
        self.client = client
        self.asked: Any = None
        self.outcome: Reply | BaseException = RuntimeError("The round is not over.")
        self._steps: Steps[Reply] = client.run_round(parameters, config)

    def advance(self, perform: Callable[[], Scalars] | None = None) -> None:
        """Do what the client waits for, and go on to its next step or to its end."""
        self.asked = None
        try:
            with plain_errors(), self.in_turn():
                # Typed for what is sent to a generator that runs; this may be its first step.
                metrics: Any = None if perform is None else perform()
                try:
                    self.asked = self._steps.send(metrics)
                except StopIteration as done:
                    self.outcome = done.value
        except Interrupted:
            raise
        except BaseException as error:
            self.outcome = error

    def advance_alone(self) -> None:
        """Go on with the client's step taken by itself."""
        self.advance(partial(self.client.perform, self.asked))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Surround each part of the client's round, between which other clients do theirs."""
        yield

    def close(self) -> None:
        """Leave the contexts of a round that did not come to its end."""
        with self.in_turn():
            self._steps.close()


AnySession = TypeVar("AnySession", bound=Session)


def run_together(
    sessions: Sequence[AnySession], advance: Callable[[Sequence[AnySession]], None]
) -> list[Reply | BaseException]:
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
