"""How much a client counts in the objective: alpha_i = 1/m, or n_i/n, which the clients tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .checks import check_choice
from .strategy import StatefulStrategy
from .wire import Order, Reply


class WeightedStrategy(StatefulStrategy):
    """Base of the strategies that minimise a sum of alpha_i f_i.

    Parameters
    ----------
    weights : {"uniform", "size"}
        alpha_i: 1/m, or n_i/n, which a hand-shake asks for. m and n stay those of the start when
        clients come and go: only the ratios of the alpha_i matter to the minimiser, and nobody's
        step changes.
    **base
        The parameters of `StatefulStrategy`.

    Attributes
    ----------
    alpha : ndarray of shape (m,)
        alpha_i, part of the state.
    total_examples : float
        n at the start, part of the state; NaN with uniform weights.
    """

    def __init__(self, *, weights: Literal["uniform", "size"], **base: Any) -> None:
        super().__init__(**base)
        check_choice("weights", weights, ("uniform", "size"))
        self.weights = weights
        self.alpha: NDArray[np.float64] = np.zeros(0)
        self.total_examples = math.nan

    def start_weights(self) -> None:
        """Set alpha_i = 1/m, which hold until a hand-shake says otherwise."""
        self.alpha = np.full(self.num_founders, 1 / self.num_founders)
        self.total_examples = math.nan

    def handshake_orders(self, client_ids: Sequence[int]) -> dict[int, Order]:
        """Ask for n_i where the clients are weighted by it."""
        if self.weights == "uniform":
            return {}
        return {client: Order({"nothing": {}}) for client in client_ids}

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Set alpha_i = n_i/n."""
        sizes = np.array([reply.num_examples for reply in replies.values()])
        self.total_examples = float(sizes.sum())
        self.alpha = sizes / self.total_examples

    def weight_of(self, newcomer: Reply) -> float:
        """Return the alpha_i of a client that comes later."""
        if self.weights == "uniform":
            return 1 / self.num_founders
        return newcomer.num_examples / self.total_examples

    def add_weights(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Insert the alpha_i of new clients."""
        new = [self.weight_of(reply) for reply in newcomers.values()]
        self.alpha = np.insert(self.alpha, places, new)

    def weight_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state of the weights."""
        return {"alpha": self.alpha, "total-examples": np.array(self.total_examples)}

    def load_weight_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `weight_arrays` returned."""
        self.alpha = arrays["alpha"].astype(np.float64)
        self.total_examples = float(arrays["total-examples"])
