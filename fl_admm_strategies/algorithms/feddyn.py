"""FedDyn: every client's loss gets a linear and a quadratic term, so that the minimisers agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, arXiv:2111.04263: Algorithm 1; see docs/methods/feddyn.md. The client
is `clients.FedDynClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..maths.blocks import Arrays, average
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize
from ..runtime.messages.records import ClientInstruction, Reply
from .shared.base import ConsensusInstruction, SummedStrategy


@dataclass(frozen=True)
class FedDynInstruction(ConsensusInstruction):
    """What a client gets: theta, which is `anchor`; an empty `dual` where its grad_i is 0."""

    alpha: float
    lr: float
    local_epochs: int


class FedDyn(SummedStrategy):
    """Federated learning with dynamic regularization (FedDyn).

    Parameters
    ----------
    alpha : float (default: 0.1)
        alpha > 0, the weight of the quadratic term; the paper has 0.1, 0.01 and 0.001.
    lr : float or callable (default: 0.1)
        The clients' step size.
    local_epochs : int (default: 3)
        E, local epochs.
    **base
        The parameters of `SampledStrategy`.

    Notes
    -----
    All clients count alike. It is FedADMM with rho = alpha. When a client has left, or has lost its
    grad_i, these and h begin again at 0.

    Examples
    --------
    >>> strategy = FedDyn(alpha=0.1, lr=0.1, fraction_train=0.2)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedDyn"
    paper: ClassVar = (
        "Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, ICLR 2021, arXiv:2111.04263"
    )
    kinds: ClassVar = {"global": "one global model"}
    told: ClassVar = FedDynInstruction

    alpha: Positive = 0.1
    lr: StepSize = 0.1
    local_epochs: Count = 3

    # Of the state, `consensus` is that of FedADMM whose clients keep their duals: w is theta, and
    # pi_i/rho of a client is -grad_i/alpha, of which the sum is -m h/alpha.

    def given(self, server_round: int) -> dict[str, Any]:
        """Return theta, and what FedADMM's clients are told of its form."""
        form = {"duals": "client", "start_at": "global", "averaging": "participants"}
        model, names = self.global_model(), self._block.names
        return {"anchor": model, "start": None, "optimised": names, **form}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return an empty dual where a client's grad_i is 0."""
        return {"dual": {} if self.is_fresh(client_id) else None}

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure the change of theta from 0."""
        return self._block.rest(super().upload_reference(sent))

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set h to h - alpha/m times the sum of theta_i - theta, theta to mean_P theta_i - h/alpha.

        The consensus has -m h/alpha, to which the changes are added as they are.
        """
        state, moves = self.state, np.zeros(self._block.size)
        for reply in replies.values():
            moves += self._block.vector(reply.arrays)
        state.consensus.add_change(moves)
        state.consensus.aggregate(len(self.membership), move=moves / len(replies))
        state.buffers = average(state.buffers, replies, np.ones(len(replies)))
