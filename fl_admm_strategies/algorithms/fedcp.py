"""FedCP: every sample's features are divided between a global head and the client's own.

A small network, the conditional policy, says of each feature of each sample how much of it is for
the personal head; the rest goes to the global one. Features, policy and the mean of both heads are
averaged over the clients.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: Separating Feature Information for Personalized
Federated Learning via Conditional Policy", KDD 2023, arXiv:2307.01217: Algorithm 1; see
docs/methods/fedcp.md. The client is `clients.FedCPClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..maths.checks import NotNegative
from .shared.split import PERSONAL_HEAD, SplitInstruction, SplitStrategy


@dataclass(frozen=True)
class FedCPInstruction(SplitInstruction):
    """What a client gets: the arrays of features, policy and global head."""

    lam: float
    gumbel: bool


class FedCP(SplitStrategy):
    """Federated learning by separating feature information (FedCP).

    Parameters
    ----------
    lam : float (default: 5.0)
        lambda, how strongly a client's features are held near those that it received: the weight of
        their maximum mean discrepancy.
    gumbel : bool (default: True)
        Whether the policy's division is random in training, by Gumbel noise.
    **base
        The parameters of `SplitStrategy`.

    Notes
    -----
    The clients' model is a `clients.RoutedHeads`, and so are the initial arrays. Its personal head
    is what the client's model holds when it is built, a copy of the other. The global model has the
    arrays that are shared.

    Examples
    --------
    >>> strategy = FedCP(lam=5.0, lr=0.1)
    >>> first = ArrayRecord(RoutedHeads.of(model).state_dict())
    >>> result = strategy.start(grid, first, num_rounds=100)
    """

    method: ClassVar = "FedCP"
    paper: ClassVar = "Zhang, Hua, Wang, Song, Xue, Ma, Guan, KDD 2023, arXiv:2307.01217"
    message_type: ClassVar = FedCPInstruction

    personal = PERSONAL_HEAD
    two_headed: ClassVar = "RoutedHeads"
    lam: NotNegative = 5.0
    gumbel: bool = True
