"""The client of FedMC-ADMM; the strategy and the paper are in `fl_admm_strategies.FedMCADMM`.

Here are (14) and (15) of Algorithm 1 of arXiv:2503.12733. The exact minimisers that take their
place by default are in `clients.toolkit.solving.factors`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedMCADMM
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.regularizers import Regularizer
from fl_admm_strategies.messages import FedMCInstruction

from ..toolkit.round.completion import LEAST_LIPSCHITZ, CompletionClient, Residual
from ..toolkit.round.mirror import MirrorClient
from ..toolkit.solving.factors import USERS, FactorSolver
from ..toolkit.solving.steps import Scalars


def user_steps(
    residual: Residual,
    users: NDArray[Any],
    items: NDArray[Any],
    regularizer: Regularizer,
    steps: int,
) -> NDArray[Any]:
    """Return U_i after N proximal gradient steps (14), from U_i^k at W_i^k.

    Parameters
    ----------
    residual : Residual
    users : ndarray of shape (m_i, r)
        U_i^k.
    items : ndarray of shape (n, r)
        W_i^k, transposed.
    regularizer : Regularizer
        R_i.
    steps : int
        N.

    Returns
    -------
    ndarray of shape (m_i, r)
        U_i^{k+1}.
    """
    lipschitz = _lipschitz(items)
    for _ in range(steps):
        moved = users - residual.user_gradient(users, items) / lipschitz
        users = regularizer.prox(moved, 1 / lipschitz)  # (66), (71)
    return users


def item_steps(
    residual: Residual,
    users: NDArray[Any],
    items: NDArray[Any],
    anchor: NDArray[Any],
    weight: float,
    steps: int,
) -> NDArray[Any]:
    """Return W_i after N proximal gradient steps (15), from W_i^k at U_i^{k+1}.

    Parameters
    ----------
    residual : Residual
    users : ndarray of shape (m_i, r)
        U_i^{k+1}.
    items, anchor : ndarray of shape (n, r)
        W_i^k and V^k - Y_i^k/beta, transposed.
    weight : float
        p beta.
    steps : int
        N.

    Returns
    -------
    ndarray of shape (n, r)
        W_i^{k+1}, transposed.
    """
    lipschitz, pull = _lipschitz(users), weight * anchor
    for _ in range(steps):  # (67) times p, with beta V - Y in one: beta times the anchor
        moved = lipschitz * items + pull - residual.item_gradient(users, items)
        items = moved / (lipschitz + weight)
    return items


def _lipschitz(factors: NDArray[Any]) -> float:
    """Return |F^T F|_F, which bounds the curvature of f_i in the other block (Remark 4.1)."""
    return max(float(np.linalg.norm(factors.T @ factors)), LEAST_LIPSCHITZ)


class FedMCADMMClient(MirrorClient, CompletionClient[FedMCInstruction]):
    """Client of `FedMCADMM`: the ratings of its users, and their factors, which stay here.

    Parameters
    ----------
    context : Context
        The client's context, as `client_fn(context)` receives it.
    train : Ratings
        M_i to train on; `num_items` is n, the same for all clients.
    regularizer : Regularizer
        R_i, on the users' factors: `SquaredL2(lam)`; with ``published=True`` also `L1Norm(lam)`, or
        one of your own.
    test : Ratings, optional
        Ratings of the same users to evaluate on. A client without has no part in the RMSE.
    mean, std : float (default: 0 and 1)
        Of the stars, where `train` and `test` hold (stars - mean) / std: predictions and the RMSE
        are in stars then. The same for all clients, e.g. of all their training ratings.
    rank_at : int, optional
        k: an evaluation also ranks all items for every user, and brings HR, precision, recall and
        NDCG at k of the test ratings; see `clients.rank`. It computes a score for every user and
        item.
    relevant : float (default: -infinity)
        The least test rating, in stars, that counts as relevant there.
    state_dir : str or path, optional
        Folder for U_i and W_i (with ``duals="client"`` Y_i as well), so that they outlive the run:
        see `Memory`. By default they are in ``context.state``.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_ratings(context.node_config["partition-id"])
    ...     return FedMCADMMClient(context, train, SquaredL2(8.0), test=test).to_client()

    After the run, with the context that the client had in it:

    >>> train, _ = load_ratings(context.node_config["partition-id"])
    >>> best = FedMCADMMClient(context, train, SquaredL2(8.0)).recommend(user=3, n=10)
    """

    strategy = FedMCADMM
    instruction: ClassVar[Any] = FedMCInstruction
    resent = False  # the strategy does not have U_i

    def train(self, asked: FedMCInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Take both minimisers, or N steps on U_i, then N on W_i, pulled to where the rule says.

        Uploads W_i, or the change of Y_i/beta (with ``published=True`` of W_i + Y_i/beta) where the
        client alone holds its variables. Metrics: ``loss``, f_i for each training rating at the new
        factors.
        """
        ratings, v, turn = self.train_ratings, self.checked(asked.model), self.turn(asked, config)
        point, weight = turn.rule.pull(turn.row, turn.w)
        anchor, start = (
            np.ascontiguousarray(vector.reshape(v.shape).T)
            for vector in (point, turn.rule.start(turn.row, turn.w))
        )
        if turn.rule.published:
            residual, steps = Residual(ratings, v.dtype), asked.inner_steps
            users = self.users_at(v, asked, config)
            users = user_steps(residual, users, start, self.regularizer, steps)
            items = item_steps(residual, users, start, anchor, weight, steps)
            kept, loss = {USERS: users}, residual.loss(users, items)
        else:
            solver = FactorSolver(ratings, asked.feedback, asked.confidence)
            users = solver.users(start, self.lam)
            items = solver.items(users, weight, anchor)
            kept, loss = solver.kept(users), solver.loss(users, items)
        upload = dict.fromkeys(asked.model, np.ascontiguousarray(items.T.astype(v.dtype)))
        return self.end(turn, upload, kept, config), {"loss": loss / self.train_size()}
