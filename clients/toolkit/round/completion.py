"""What clients with ratings share: these, their users, lists of items, and descents on factors.

The server's half is `fl_admm_strategies.algorithms.shared.completion`, which has the objective.

Items' factors have the papers' shape (r, n) in messages and in the client's memory, and one row for
each item in the arithmetic, so that the factors of one item lie side by side. Nothing here has a
number for every user and item: a residual is as long as the list of ratings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Never, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from fl_admm_strategies.algorithms.shared.completion import FedMCFactors
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import check_positive
from fl_admm_strategies.maths.regularizers import Regularizer, check_regularizer, squared_l2_weight
from fl_admm_strategies.runtime.messages.records import from_array_record, to_array_record
from fl_admm_strategies.runtime.messages.schema import Instruction

from ..data.ranking import rank, top_items
from ..data.ratings import Ratings, check_indices
from ..solving.factors import ITEMS, MEAN, USERS, FactorModel, FactorSolver
from ..solving.steps import Scalars
from .base import MethodClient

Asked = TypeVar("Asked", bound=Instruction)
LEAST_LIPSCHITZ = 1e-12
"""In place of a Lipschitz constant of 0, which factors of 0 have, and by which nothing divides."""
_EVALUATED = "evaluated"


class Residual:
    """E = P(U W - M): one number for each rating, with the structure that all steps share.

    Parameters
    ----------
    ratings : Ratings
        k ratings.
    dtype : dtype
        That of the arithmetic.
    """

    def __init__(self, ratings: Ratings, dtype: np.dtype[Any]) -> None:
        self._users = ratings.users.astype(np.intp)
        self._items = ratings.items.astype(np.intp)
        self._values = ratings.values.astype(dtype)
        self._matrix = ratings.to_csr()

    def at(self, users: NDArray[Any], items: NDArray[Any]) -> Any:
        """Return E at factors (m_i, r) and (n, r), sparse; it is overwritten by the next call."""
        of_users = users.T.take(self._users, axis=1)
        predicted = np.einsum("rk,rk->k", of_users, items.T.take(self._items, axis=1))
        predicted -= self._values
        self._matrix.data = predicted
        return self._matrix

    def loss(self, users: NDArray[Any], items: NDArray[Any]) -> float:
        """Return f_i, half the sum of the squares."""
        return half_square(self.at(users, items).data)

    def user_gradient(self, users: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
        """Return E V^T, the gradient of f_i in U_i, shape (m_i, r)."""
        return np.asarray(self.at(users, items) @ items)

    def item_gradient(self, users: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
        """Return (U_i^T E)^T, the gradient of f_i in the items' factors, shape (n, r)."""
        return np.asarray(self.at(users, items).T @ users)


def half_square(errors: NDArray[Any]) -> float:
    """Return half the sum of the squares."""
    return 0.5 * float(np.vdot(errors, errors))


class RatingsClient(MethodClient[Asked]):
    """Base of the clients with ratings of some users, for whom they rank items.

    Parameters are those of `FedMCADMMClient`, without a regulariser.
    """

    def __init__(
        self,
        context: Context,
        train: Ratings,
        *,
        test: Ratings | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        rank_at: int | None = None,
        relevant: float = -np.inf,
        state_dir: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        check_positive("std", std)
        if not np.isfinite(mean):
            raise ValueError(f"mean is {mean}, expected a finite number.")
        if test is not None:
            shapes = [(part.num_users, part.num_items) for part in (train, test)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"The training ratings are of {shapes[0]} (users, items), the test ratings of "
                    f"{shapes[1]}. Give both the same num_users and num_items."
                )
        super().__init__(context, state_dir=state_dir, **unknown)
        self.train_ratings = train
        self.test_ratings = test
        self.rank_at = rank_at
        self.relevant = relevant
        self.mean = mean
        self.std = std

    def train_size(self) -> int:
        """Return the number of training ratings."""
        return len(self.train_ratings)

    def ranking_metrics(self, scores: Callable[[], NDArray[Any]]) -> Scalars:
        """Return the sums of `rank`, of which the strategy makes means over the users of all.

        Parameters
        ----------
        scores : callable
            Returns scores of all users and items, shape (m, n). It is called where there are test
            ratings to rank for, and a `rank_at`.
        """
        if self.rank_at is None or self.test_ratings is None:
            return {}
        relevant = (self.relevant - self.mean) / self.std
        train, test = self.train_ratings, self.test_ratings
        return {**rank(scores(), train, test, k=self.rank_at, relevant=relevant)}

    def seen_by(self, user: int) -> NDArray[np.int32]:
        """Return the items of a user's training ratings.

        Raises
        ------
        TypeError, ValueError
            If there is no such user.
        """
        ratings = self.train_ratings
        check_indices("user", [user], ratings.num_users)
        return np.asarray(ratings.items[ratings.users == user])


class CompletionClient(RatingsClient[Asked]):
    """Base of the clients of matrix completion: some users' ratings and factors, which stay here.

    Parameters are those of `FedMCADMMClient`.
    """

    closed_form: ClassVar = (
        "its steps go from one factor to the other, with step sizes of their own"
    )

    def __init__(
        self, context: Context, train: Ratings, regularizer: Regularizer, **of_ratings: Any
    ) -> None:
        check_regularizer("regularizer", regularizer)
        super().__init__(context, train, **of_ratings)
        self.regularizer = regularizer

    @property
    def lam(self) -> float:
        """The weight of the regulariser, which must be `SquaredL2`.

        Raises
        ------
        TypeError
            If it is another one.
        """
        return squared_l2_weight("regularizer", self.regularizer)

    # ------------------------------------------------------------------------------------------
    # What a method needs in a round
    # ------------------------------------------------------------------------------------------

    def users_at(self, factors: NDArray[Any], asked: Any, config: Scalars) -> NDArray[Any]:
        """Return U_i, (m_i, r), or U_i^0 beside items' factors of shape (r, n).

        Raises
        ------
        ValueError
            If the server knows of a U_i that is not here.
        """
        held = self.memory.require_known(config)
        return self.first_users(factors, asked) if held is None else held[USERS]

    def first_users(self, factors: NDArray[Any], asked: Any) -> NDArray[Any]:
        """Draw U_i^0 as the message says: the same whenever the client is first asked."""
        rng = np.random.default_rng(asked.factor_seed)
        size = (self.train_ratings.num_users, len(factors))
        return rng.uniform(0, asked.factor_scale, size).astype(factors.dtype)

    def checked(self, arrays: Arrays) -> NDArray[Any]:
        """Return the one array of a message, of shape (r, n)."""
        (items,) = arrays.values()
        known = self.train_ratings.num_items
        if items.ndim != 2 or items.shape[1] != known:
            raise ValueError(
                f"The server's items' factors have shape {items.shape}, but this client's ratings "
                f"are of {known} items, expected (rank, {known}). All clients and "
                "initial_item_factors must number the same items."
            )
        return items

    # ------------------------------------------------------------------------------------------
    # Evaluation
    # ------------------------------------------------------------------------------------------

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> tuple[float, int, Scalars]:
        """Evaluate U_i with the V of the message.

        Returns
        -------
        loss : float
            f_i(U_i, V) + R_i(U_i) on the training ratings: this client's term of the objective.
        num_examples : int
            Number of training ratings, so that a client without test ratings counts in the loss.
        metrics : dict
            With test ratings ``test-ratings``, their number, and ``squared-error``, the sum over
            them, in stars; not with implicit feedback, which predicts none. ``user-entries``,
            ``user-nonzeros``: those of U_i. With a `rank_at` those of `ranking_metrics`.
        """
        asked = FedMCFactors.decode(parameters, config)
        items = self.checked(asked.factors)
        kept, loss = self.evaluated(asked, items, config)
        kept[ITEMS] = items
        self.context.state[_EVALUATED] = to_array_record(kept)
        model, users, test = model_of(kept), kept[USERS], self.test_ratings
        metrics: Scalars = {
            "user-entries": users.size,
            "user-nonzeros": int(np.count_nonzero(users)),
        }
        if test is not None and asked.feedback != "implicit":
            errors = self.std * (model.of_pairs(test.users, test.items) - test.values)
            metrics |= {"test-ratings": len(test), "squared-error": 2 * half_square(errors)}
        metrics |= self.ranking_metrics(model.of_all)
        return loss + self.regularizer.value(users), self.train_size(), metrics

    def evaluated(
        self, asked: FedMCFactors, items: NDArray[Any], config: Scalars
    ) -> tuple[dict[str, NDArray[Any]], float]:
        """Return the users' factors that go with V, as `personal_arrays` does, and f_i there."""
        if asked.feedback is not None and asked.confidence is not None:
            solver = FactorSolver(self.train_ratings, asked.feedback, asked.confidence)
            users = solver.users(items.T, self.lam)
            return solver.kept(users), solver.loss(users, items.T)
        users = self.users_at(items, asked, config)
        residual = Residual(self.train_ratings, items.dtype)
        return {USERS: users}, residual.loss(users, items.T)

    # ------------------------------------------------------------------------------------------
    # Recommending, on the client
    # ------------------------------------------------------------------------------------------

    def personal_arrays(self) -> Arrays:
        """Return U_i, as "user-factors" of shape (m_i, r), and V, "item-factors" of shape (r, n).

        They are those of the client's last evaluation, as at the end of a run by default. Before
        one there is U_i alone, of the last training.

        Raises
        ------
        RuntimeError
            If the client has neither trained nor evaluated yet.
        """
        if isinstance(record := self.context.state.get(_EVALUATED), ArrayRecord):
            return from_array_record(record)
        latest = self.memory.latest()
        return {name: latest[name] for name in (USERS, MEAN) if name in latest}

    def predict(self, users: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
        """Predict ratings, in stars, by the factors of `personal_arrays`.

        Parameters
        ----------
        users, items : array of int, shape (k,)
            By the client's own numbers, and by those of all clients.

        Returns
        -------
        ndarray of shape (k,)
            Not clipped to the range of the ratings.

        Raises
        ------
        RuntimeError, TypeError, ValueError
            If the client has not evaluated yet, or has no such user, or there is no such item.
        """
        users = check_indices("users", users, self.train_ratings.num_users)
        items = check_indices("items", items, self.train_ratings.num_items)
        factors = self.personal_arrays()
        if ITEMS not in factors:
            raise RuntimeError("This client has no factors of the items: let it evaluate first.")
        return np.asarray(self.mean + self.std * model_of(factors).of_pairs(users, items))

    def recommend(self, user: int, n: int, *, exclude_seen: bool = True) -> NDArray[np.int64]:
        """Return the items with the largest predicted ratings of one user, best first.

        Parameters
        ----------
        user : int
            By the client's own numbers, 0 <= user < m_i.
        n : int
            How many; fewer come back where there are not so many.
        exclude_seen : bool (default: True)
            Leave out what the user has in the training ratings.

        Returns
        -------
        ndarray of int64
        """
        seen, every_item = self.seen_by(user), np.arange(self.train_ratings.num_items)
        scores = self.predict(np.full(len(every_item), user), every_item)
        return top_items(scores, seen if exclude_seen else [], n)


def model_of(factors: Mapping[str, NDArray[Any]]) -> FactorModel:
    """Return the predictions by `personal_arrays`."""
    mean = float(factors[MEAN][0]) if MEAN in factors else None
    return FactorModel(factors[USERS], factors[ITEMS].T, mean)
