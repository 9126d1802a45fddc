"""The clients of FedGiA; the strategy and the paper are in `fl_admm_strategies.FedGiA`.

Here are equations (13) to (18) of arXiv:2205.01438.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedGiA
from fl_admm_strategies.algorithms.fedgia import DUAL, GRADIENT, FedGiAInstruction, FedGiAQuestion
from fl_admm_strategies.maths.blocks import Arrays, Block, prefixed

from ..toolkit.round.base import MethodClient
from ..toolkit.round.linear import LinearClient
from ..toolkit.solving.curvature import Curvature, ScaledIdentity, Vector
from ..toolkit.solving.steps import Reply, Scalars


def admm_steps(
    x: Vector,
    gradient: Vector,
    dual: Vector,
    hessian: Curvature,
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
    hessian : Curvature
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


class FedGiASteps(MethodClient[FedGiAInstruction]):
    """What the two clients share: the round, over a gradient and a curvature that they give."""

    strategy = FedGiA
    instruction = FedGiAInstruction
    closed_form = "its local steps are a formula of one gradient"

    @abstractmethod
    def loss_and_gradient(self, model: Arrays) -> tuple[float, Arrays]:
        """Return f_i and its gradient, for every array of the model that is trained."""

    @abstractmethod
    def measure_curvature(self, model: Arrays, config: Scalars) -> Scalars:
        """Answer the handshake: ``curvature``, r_i, and what else the server may log."""

    @abstractmethod
    def gram(self) -> Curvature:
        """Return the Gram matrix H_i, or refuse."""

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return r_i as the metric ``curvature``."""
        asked = FedGiAQuestion.decode(parameters, config)
        if asked.hessian == "gram":
            self.gram()
        return [], self.train_size(), self.measure_curvature(asked.model, config)

    def train(self, asked: FedGiAInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Take part in a round (Algorithm 1): one gradient, then (13)-(15) k0 times or (16)-(18).

        Uploads z_i, in the arrays of the model; then pi_i, unless the client keeps it; then
        grad f_i(x)/m, where the server asks for it. Metrics: ``loss``, f_i(x) at the point that the
        server sent.
        """
        gram = self.gram() if asked.hessian == "gram" else None
        loss, slopes = self.loss_and_gradient(asked.model)
        block = Block.optimised(asked.model, slopes)
        x = block.vector(asked.model).astype(np.float64)
        gradient = np.concatenate([slopes[n].ravel() for n in block.names], dtype=np.float64)
        gradient /= asked.num_clients
        if asked.admm:
            iterate, dual = admm_steps(
                x,
                gradient,
                self._dual(asked, config, x),
                gram or ScaledIdentity(asked.curvature),
                num_clients=asked.num_clients,
                sigma=asked.sigma,
                steps=asked.local_steps,
            )  # (13), (14)
        else:
            iterate, dual = x, -gradient  # (16), (17)
        message = iterate + dual / asked.sigma  # (15), (18)
        upload = asked.model | block.arrays(message)
        if asked.keep_dual:
            self.memory.keep(config, {"dual": dual})
        else:
            upload |= prefixed(DUAL, block.arrays(dual))
        if asked.report_gradient:
            upload |= prefixed(GRADIENT, block.arrays(gradient))
        self.initial_loss = loss
        return upload, {"loss": loss}

    def _dual(self, asked: FedGiAInstruction, config: Scalars, x: Vector) -> NDArray[np.float64]:
        """Return pi_i: what the server sent, else what the client kept, else pi_i^0 = 0."""
        if asked.dual is not None:
            return np.concatenate([a.ravel() for a in asked.dual.values()], dtype=np.float64)
        kept = self.memory.require_known(config)
        return np.zeros_like(x) if kept is None else kept["dual"]


class FedGiALinearClient(LinearClient[FedGiAInstruction], FedGiASteps):
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
        return loss, dict.fromkeys(model, gradient)

    def measure_curvature(self, model: Arrays, config: Scalars) -> Scalars:
        """Return r_i, and how many columns of the data are all zero or constant."""
        self.vector(model)
        return {
            "curvature": self.problem.largest_curvature(),
            "zero-columns": len(self.problem.zero_columns),
            "constant-columns": len(self.problem.constant_columns),
        }

    def gram(self) -> Curvature:
        """Return the Gram matrix H_i."""
        return self.problem.gram
