"""Recommending without a federation: a finished model, for a few ratings of any user.

A user's factors are the minimiser for the user's own ratings, so they follow from the items'
factors alone. A client can compute them for a new user, and so can an app on a phone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_admm_strategies.maths.checks import check_choice, check_positive

from ..data.ranking import top_items
from ..data.ratings import Ratings, check_indices
from .factors import FactorModel, FactorSolver


class FactorRecommender:
    """Items' factors of `FedALS`, or of `FedMCADMM` with exact solutions.

    Parameters
    ----------
    item_factors : array of shape (r, n)
        V, ``strategy.global_arrays["item-factors"].numpy()``.
    lam : float
        The weight of the clients' `SquaredL2`.
    feedback : {"explicit", "implicit"} (default: "explicit")
        The strategy's.
    confidence : float (default: 1.0)
        The strategy's.
    mean : float (default: 0.0)
        With explicit feedback what stars are predicted from for a user with few ratings, such as
        the mean of a client's ratings. It is of no matter for the order of the items.

    Examples
    --------
    >>> V = np.array([[1.0, 0.9, -1.0, 0.0], [0.3, 0.1, 0.0, 0.2]])  # one factor, and biases
    >>> model = FactorRecommender(V, lam=1.0, mean=3.5)
    >>> model.recommend([0], [5.0], n=2)
    array([1, 3])
    >>> model.similar_items(0, n=1)
    array([1])
    """

    def __init__(
        self,
        item_factors: ArrayLike,
        *,
        lam: float,
        feedback: str = "explicit",
        confidence: float = 1.0,
        mean: float = 0.0,
    ) -> None:
        check_positive("lam", lam)
        check_positive("confidence", confidence)
        check_choice("feedback", feedback, ("explicit", "implicit"))
        self._items = np.asarray(item_factors, dtype=np.float64).T
        if self._items.ndim != 2 or not np.isfinite(self._items).all():
            raise ValueError(
                f"item_factors has shape {self._items.T.shape}, expected (rank, items) and finite "
                "numbers."
            )
        self._lam, self._feedback, self._confidence = lam, feedback, confidence
        self._mean = mean if feedback == "explicit" else None

    def scores(self, items: ArrayLike, values: ArrayLike | None = None) -> NDArray[Any]:
        """Return a user's scores of all items, shape (n,).

        They are predicted ratings, in the ratings' unit. Of a user without a rating they are `mean`
        and the items' biases, or with implicit feedback 0.

        Parameters
        ----------
        items : array of int
            What the user rated, or has.
        values : array, optional
            How; 1 each by default.
        """
        num_items, rank = self._items.shape
        items = np.asarray(items, dtype=np.int64)
        users = np.zeros((1, rank))
        if len(items):
            given = np.ones(len(items)) if values is None else np.asarray(values, dtype=np.float64)
            ratings = Ratings(np.zeros_like(items), items, given, 1, num_items)
            solver = FactorSolver(ratings, self._feedback, self._confidence, mean=self._mean)
            users = solver.users(self._items, self._lam)
        return np.asarray(FactorModel(users, self._items, self._mean).of_all()[0])

    def recommend(
        self,
        items: ArrayLike,
        values: ArrayLike | None = None,
        *,
        n: int = 10,
        exclude_seen: bool = True,
    ) -> NDArray[np.int64]:
        """Return the n items with the largest scores for a user, best first.

        Parameters
        ----------
        items, values
            As in `scores`.
        n : int (default: 10)
            How many; fewer come back where there are not so many.
        exclude_seen : bool (default: True)
            Leave out what the user has.
        """
        return top_items(self.scores(items, values), np.asarray(items) if exclude_seen else [], n)

    def similar_items(self, item: int, n: int = 10) -> NDArray[np.int64]:
        """Return the n items most like one, by the cosine of their factors, most alike first."""
        vectors = self._items[:, :-1] if self._feedback == "explicit" else self._items
        check_indices("item", [item], len(vectors))
        lengths = np.linalg.norm(vectors, axis=1)
        cosines = vectors @ vectors[item] / np.maximum(lengths * lengths[item], 1e-12)
        return top_items(cosines, [item], n)
