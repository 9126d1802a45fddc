"""How much a client counts in the objective: alpha_i = 1/m, or n_i/n, which the clients tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .checks import check_choice
from .consensus import size_weights
from .strategy import StatefulStrategy
from .wire import Order, Reply


class WeightedStrategy(StatefulStrategy):
    """Base of the strategies that minimise a sum of alpha_i f_i.

    Parameters
    ----------
    weights : {"uniform", "size"}
        alpha_i: 1/m, or n_i/n, which a hand-shake asks for.
    **base
        The parameters of `StatefulStrategy`.

    Attributes
    ----------
    alpha : ndarray of shape (m,)
        alpha_i, part of the state.
    """

    def __init__(self, *, weights: Literal["uniform", "size"], **base: Any) -> None:
        super().__init__(**base)
        check_choice("weights", weights, ("uniform", "size"))
        self.weights = weights
        self.alpha: NDArray[np.float64] = np.zeros(0)

    def uniform_weights(self) -> NDArray[np.float64]:
        """Return alpha_i = 1/m, which hold until a hand-shake says otherwise."""
        num_clients = len(self.client_ids)
        return np.full(num_clients, 1 / num_clients)

    def handshake_orders(self, client_ids: Sequence[int]) -> dict[int, Order]:
        """Ask for n_i where the clients are weighted by it."""
        if self.weights == "uniform":
            return {}
        return {client: Order({"nothing": {}}) for client in client_ids}

    def handshake(self, replies: Mapping[int, Reply]) -> None:
        """Set alpha_i = n_i/n."""
        self.alpha = size_weights([reply.num_examples for reply in replies.values()])
