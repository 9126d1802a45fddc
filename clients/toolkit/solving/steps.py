"""How a method asks for its descents, and what takes them: one client's driver or that of many.

A client's `run_round` is a generator. It yields what is to be done, such as a `Minimisation`, and
is sent the metrics of that. `take_steps` drives one client. `cohort.train_together` drives several,
so that steps of the same kind are taken in one computation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays

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
Driver = Callable[[Sequence[Job], Choice, bool], list[Any]]
"""Does for several clients what their `fit` does, or their `evaluate`, in the order of the jobs: a
list of what it returned or raised."""


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
