"""The client of FedMC-ADMM; the strategy and the paper are in `fl_admm_strategies.FedMCADMM`.

Here are (14) and (15) of Algorithm 1 of arXiv:2503.12733.

Items' factors have the paper's shape (r, n) in messages and in the client's memory, and one row for
each item in the arithmetic, so that the factors of one item lie side by side. Nothing here has a
number for every user and item: a residual is as long as the list of ratings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Never

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fl_admm_strategies import FedMCADMM
from fl_admm_strategies.algorithms.fedmc_admm import FedMCFactors, FedMCInstruction
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import check_count, check_positive
from fl_admm_strategies.maths.regularizers import Regularizer, check_regularizer
from fl_admm_strategies.runtime.messages import from_array_record, to_array_record

from ..toolkit.attacks import forge_z
from ..toolkit.base import MethodClient, Scalars
from ..toolkit.ratings import Ratings

# A Lipschitz constant that is 0 (all factors are, as a strong l1 norm makes them) must not divide.
_LEAST_LIPSCHITZ = 1e-12
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

    def of_users(self, users: NDArray[Any]) -> NDArray[Any]:
        """Return the factors of each rating's user, shape (r, k), out of (m_i, r)."""
        return users.T.take(self._users, axis=1)

    def of_items(self, items: NDArray[Any]) -> NDArray[Any]:
        """Return the factors of each rating's item, shape (r, k), out of (n, r)."""
        return items.T.take(self._items, axis=1)

    def matrix(self, of_users: NDArray[Any], of_items: NDArray[Any]) -> Any:
        """Return E as a sparse matrix; it is overwritten by the next call."""
        predicted = np.einsum("rk,rk->k", of_users, of_items)
        predicted -= self._values
        self._matrix.data = predicted
        return self._matrix


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
    of_items = residual.of_items(items)
    for _ in range(steps):
        gradient = residual.matrix(residual.of_users(users), of_items) @ items  # E W^T
        users = regularizer.prox(users - gradient / lipschitz, 1 / lipschitz)  # (66), (71)
    return users


def item_steps(
    residual: Residual,
    users: NDArray[Any],
    items: NDArray[Any],
    anchor: NDArray[Any],
    weight: float,
    steps: int,
) -> tuple[NDArray[Any], float]:
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
    items : ndarray of shape (n, r)
        W_i^{k+1}, transposed.
    loss : float
        f_i(U_i^{k+1}, .) before the last step.
    """
    lipschitz = _lipschitz(users)
    of_users = residual.of_users(users)
    pull = weight * anchor
    loss = 0.0
    for step in range(steps):
        errors = residual.matrix(of_users, residual.of_items(items))
        if step == steps - 1:
            loss = _half_square(errors.data)
        items = lipschitz * items  # (67) times p, with beta V - Y in one: beta times the anchor
        items += pull
        items -= errors.T @ users  # (U^T E)^T
        items /= lipschitz + weight
    return items, loss


def _lipschitz(factors: NDArray[Any]) -> float:
    """Return |F^T F|_F, which bounds the curvature of f_i in the other block (Remark 4.1)."""
    return max(float(np.linalg.norm(factors.T @ factors)), _LEAST_LIPSCHITZ)


def _half_square(errors: NDArray[Any]) -> float:
    return 0.5 * float(np.vdot(errors, errors))


class FedMCADMMClient(MethodClient[FedMCInstruction]):
    """Client of `FedMCADMM`: the ratings of its users, and their factors, which stay here.

    Parameters
    ----------
    context : Context
        The client's context, as `client_fn(context)` receives it.
    train : Ratings
        M_i to train on; `num_items` is n, the same for all clients.
    regularizer : Regularizer
        R_i, on the users' factors: `SquaredL2(lam)`, `L1Norm(lam)`, or one of your own.
    test : Ratings, optional
        Ratings of the same users to evaluate on. A client without has no part in the RMSE.
    mean, std : float (default: 0 and 1)
        Of the stars, where `train` and `test` hold (stars - mean) / std: predictions and the RMSE
        are in stars then. The same for all clients, e.g. of all their training ratings.
    state_dir : str or path, optional
        Folder for U_i and W_i (with ``duals="client"`` Y_i as well), so that they outlive the run:
        see `Memory`. By default they are in ``context.state``.

    Examples
    --------
    >>> def client_fn(context: Context):
    ...     train, test = load_ratings(context.node_config["partition-id"])
    ...     return FedMCADMMClient(context, train, SquaredL2(1e-6), test=test).to_client()

    After the run, with the context that the client had in it:

    >>> FedMCADMMClient(context, train, SquaredL2(1e-6)).top_items(user=3, n=10)
    """

    strategy = FedMCADMM
    instruction = FedMCInstruction
    closed_form = "its steps go from one factor to the other, with step sizes of their own"

    def __init__(
        self,
        context: Context,
        train: Ratings,
        regularizer: Regularizer,
        *,
        test: Ratings | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        state_dir: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        check_regularizer("regularizer", regularizer)
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
        self.regularizer = regularizer
        self.mean = mean
        self.std = std

    # ------------------------------------------------------------------------------------------
    # Training
    # ------------------------------------------------------------------------------------------

    def train_size(self) -> int:
        """Return the number of training ratings."""
        return len(self.train_ratings)

    def answer_handshake(
        self, parameters: list[NDArray[Any]], config: Scalars
    ) -> tuple[list[NDArray[Any]], int, Scalars]:
        """Return Y_i^0 = -(1/p) grad_V f_i(U_i^0, V^0)."""
        asked = FedMCFactors.decode(parameters, config)
        factors = self._checked(asked.factors)
        users = self._first_users(factors, asked)
        return [self._first_dual(users, factors, asked)], self.train_size(), {}

    def train(self, asked: FedMCInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Run the client's part of a round: N steps on U_i, then N on W_i.

        Uploads W_i^{k+1}, of shape (r, n); with ``duals="client"`` Z_i^{k+1} - Z_i^k, where
        Z_i = W_i + Y_i/beta. Metrics: ``loss``, f_i for each training rating before the last step
        on W_i.
        """
        received = self._checked(asked.anchor)  # V^k, where the dual is here; else the anchor
        held = self.memory.recall(config)
        if held is None or asked.start is not None:
            held = self._first_variables(held, asked, config)
        anchor = received - held["Y"] / asked.beta if "Y" in held else received
        residual = Residual(self.train_ratings, anchor.dtype)
        before = np.ascontiguousarray(held["W"].T)
        users = user_steps(residual, held["U"], before, self.regularizer, asked.inner_steps)
        items, loss = item_steps(
            residual,
            users,
            before,
            np.ascontiguousarray(anchor.T),
            asked.num_clients * asked.beta,
            asked.inner_steps,
        )
        if not np.isfinite(items).all():
            raise ValueError(
                f"The steps diverged: W_i is not finite at beta={asked.beta}. Try a larger beta or "
                "a smaller init_scale."
            )
        new = {"U": users, "W": np.ascontiguousarray(items.T)}
        uploaded = new["W"]
        if "Y" in held:
            step = new["W"] - received
            new["Y"] = held["Y"] + asked.beta * step  # (13)
            uploaded = (new["W"] - held["W"]) + step  # of Z_i: the last is (Y_new - Y_old)/beta
        self.memory.keep(config, new)
        self.context.state.pop(_EVALUATED, None)
        return dict.fromkeys(asked.anchor, uploaded), {"loss": loss / self.train_size()}

    def forge(
        self, upload: Arrays, asked: FedMCInstruction, attack: Callable[[Arrays], Arrays]
    ) -> Arrays:
        """Attack Z_i = W_i + Y_i/beta, or its change, where that is sent."""
        return attack(upload) if asked.duals == "client" else forge_z(upload, asked, attack)

    def _first_variables(
        self, held: Arrays | None, asked: FedMCInstruction, config: Scalars
    ) -> Arrays:
        """Return U_i^0, unless it holds a U_i, the server's W_i and Y_i^0, to start from."""
        if asked.start is None:
            raise self.memory.lost(config)
        first = self._checked(asked.start)
        users = self._first_users(first, asked) if held is None else held["U"]
        if asked.duals == "strategy":
            return {"U": users, "W": first}
        handshake = asked.y0 == "handshake"
        dual = self._first_dual(users, first, asked) if handshake else np.zeros_like(first)
        return {"U": users, "W": first, "Y": dual}

    def _first_users(
        self, factors: NDArray[Any], asked: FedMCFactors | FedMCInstruction
    ) -> NDArray[Any]:
        """Draw U_i^0: the same whenever the client is first asked."""
        rng = np.random.default_rng(asked.factor_seed)
        size = (self.train_ratings.num_users, len(factors))
        return rng.uniform(0, asked.factor_scale, size).astype(factors.dtype)

    def _first_dual(
        self, users: NDArray[Any], first: NDArray[Any], asked: FedMCFactors | FedMCInstruction
    ) -> NDArray[Any]:
        """Return Y_i^0 = -(1/p) U_i^T P(U_i V^0 - M_i), shape (r, n)."""
        residual = Residual(self.train_ratings, first.dtype)
        errors = residual.matrix(residual.of_users(users), residual.of_items(first.T))
        dual: NDArray[Any] = -np.ascontiguousarray((errors.T @ users).T) / asked.num_clients
        return dual

    def _checked(self, arrays: Arrays) -> NDArray[Any]:
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
            ``test-ratings``, their number; ``squared-error``, the sum over them, and, where there
            are any, ``rmse``, both in stars; with a `std` also ``scaled-squared-error``, in the
            unit of the ratings.
        """
        asked = FedMCFactors.decode(parameters, config)
        items = self._checked(asked.factors)
        held = self.memory.recall(config)
        if held is None and int(config["version"]) > 0:
            raise self.memory.lost(config)
        users = self._first_users(items, asked) if held is None else held["U"]
        record = to_array_record({"user-factors": users, "item-factors": items})
        self.context.state[_EVALUATED] = record
        loss = _half_square(
            self._errors(self.train_ratings, users, items)
        ) + self.regularizer.value(users)
        squared, count = 0.0, 0
        if self.test_ratings is not None:
            squared, count = (
                2 * _half_square(self._errors(self.test_ratings, users, items)),
                len(self.test_ratings),
            )
        metrics: Scalars = {"test-ratings": count, "squared-error": squared * self.std**2}
        if count:
            metrics["rmse"] = self.std * float(np.sqrt(squared / count))
        if self.std != 1:
            metrics["scaled-squared-error"] = squared
        return loss, self.train_size(), metrics

    def _errors(self, ratings: Ratings, users: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
        """Return prediction - target of every rating, shape (k,)."""
        predicted = _products(users, items, ratings.users, ratings.items)
        errors: NDArray[Any] = predicted - ratings.values.astype(predicted.dtype)
        return errors

    # ------------------------------------------------------------------------------------------
    # Recommending, on the client
    # ------------------------------------------------------------------------------------------

    def personal_arrays(self) -> Arrays:
        """Return U_i, as "user-factors" of shape (m_i, r), and V, "item-factors" of shape (r, n).

        They are those of the client's last message: V where that was an evaluation, as it is at
        the end of a run by default, and its own copy W_i after training.

        Raises
        ------
        RuntimeError
            If the client has neither trained nor evaluated yet.
        """
        if _EVALUATED in self.context.state:
            return from_array_record(self.context.state.array_records[_EVALUATED])
        latest = self.memory.latest()
        return {"user-factors": latest["U"], "item-factors": latest["W"]}

    def predict(self, users: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
        """Predict ratings, in stars, by the factors of `personal_arrays`.

        Parameters
        ----------
        users, items : array of int, shape (k,)
            Who, by the client's own numbers, and what.

        Returns
        -------
        ndarray of shape (k,)
            Not clipped to the range of the ratings.

        Raises
        ------
        ValueError
            If the client has no such user, or there is no such item.
        """
        users, items = np.asarray(users), np.asarray(items)
        for name, indices, count in (
            ("users", users, self.train_ratings.num_users),
            ("items", items, self.train_ratings.num_items),
        ):
            wrong = indices[(indices < 0) | (indices >= count)]
            if wrong.size:
                raise ValueError(f"{name} holds {wrong[0]}, expected 0 to {count - 1}.")
        factors = self.personal_arrays()
        products = _products(factors["user-factors"], factors["item-factors"], users, items)
        predicted: NDArray[Any] = self.mean + self.std * products
        return predicted

    def top_items(self, user: int, n: int, *, exclude_rated: bool = True) -> NDArray[np.int64]:
        """Return the items with the largest predicted ratings of one user, best first.

        Parameters
        ----------
        user : int
            By the client's own numbers, 0 <= user < m_i.
        n : int
            How many; fewer come back where there are not so many.
        exclude_rated : bool (default: True)
            Leave out what the user rated in the training ratings.

        Returns
        -------
        ndarray of int64
        """
        check_count("n", n, least=1)
        everything = np.arange(self.train_ratings.num_items)
        predicted = self.predict(np.full(len(everything), user), everything)
        candidates = everything
        if exclude_rated:
            candidates = np.delete(
                everything, self.train_ratings.items[self.train_ratings.users == user]
            )
        best = np.argsort(-predicted[candidates], kind="stable")[:n]
        return candidates[best]


def _products(
    users: NDArray[Any], items: NDArray[Any], of_users: NDArray[Any], of_items: NDArray[Any]
) -> NDArray[Any]:
    """Return (U V)_{tj} for pairs (t, j), shape (k,), out of U (m_i, r) and V (r, n)."""
    products: NDArray[Any] = np.einsum("rk,rk->k", users.T[:, of_users], items[:, of_items])
    return products
