"""A client's part of a round in steps, between which somebody else may do its descents."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


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


Steps = Generator[Any, dict[str, Any], Result]
"""Yields what is to be done, such as a `Minimisation`, is sent what came of it; has a result."""


def alone(steps: Steps[Result], solve: Callable[[Any], dict[str, Any]]) -> Result:
    """Take all steps, one after another, with a solver.

    What the solver raises is raised in the method, where the step stands: it leaves its contexts,
    such as the client's random numbers, at once, and not when the garbage is collected.
    """
    try:
        asked = next(steps)
        while True:
            try:
                metrics = solve(asked)
            except BaseException as error:
                asked = steps.throw(error)
            else:
                asked = steps.send(metrics)
    except StopIteration as done:
        result: Result = done.value
        return result
