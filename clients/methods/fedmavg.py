"""The client of FedMAvg; the strategy and the paper are in `fl_admm_strategies.FedMAvg`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedMAvg
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.messages import FedMAvgInstruction, FedMGSInstruction

from ..toolkit.round.base import Asked
from ..toolkit.round.completion import (
    LEAST_LIPSCHITZ,
    CompletionClient,
    Residual,
)
from ..toolkit.solving.factors import USERS
from ..toolkit.solving.steps import Scalars

_SHORTER = 5  # the paper's d_i = 5 lambda_max(U_i^T U_i); 1 would be enough for descent


class GradientStepsClient(CompletionClient[Asked]):
    """Base of the clients of `FedMAvg` and `FedMGS`: gradient steps, on a regularizer `SquaredL2`.

    Parameters are those of `CompletionClient`.
    """

    def user_step(
        self, asked: FedMAvgInstruction | FedMGSInstruction, config: Scalars
    ) -> tuple[Residual, NDArray[Any], NDArray[Any]]:
        """Return the residual, U_i after its steps at the received V, and V, of shape (n, r).

        They are Q_1 steps U <- U - [E V^T + lambda U]/c with c = lambda_max(V V^T).
        """
        factors = self.checked(asked.factors)
        users, items = self.users_at(factors, asked, config), np.ascontiguousarray(factors.T)
        residual = Residual(self.train_ratings, factors.dtype)
        length = 1 / largest_eigenvalue(items)
        for _ in range(asked.user_steps):
            users = users - length * (residual.user_gradient(users, items) + self.lam * users)
        self.memory.keep(config, {USERS: users})
        return residual, users, items


class FedMAvgClient(GradientStepsClient[FedMAvgInstruction]):
    """Client of `FedMAvg`: the ratings of its users, and their factors, which stay here.

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
    ...     return FedMAvgClient(context, train, SquaredL2(1e-6), test=test).to_client()
    """

    strategy = FedMAvg
    instruction = FedMAvgInstruction

    def train(self, asked: FedMAvgInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Move U_i at the received V; where it is wanted, V at the new U_i as well.

        Uploads W_i, of shape (r, n), or nothing. Metrics: ``loss``, f_i at the new U_i and the
        received V, for each training rating.
        """
        residual, users, items = self.user_step(asked, config)
        metrics = {"loss": residual.loss(users, items) / self.train_size()}
        if asked.upload is not None:
            return {}, metrics
        length = 1 / (_SHORTER * largest_eigenvalue(users))
        for _ in range(asked.item_steps):
            gradient = asked.data_weight * residual.item_gradient(users, items)
            items = items - length * (gradient + asked.gamma * items)
        return dict.fromkeys(asked.factors, np.ascontiguousarray(items.T)), metrics


def largest_eigenvalue(factors: NDArray[Any]) -> float:
    """Return lambda_max(F^T F), which bounds the curvature of f_i in the other block."""
    return max(float(np.linalg.eigvalsh(factors.T @ factors)[-1]), LEAST_LIPSCHITZ)
