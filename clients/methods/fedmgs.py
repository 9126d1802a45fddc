"""The client of FedMGS; the strategy and the paper are in `fl_admm_strategies.FedMGS`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedMGS
from fl_admm_strategies.algorithms.fedmgs import CURVATURE
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.messages import FedMCFactors, FedMGSInstruction

from ..toolkit.round.completion import Residual
from ..toolkit.solving.steps import Reply, Scalars
from .fedmavg import GradientStepsClient, largest_eigenvalue


class FedMGSClient(GradientStepsClient[FedMGSInstruction]):
    """Client of `FedMGS`: the ratings of its users, of which it shares gradients.

    Parameters
    ----------
    context, train, test, mean, std, state_dir
        As those of `FedMCADMMClient`.
    regularizer : SquaredL2
        R_i = lambda/2 |U_i|^2, on the users' factors.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_ratings(context.node_config["partition-id"])
    ...     return FedMGSClient(context, train, SquaredL2(1e-6), test=test).to_client()
    """

    strategy = FedMGS
    instruction = FedMGSInstruction

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return G_i at (U_i^0, V), and lambda_i."""
        asked = FedMCFactors.decode(parameters, config)
        factors = self.checked(asked.factors)
        residual = Residual(self.train_ratings, factors.dtype)
        gradient, metrics = self._shared(residual, self.first_users(factors, asked), factors.T)
        return [gradient], self.train_size(), metrics

    def train(self, asked: FedMGSInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Move U_i at the received V.

        Uploads G_i = U_i^T E at the new U_i and that V, of shape (r, n). Metrics: ``loss``, f_i
        there for each training rating, and lambda_max(U_i^T U_i).
        """
        gradient, metrics = self._shared(*self.user_step(asked, config))
        return dict.fromkeys(asked.factors, gradient), metrics

    def _shared(
        self, residual: Residual, users: NDArray[Any], items: NDArray[Any]
    ) -> tuple[NDArray[Any], Scalars]:
        """Return the gradient of f_i in V, shape (r, n), and what goes with it."""
        loss = residual.loss(users, items) / self.train_size()
        gradient = np.ascontiguousarray(residual.item_gradient(users, items).T)
        return gradient, {"loss": loss, CURVATURE: largest_eigenvalue(users)}
