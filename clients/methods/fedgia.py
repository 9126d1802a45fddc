"""The clients of FedGiA; the strategy and the paper are in `fl_admm_strategies.FedGiA`.

A client uploads one gradient. With the Gram matrix it also takes the steps (13) to (18) of
arXiv:2205.01438, which are not elementwise.
"""

from __future__ import annotations

from abc import abstractmethod
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
from fl_admm_strategies.maths.blocks import Arrays, prefixed

from ..toolkit.round.base import MethodClient
from ..toolkit.round.linear import LinearClient
from ..toolkit.solving.curvature import Gram, Vector
from ..toolkit.solving.steps import Reply, Scalars


def admm_steps(
    x: Vector,
    gradient: Vector,
    dual: Vector,
    hessian: Gram,
    *,
    num_clients: int,
    sigma: float,
    steps: int,
) -> tuple[Vector, Vector]:
    """Take k0 steps of the inexact ADMM group, (13) and (14), at the cost of one.

    The steps keep x and the gradient, so only e = gradient + pi changes: with M = (H_i/m)
    (H_i/m + sigma I)^-1, a step is e <- M e, and k0 of them are a function of H_i.

    Parameters
    ----------
    x : ndarray of shape (n,)
        x^tau, the point that the server sent.
    gradient : ndarray of shape (n,)
        grad f_i(x)/m.
    dual : ndarray of shape (n,)
        pi_i at the start of the round.
    hessian : Gram
        H_i.
    num_clients : int
        m.
    sigma : float
    steps : int
        k0.

    Returns
    -------
    iterate, dual : ndarray of shape (n,)
        x_i and pi_i after the steps.
    """
    pull = num_clients * sigma

    def left(h: Vector) -> Vector:  # the eigenvalues of M^k0
        return np.asarray((h / (h + pull)) ** steps)

    def step(h: Vector) -> Vector:  # those of (H_i/m + sigma I)^-1 M^(k0 - 1)
        return np.asarray((h / (h + pull)) ** (steps - 1) * (num_clients / (h + pull)))

    moved, rest = hessian.apply(gradient + dual, (step, left))
    return x - moved, rest - gradient


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
        """Return z_i after the ADMM group's steps, or after the gradient step; keep pi_i."""
        gradient = gradient / rule.num_clients
        iterate, dual = x, -gradient  # (16), (17)
        if rule.steps:
            kept = self.memory.require_known(config)
            dual = np.zeros_like(x) if kept is None else kept["dual"]
            iterate, dual = admm_steps(
                x,
                gradient,
                dual,
                self.problem.gram,
                num_clients=rule.num_clients,
                sigma=rule.sigma,
                steps=rule.steps,
            )
        self.memory.keep(config, {"dual": dual})
        return np.asarray(iterate + dual / rule.sigma)  # (15), (18)
