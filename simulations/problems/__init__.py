"""The problems by kind of data: what clients are made of, their start, what is measured."""

from __future__ import annotations

from .base import Problem as Problem
from .factors import FactorProblem as FactorProblem
from .linear import LinearProblem as LinearProblem
from .torch_model import TorchProblem as TorchProblem

PROBLEMS: list[type[Problem]] = [TorchProblem, FactorProblem, LinearProblem]


def problem_of(data_type: type) -> type[Problem]:
    """Return the problem of a kind of data.

    Raises
    ------
    KeyError
        If there is none.
    """
    return {problem.data_type: problem for problem in PROBLEMS}[data_type]
