"""FedDyn: every client's loss gets a linear and a quadratic term, so that the minimisers agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, arXiv:2111.04263: Algorithm 1; see docs/methods/feddyn.md. The client
is `clients.FedDynClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..maths.blocks import Arrays, Block, average
from ..maths.checks import Count, Positive
from ..maths.consensus import Consensus
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.sampled import SampledStrategy
from .shared.base import check_bound_of_changes


@dataclass
class FedDynState:
    """theta and h, and the mean of the buffers.

    `consensus` is that of FedADMM whose clients keep their duals: w is theta, and pi_i/rho of a
    client is -grad_i/alpha, of which the sum is -m h/alpha.
    """

    consensus: Consensus
    buffers: Arrays


@dataclass(frozen=True)
class FedDynInstruction(Instruction):
    """What a client gets: theta, which it starts from. `fresh`: its grad_i is 0."""

    model: Arrays
    alpha: float
    lr: float
    local_epochs: int
    fresh: bool
    optimised: list[str]

    def model_of(self, upload: Arrays, metrics: Mapping[str, Any]) -> Arrays:
        """Return theta_i, of which the upload is the change."""
        return {name: self.model[name] + upload[name] for name in self.optimised}

    def upload_of(self, model: Arrays, upload: Arrays, metrics: Mapping[str, Any]) -> Arrays:
        """Return the change to another theta_i."""
        return upload | {name: array - self.model[name] for name, array in model.items()}


class FedDyn(SampledStrategy):
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

    alpha: Positive = 0.1
    lr: StepSize = 0.1
    local_epochs: Count = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bound_of_changes("client", self.max_norm, self.on_excess)

    def init_state(self, arrays: Arrays) -> FedDynState:
        """Start with theta^0, the initial model, h = 0 and all grad_i = 0."""
        self._block = Block.optimised(arrays, self.trained)
        consensus = Consensus.start(self._block.vector(arrays), of_participants=True)
        return FedDynState(consensus, self._block.rest(arrays))

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedDynInstruction]:
        """Send theta to everybody."""
        model, last_accepted = self.global_model(), self.membership.last_accepted
        begins = self.state.consensus.starting_point
        return {
            client: FedDynInstruction.of(
                self,
                server_round,
                model=model,
                fresh=begins(last_accepted.get(client, 0)) is not None,
                optimised=self._block.names,
            )
            for client in client_ids
        }

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

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Begin with grad_i = 0 again: nobody here knows those of the clients that have left."""
        self.state.consensus.restart(self.last_round, len(self.membership))

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Begin with grad_i = 0 again: nobody knows those that were lost."""
        self.state.consensus.restart(server_round, len(self.membership))

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return theta."""
        return self._block.model(self.state.consensus.w, self.state.buffers)
