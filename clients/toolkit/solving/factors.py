"""Exact minimisers over users' or items' factors, the others fixed: one small system a row.

With ``feedback="explicit"`` a rating is predicted as mean + b_t + c_j + u_t v_j. Rows of factors
are (u_t, b_t) and (v_j, c_j): the last number is the bias; its partner in the other row is the
constant 1. The mean is that of the client's training ratings. Users' loss:

    1/2 sum over ratings (M_tj - mean - b_t - c_j - u_t v_j)^2 + lam/2 (|u_t|^2 + b_t^2)

With ``feedback="implicit"`` (Hu, Koren, Volinsky, ICDM 2008) rows are u_t and v_j alone, and all
items count, those without an interaction as a 0 of weight 1, the others as a 1 of weight
1 + confidence M_tj:

    1/2 sum over all t, j of (1 + confidence M_tj) ([M_tj > 0] - u_t v_j)^2 + lam/2 |u_t|^2
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_admm_strategies.maths.normal import packed, packed_outer, solve_rows

from ..data.ratings import Ratings

USERS, ITEMS, MEAN = "user-factors", "item-factors", "mean"
"""Names of what a client keeps of a model."""


class FactorModel:
    """Predictions u_t v_j, or mean + b_t + c_j + u_t v_j.

    Parameters
    ----------
    users : ndarray of shape (m, k)
    items : ndarray of shape (n, k)
    mean : float or None
        None where there are no biases.
    """

    def __init__(self, users: NDArray[Any], items: NDArray[Any], mean: float | None = None) -> None:
        if mean is not None:  # (u, b, 1) times (v, 1, c)
            users = np.insert(users, users.shape[1], 1, axis=1)
            items = np.insert(items, -1, 1, axis=1)
        self._users, self._items, self._mean = users, items, mean or 0.0

    def of_pairs(self, users: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
        """Return the predictions of pairs (t, j), shape (k,)."""
        products = np.einsum("kr,kr->k", self._users[users], self._items[items])
        return np.asarray(products + self._mean)

    def of_all(self) -> NDArray[Any]:
        """Return the predictions of all users and items, shape (m, n)."""
        return np.asarray(self._users @ self._items.T + self._mean)


class Equations(NamedTuple):
    """A x = b of every row: what its own ratings bring, and what is in all of them.

    Attributes
    ----------
    matrices : ndarray of shape (m, k (k + 1)/2)
        Packed; see `fl_admm_strategies.maths.normal`.
    vectors : ndarray of shape (m, k)
    gram : ndarray of shape (k (k + 1)/2,)
        Part of every row's A: F^T F of all factors F with implicit feedback, else 0.
    """

    matrices: NDArray[Any]
    vectors: NDArray[Any]
    gram: NDArray[Any]

    def solved(self, ridge: float, anchor: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return x of every row, drawn to that of the anchor, by default to 0."""
        return solve_rows(self.matrices + self.gram, self.vectors, ridge, anchor)


class _Side(NamedTuple):
    weights: Any  # sparse: of the squares, beyond 1 where all items count
    targets: Any  # sparse: weight times target


class FactorSolver:
    """The systems of some users' ratings.

    Parameters
    ----------
    ratings : Ratings
    feedback : {"explicit", "implicit"}
    confidence : float
        Of an interaction of 1, with implicit feedback.
    mean : float, optional
        With explicit feedback, where it is not that of these ratings.

    Attributes
    ----------
    mean : float or None
        That of the ratings; None with implicit feedback.
    """

    def __init__(
        self, ratings: Ratings, feedback: str, confidence: float, *, mean: float | None = None
    ) -> None:
        self.explicit = feedback == "explicit"
        self.mean: float | None
        weights, targets = ratings.pattern(), ratings.to_csr()
        if self.explicit:
            self.mean = float(ratings.values.mean()) if mean is None else mean
            targets.data = ratings.values - self.mean
        else:
            if not (ratings.values > 0).all():
                raise ValueError(
                    f"values holds {ratings.values.min()}, expected numbers above 0 with "
                    "feedback='implicit': list interactions, and leave out what is none."
                )
            self.mean = None
            weights.data = confidence * ratings.values
            targets.data = 1 + weights.data
        self._by_user = _Side(weights, targets)
        self._by_item = _Side(weights.T.tocsr(), targets.T.tocsr())

    def users(self, items: NDArray[Any], lam: float) -> NDArray[Any]:
        """Return all users' factors, shape (m, k), by the items', shape (n, k).

        Raises
        ------
        ValueError
            If `lam` is 0.
        """
        if not lam > 0:
            raise ValueError(
                "regularizer is SquaredL2(0), expected a weight above 0: the factors of a user "
                "with few ratings are not determined without."
            )
        return self._equations(self._by_user, items).solved(lam)

    def kept(self, users: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return what a client keeps of its users: their factors, and the mean beside biases."""
        return {USERS: users, MEAN: np.array([self.mean])} if self.explicit else {USERS: users}

    def item_equations(self, users: NDArray[Any]) -> Equations:
        """Return these users' part in the equations of all items."""
        return self._equations(self._by_item, users)

    def items(self, users: NDArray[Any], pull: float, anchor: NDArray[Any]) -> NDArray[Any]:
        """Return the items' factors that fit these users best, drawn to an anchor, (n, k).

        They minimise the loss + pull/2 |W - anchor|^2.
        """
        return self.item_equations(users).solved(pull, anchor)

    def loss(self, users: NDArray[Any], items: NDArray[Any]) -> float:
        """Return the loss, without the regulariser."""
        side = self._by_user
        of_users = np.repeat(np.arange(len(users)), np.diff(side.weights.indptr))
        weights, of_items = side.weights.data, side.weights.indices
        scores = FactorModel(users, items, 0.0 if self.explicit else None).of_pairs(
            of_users, of_items
        )
        if self.explicit:
            errors = scores - side.targets.data
            return 0.5 * float(errors @ errors)
        everywhere = float(np.sum((users.T @ users) * (items.T @ items)))
        listed = float(weights @ scores**2 - 2 * (side.targets.data @ scores))
        return 0.5 * (everywhere + listed + float(side.targets.data.sum()))

    def _equations(self, side: _Side, factors: NDArray[Any]) -> Equations:
        if not self.explicit:
            matrices = side.weights @ packed_outer(factors)
            return Equations(matrices, side.targets @ factors, packed(factors.T @ factors))
        # (v, 1) in place of (v, c) is what the other side's factors and bias multiply.
        bias, with_one = factors[:, -1:], factors.copy()
        with_one[:, -1] = 1
        vectors = side.targets @ with_one - side.weights @ (bias * with_one)
        matrices = side.weights @ packed_outer(with_one)
        return Equations(matrices, vectors, np.zeros(matrices.shape[1], matrices.dtype))
