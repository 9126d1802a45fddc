"""Clients of a linear model over a data matrix, in numpy and float64."""

from __future__ import annotations

import os
from typing import Any, Never

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fl_admm_strategies.maths.blocks import Arrays

from ..solving.curvature import DataLoss, Vector
from ..solving.steps import Scalars
from .base import Asked, MethodClient


class LinearClient(MethodClient[Asked]):
    """Base of the clients with a linear model over a data matrix.

    The strategy's initial arrays are one array of n numbers:
    ``ArrayRecord({"x": Array(np.zeros(n))})``.

    Parameters
    ----------
    context : Context
        The client's context.
    problem : LeastSquares or Logistic
        f_i. Make it once a process and keep it, where you can: a factorised Gram matrix stays with
        it.
    test_problem : LeastSquares or Logistic, optional
        What `evaluate` reports on; without it the client refuses to evaluate.
    state_dir : str or path, optional
        Folder for what the client keeps, if it does, so that it outlives the run: see `Memory`. By
        default it is in ``context.state``.
    """

    def __init__(
        self,
        context: Context,
        problem: DataLoss,
        test_problem: DataLoss | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__(context, state_dir=state_dir, **unknown)
        self.problem = problem
        self.test_problem = test_problem

    def get_parameters(self, config: Scalars) -> list[NDArray[Any]]:
        """Return x = 0."""
        return [np.zeros(self.problem.size)]

    def train_size(self) -> int:
        """Return d_i."""
        return self.problem.num_examples

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> tuple[float, int, Scalars]:
        """Evaluate the model on the test data.

        Returns
        -------
        loss : float
        num_examples : int
        metrics : dict
            ``global-loss``, and ``global-rmse`` or ``global-accuracy``.
        """
        if self.test_problem is None:
            raise ValueError(
                "This client has no test_problem, so it cannot evaluate. Give it one, or switch "
                "federated evaluation off with fraction_evaluate=0."
            )
        x = self.vector(self.models(parameters, config)["global"])
        loss, _ = self.test_problem.value_and_gradient(x)
        report = {"loss": loss} | self.test_problem.metrics(x)
        metrics = {f"global-{name}": value for name, value in report.items()}
        return loss, self.test_problem.num_examples, metrics

    def vector(self, model: Arrays) -> Vector:
        """Return x as float64, shape (n,)."""
        arrays = list(model.values())
        if [array.size for array in arrays] != [self.problem.size]:
            raise ValueError(
                f"The server sent arrays of shapes {[array.shape for array in arrays]}, expected "
                f"one of {self.problem.size} numbers, one for each column of the data matrix. "
                'Start with ArrayRecord({"x": Array(np.zeros(n))}).'
            )
        return np.asarray(arrays[0].ravel(), dtype=np.float64)
