"""The base of the methods in which a sample of the clients trains."""

from __future__ import annotations

from ..maths.checks import Count, Fraction
from .strategy import StatefulStrategy


class SampledStrategy(StatefulStrategy):
    """Base class of the methods in which a sample of the clients trains in every round.

    Parameters
    ----------
    fraction_train : float (default: 1.0)
        Fraction of the clients that train in a round, drawn uniformly without replacement.
    min_train_nodes : int (default: 1)
        Train at least so many clients a round, whatever `fraction_train` says. Flower's `FedAvg`
        has 2.
    **base
        The parameters of `StatefulStrategy`.
    """

    fraction_train: Fraction = 1.0
    min_train_nodes: Count = 1
