"""The client of FedMC-ADMM; the strategy and the paper are in `fl_admm_strategies.FedMCADMM`.

Here are (14) and (15) of Algorithm 1 of arXiv:2503.12733. The exact minimisers that take their
place by default are in `clients.toolkit.solving.factors`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedMCADMM
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.regularizers import Regularizer
from fl_admm_strategies.messages import FedMCInstruction

from ..toolkit.data.ratings import Ratings
from ..toolkit.round.completion import (
    LEAST_LIPSCHITZ,
    CompletionClient,
    Residual,
)
from ..toolkit.solving.factors import FactorSolver
from ..toolkit.solving.steps import Reply, Scalars


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


class FedMCADMMClient(CompletionClient[FedMCInstruction]):
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
    instruction = FedMCInstruction

    def answer_handshake(self, parameters: list[NDArray[Any]], config: Scalars) -> Reply:
        """Return which items are rated here."""
        rated = np.zeros(self.train_ratings.num_items, np.bool_)
        rated[self.train_ratings.items] = True
        return [rated], self.train_size(), {}

    def train(self, asked: FedMCInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Take both minimisers, or N steps on U_i, then N on W_i.

        Uploads W_i^{k+1}, of shape (r, n); with ``duals="client"`` Z_i^{k+1} - Z_i^k, where
        Z_i = W_i + Y_i/beta, or W_i^{k+1} - V^k where V is of the participants' W_i. Metrics:
        ``loss``, f_i for each training rating at the new factors.
        """
        if asked.rated_only:
            return self._train_on_rated(asked, config)
        received = self.checked(asked.anchor)  # V^k, where the dual is here; else the anchor
        # A U_i that the server knows of is not drawn anew in silence.
        known = self.memory.recall if asked.dual is None else self.memory.require_known
        held = known(config)
        if held is None or asked.begins:
            held = self._first_variables(held, asked, config)
        anchor = received - held["Y"] / asked.beta if "Y" in held else received
        start = received if asked.start_at == "global" else held["W"]
        kept, items, loss = self._moved(self.train_ratings, held["U"], start, anchor, asked)
        new = kept | {"W": items}
        upload = dict.fromkeys(asked.anchor, new["W"])
        change = new["W"] - received
        if asked.duals == "client":
            of_all = asked.averaging == "all"
            if of_all:
                change += new["W"] - held["W"]  # of Z_i: the first is (Y_new - Y_old)/beta
            whole, share = self.clipped(dict.fromkeys(asked.anchor, change), {}, config)
            if share < 1:
                new["W"] = items - (1 - share) / (2 if of_all else 1) * change
            upload, held_back = self.whole_change(whole, config, first=asked.begins)
            new |= held_back
        if "Y" in held:
            new["Y"] = held["Y"] + asked.beta * (new["W"] - received)  # (13)
        self.keep(config, new)
        return upload, {"loss": loss}

    def _moved(
        self,
        ratings: Ratings,
        users: NDArray[Any],
        items: NDArray[Any],
        anchor: NDArray[Any],
        asked: FedMCInstruction,
    ) -> tuple[Arrays, NDArray[Any], float]:
        """Return U_i as it is kept, W_i, and the loss by rating; all items are (r, n).

        Both minimisers, or the steps from U_i and W_i.
        """
        if not asked.published:
            solver = FactorSolver(ratings, asked.feedback, asked.confidence)
            users = solver.users(items.T, self.lam)
            found = solver.items(users, asked.beta, anchor.T)
            loss = solver.loss(users, found) / self.train_size()
            return solver.kept(users), np.ascontiguousarray(found.T.astype(anchor.dtype)), loss
        residual, before = Residual(ratings, anchor.dtype), np.ascontiguousarray(items.T)
        users = user_steps(residual, users, before, self.regularizer, asked.inner_steps)
        weight, target = asked.num_clients * asked.beta, np.ascontiguousarray(anchor.T)
        found = item_steps(residual, users, before, target, weight, asked.inner_steps)
        if not np.isfinite(found).all():
            raise ValueError(
                f"The steps diverged: W_i is not finite at beta={asked.beta}. Try a larger beta or "
                "a smaller init_scale."
            )
        loss = residual.loss(users, found) / self.train_size()
        return {"U": users}, np.ascontiguousarray(found.T), loss

    def _train_on_rated(self, asked: FedMCInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Take both minimisers over the items that are rated here; keep U_i alone."""
        assert asked.start is not None
        ((name, anchor),), (v,) = asked.anchor.items(), asked.start.values()
        rated = self.train_ratings.of_rated_items()
        if not anchor.shape == v.shape == (len(anchor), rated.num_items):
            raise ValueError(
                f"The server sent factors of shape {anchor.shape}, expected {rated.num_items} "
                "columns: one for each item rated here. client_fn must give the same ratings in "
                "every round."
            )
        kept, items, loss = self._moved(rated, anchor, v, anchor, asked)
        self.keep(config, kept)
        return {name: items}, {"loss": loss}

    def _first_variables(
        self, held: Arrays | None, asked: FedMCInstruction, config: Scalars
    ) -> Arrays:
        """Return U_i^0, unless it holds a U_i, the server's W_i and Y_i, to start from."""
        if not asked.begins:
            raise self.memory.lost(config)
        first = self.checked(asked.anchor if asked.start is None else asked.start)
        users = self.first_users(first, asked) if held is None else held["U"]
        begun = {"U": users, "W": first}
        if asked.dual:
            begun["Y"] = self.checked(asked.dual)
        elif asked.duals == "client" or asked.dual is not None:
            begun["Y"] = np.zeros_like(first)
        return begun
