"""The client of FedEASE; the strategy and the paper are in `fl_admm_strategies.FedEASE`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies import FedEASE
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.normal import packed
from fl_admm_strategies.messages import FedEASEEvaluation, FedEASEInstruction

from ..toolkit.data.ranking import top_items
from ..toolkit.round.completion import RatingsClient
from ..toolkit.solving.steps import Scalars


class FedEASEClient(RatingsClient[FedEASEInstruction]):
    """Client of `FedEASE`: which items its users have. It keeps nothing between rounds.

    Parameters
    ----------
    context : Context
        The client's context, as `client_fn(context)` receives it.
    train : Ratings
        What is listed counts, whatever the values; `num_items` is n, the same for all clients.
    test : Ratings, optional
        Ratings of the same users to rank for.
    rank_at : int, optional
        k: an evaluation brings HR, precision, recall and NDCG at k of the test ratings.
    relevant : float (default: -infinity)
        The least test rating that counts as relevant there.
    mean, std : float (default: 0 and 1)
        As in `FedMCADMMClient`; they are for `relevant` alone.
    state_dir : str or path, optional
        Not used: there is nothing to keep.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_ratings(context.node_config["partition-id"])
    ...     return FedEASEClient(context, train, test=test, rank_at=10).to_client()
    """

    strategy = FedEASE
    instruction = FedEASEInstruction
    closed_form = "it counts pairs of items, and descends on nothing"

    def train(self, asked: FedEASEInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Upload how many users have both of two items, packed, in the order of the items."""
        ratings = self.train_ratings
        if ratings.num_items != asked.num_items:
            raise ValueError(
                f"The server has {asked.num_items} items, this client's ratings are of "
                f"{ratings.num_items}. All clients and initial_item_weights must number the same."
            )
        if not asked.upload:
            return {}, {}
        seen = ratings.pattern()
        pairs = packed((seen.T @ seen).toarray())
        return {"pairs": pairs.astype(np.float32)}, {}

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> tuple[float, int, Scalars]:
        """Rank the items by x B.

        Returns
        -------
        loss : float
            The sum of (x - x B)^2 over the items, for each training rating.
        num_examples : int
            Number of training ratings.
        metrics : dict
            ``ranked-users``, ``hits``, ``precisions``, ``recalls`` and ``ndcgs``, sums over users,
            where there are test ratings and a `rank_at`.
        """
        (weights,) = FedEASEEvaluation.decode(parameters, config).weights.values()
        scores = self.scores(weights)
        ratings = self.train_ratings
        loss = float((scores**2).sum() - 2 * scores[ratings.users, ratings.items].sum())
        loss = (loss + len(ratings)) / len(ratings)
        return loss, len(ratings), self.ranking_metrics(lambda: scores)

    def scores(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Return x B of all users, shape (m, n)."""
        return np.asarray(self.train_ratings.pattern(weights.dtype) @ weights)

    def recommend(
        self, user: int, n: int, item_weights: NDArray[Any], *, exclude_seen: bool = True
    ) -> NDArray[np.int64]:
        """Return the items with the largest scores of one user, best first.

        Parameters
        ----------
        user : int
            By the client's own numbers, 0 <= user < m_i.
        n : int
            How many; fewer come back where there are not so many.
        item_weights : ndarray of shape (n, n)
            B, ``strategy.global_arrays["item-weights"].numpy()``.
        exclude_seen : bool (default: True)
            Leave out what the user has in the training ratings.

        Returns
        -------
        ndarray of int64
        """
        seen = self.seen_by(user)
        return top_items(item_weights[seen].sum(axis=0), seen if exclude_seen else [], n)
