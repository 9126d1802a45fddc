"""The clients of FedGiA; the strategy and the paper are in `fl_admm_strategies.FedGiA`.

A client uploads one gradient. With the Gram matrix it also takes the steps (13) to (18) of
arXiv:2205.01438, which are not elementwise.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedGiA
from fl_admm_strategies.algorithms.fedgia import (
    CURVATURE,
    MESSAGE,
    FedGiAInstruction,
    FedGiAQuestion,
    FedGiARule,
)
from fl_admm_strategies.algorithms.shared.rule import Row
from fl_admm_strategies.maths.blocks import Arrays, prefixed

from ..toolkit.round.base import MethodClient
from ..toolkit.round.linear import LinearClient
from ..toolkit.solving.curvature import Vector
from ..toolkit.solving.steps import Reply, Scalars


class GradientClient(MethodClient[FedGiAInstruction]):
    """What the two clients share: a round is one gradient."""

    strategy = FedGiA
    instruction = FedGiAInstruction
    closed_form = "its local steps are a formula of one gradient"

    @abstractmethod
    def loss_and_gradient(self, model: Arrays) -> tuple[float, Arrays]:
        """Return f_i and its gradient, for every array of the model that is trained."""

    @abstractmethod
    def measure_curvature(self, asked: FedGiAQuestion, config: Scalars) -> float:
        """Return r_i."""

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return r_i as the metric ``curvature``."""
        asked = FedGiAQuestion.decode(parameters, config)
        return [], self.train_size(), {CURVATURE: self.measure_curvature(asked, config)}

    def train(self, asked: FedGiAInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Upload grad f_i(x), in the arrays of the model.

        Metrics: ``loss``, f_i(x).
        """
        loss, gradient = self.loss_and_gradient(asked.model)
        self.initial_loss = loss
        return asked.model | gradient, {"loss": loss}


class FedGiALinearClient(GradientClient, LinearClient[FedGiAInstruction]):
    """Client of `FedGiA` with a linear model over a data matrix, in float64 and closed form.

    Serves both choices of H_i in Table II. Parameters are those of `LinearClient`.

    Examples
    --------
    >>> @lru_cache
    ... def problem(client_id: int) -> LeastSquares:
    ...     return LeastSquares(*load_data(client_id))
    >>> def client_fn(context: Context):
    ...     return FedGiALinearClient(
    ...         context, problem(context.node_config["partition-id"])
    ...     ).to_client()
    """

    def loss_and_gradient(self, model: Arrays) -> tuple[float, Arrays]:
        """Return f_i and its gradient."""
        loss, gradient = self.problem.value_and_gradient(self.vector(model))
        return loss, {n: gradient.reshape(a.shape).astype(a.dtype) for n, a in model.items()}

    def measure_curvature(self, asked: FedGiAQuestion, config: Scalars) -> float:
        """Return r_i, which is the same everywhere."""
        self.vector(asked.model)
        return self.problem.largest_curvature()

    def train(self, asked: FedGiAInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Upload grad f_i(x), with the Gram matrix z_i as well."""
        upload, metrics = super().train(asked, config)
        rule = FedGiARule.read(asked.rule)
        if rule.gram:
            ((name, sent),) = asked.model.items()
            z = self._gram_steps(rule, self.vector(asked.model), self.vector(upload), config)
            upload |= prefixed(MESSAGE, {name: z.reshape(sent.shape).astype(sent.dtype)})
        return upload, metrics

    def _gram_steps(self, rule: FedGiARule, x: Vector, gradient: Vector, config: Scalars) -> Vector:
        """Return z_i after the ADMM group's steps, or after the gradient step; keep pi_i.

        The rule is elementwise in the basis of the Gram matrix's eigenvectors.
        """
        kept = self.memory.require_known(config) if rule.steps else None
        dual = np.zeros_like(x) if kept is None else kept["dual"]
        values, basis = self.problem.gram
        vectors = np.stack([dual, gradient, x])
        inside = vectors @ basis.T
        within = moved(rule, values, inside)
        beside = moved(rule, self.problem.reg, vectors - inside @ basis)
        self.memory.keep(config, {"dual": within.pi @ basis + beside.pi})
        return np.asarray(within.z @ basis + beside.z)


def moved(rule: FedGiARule, curvature: Any, vectors: NDArray[np.float64]) -> Row:
    """Return z_i and pi_i after a round, by pi_i, grad f_i(x) and x; one curvature a number."""
    dual, gradient, x = vectors
    return replace(rule, gram=False, curvature=curvature).move(Row(pi=dual), gradient, x)
