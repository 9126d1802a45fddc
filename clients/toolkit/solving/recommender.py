"""Recommending without a federation: a finished model as a file, for a few ratings of any user.

A user's factors are the minimiser for their own ratings, so they follow from the items' factors
alone. A client can compute them for a new user, and so can an app on a phone. Nothing travels.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_admm_strategies.maths.checks import check_choice, check_count, check_positive
from fl_admm_strategies.runtime.saving.files import read_arrays, write_arrays

from ..data.ranking import top_items
from ..data.ratings import Ratings
from .factors import FactorModel, FactorSolver


class Recommender(ABC):
    """A finished model of the items: `FactorRecommender` or `ItemRecommender`.

    Attributes
    ----------
    num_items : int
        n.
    """

    num_items: int
    array: ClassVar[str]
    """The name of its array in a file."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Its settings, which go with it."""

    @abstractmethod
    def scores(self, items: ArrayLike, values: ArrayLike | None = None) -> NDArray[Any]:
        """Return a user's scores of all items, shape (n,), by what they have.

        Parameters
        ----------
        items : array of int
            What the user rated, or has.
        values : array, optional
            How; 1 each by default. `ItemRecommender` does without.
        """

    @abstractmethod
    def directions(self) -> NDArray[Any]:
        """Return a vector for every item, (n, d): similar items have vectors of one direction."""

    @abstractmethod
    def _saved(self) -> NDArray[Any]: ...

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
        """Return the n items most like one, by the cosine of their vectors, most alike first."""
        if not 0 <= item < self.num_items:
            raise ValueError(f"item is {item}, expected 0 to {self.num_items - 1}.")
        vectors = self.directions()
        lengths = np.linalg.norm(vectors, axis=1)
        cosines = vectors @ vectors[item] / np.maximum(lengths * lengths[item], 1e-12)
        return top_items(cosines, [item], n)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file of safetensors, which `load` reads."""
        settings = {name: getattr(self, name) for name in self.kept}
        metadata = {type(self).__name__: json.dumps(settings)}
        write_arrays(Path(path), {self.array: self._saved()}, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recommender:
        """Read a model that was saved.

        Raises
        ------
        ValueError
            If the file is of something else.
        """
        arrays, metadata = read_arrays(Path(path))
        for kind in (FactorRecommender, ItemRecommender):
            if kind.__name__ in metadata:
                return kind(arrays[kind.array], **json.loads(metadata[kind.__name__]))
        raise ValueError(f"{path} holds no recommender, expected a file that save() has written.")


class FactorRecommender(Recommender):
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

    array = "item-factors"
    kept = ("lam", "feedback", "confidence", "mean")

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
        self.lam, self.feedback, self.confidence, self.mean = lam, feedback, confidence, mean
        self.num_items = len(self._items)

    def scores(self, items: ArrayLike, values: ArrayLike | None = None) -> NDArray[Any]:
        """Return predicted ratings, in the ratings' unit, or with implicit feedback scores.

        Without a rating they are `mean` and the items' biases, or with implicit feedback 0.
        """
        items = np.asarray(items, dtype=np.int64)
        mean = self.mean if self.feedback == "explicit" else None
        users = np.zeros((1, self._items.shape[1]))
        if len(items):
            given = np.ones(len(items)) if values is None else np.asarray(values, dtype=np.float64)
            ratings = Ratings(np.zeros_like(items), items, given, 1, self.num_items)
            solver = FactorSolver(ratings, self.feedback, self.confidence, mean=mean)
            users = solver.users(self._items, self.lam)
        return np.asarray(FactorModel(users, self._items, mean).of_all()[0])

    def directions(self) -> NDArray[Any]:
        """Return the items' factors, without their biases."""
        return self._items[:, :-1] if self.feedback == "explicit" else self._items

    def _saved(self) -> NDArray[Any]:
        return np.ascontiguousarray(self._items.T)


class ItemRecommender(Recommender):
    """Items' weights of `FedEASE`.

    Parameters
    ----------
    item_weights : array of shape (n, n)
        B, ``strategy.global_arrays["item-weights"].numpy()``.
    """

    array = "item-weights"

    def __init__(self, item_weights: ArrayLike) -> None:
        self._weights = np.asarray(item_weights)
        shape = self._weights.shape
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"item_weights has shape {shape}, expected (items, items).")
        self.num_items = len(self._weights)
        check_count("the number of items", self.num_items, least=1)

    def scores(self, items: ArrayLike, values: ArrayLike | None = None) -> NDArray[Any]:
        """Return the sum of the weights of what the user has, whatever the values."""
        return np.asarray(self._weights[np.asarray(items, dtype=np.int64)].sum(axis=0))

    def directions(self) -> NDArray[Any]:
        """Return what each item says of all others."""
        return self._weights

    def _saved(self) -> NDArray[Any]:
        return self._weights
