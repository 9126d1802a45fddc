"""FedADMM: one global model by inexact consensus ADMM, the ancestor of FedAPM and FLAME.

Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023, in the form of FedAPM's Algorithm 1
without personal parameters; see docs/methods/fedadmm.md. The client is `clients.FedADMMClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..maths.blocks import Arrays, Block, weighted_average
from ..maths.checks import Count, Positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, ConsensusADMM, iterate_of, message_of
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import Metrics, Reply
from ..runtime.messages.schema import Instruction
from .shared.base import ConsensusStrategy


@dataclass
class FedADMMState:
    """w with all u_i and pi_i; phi, the averaged arrays; rows ``alpha``.

    `gap` is the mean ||u_i - w|| over the last round's participants, NaN where u_i is not known.
    """

    consensus: ConsensusADMM
    averaged_arrays: Arrays
    clients: ClientTable
    gap: float = math.nan


@dataclass(frozen=True)
class FedADMMInstruction(Instruction):
    """What a client gets; `start` is u_i, sent where the client may not hold it."""

    anchor: Arrays
    start: Arrays | None
    rho: float
    lr: float
    local_epochs: int
    loss_weight: float
    duals: str
    optimised: list[str]

    def model_of(self, upload: Arrays, metrics: Mapping[str, Any]) -> Arrays:
        """Return z_i, or its change where that is sent."""
        u = {name: upload[name] for name in self.optimised}
        return u if self.duals == "client" else message_of(u, self.anchor)

    def upload_of(self, model: Arrays, upload: Arrays, metrics: Mapping[str, Any]) -> Arrays:
        """Return the u_i of which the server makes this z_i."""
        return upload | (model if self.duals == "client" else iterate_of(model, self.anchor))


class FedADMM(ConsensusStrategy):
    """Federated learning by inexact ADMM (FedADMM); u_i and pi_i live where `duals` says.

    Parameters
    ----------
    rho : float (default: 0.1)
        The ADMM penalty parameter beside the plain loss: m rho, where the paper has rho beside
        f_i/m (docs/methods/fedadmm.md, P3).
    lr : float or callable (default: 0.1)
        The clients' step size on their plain loss, as in plain training: the paper's eta over m.
    local_epochs : int (default: 3)
        E, local epochs: full-gradient steps with GD, passes over the data with SGD.
    **base
        The parameters of `ConsensusStrategy`.

    Examples
    --------
    >>> strategy = FedADMM(rho=0.1, lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedADMM"
    paper: ClassVar = 'Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023'
    kinds: ClassVar = {"global": "one global model"}

    rho: Positive = 0.1
    lr: StepSize = 0.1
    local_epochs: Count = 3

    def init_state(self, arrays: Arrays) -> FedADMMState:
        """Start with u_i^0 = w^0, the initial model, and pi_i^0 = 0."""
        self._block = Block.optimised(arrays, self.trained, self._averaged)
        first, on_clients = self._block.vector(arrays), self.duals == "client"
        consensus = ConsensusADMM(first, self.rho, on_clients=on_clients)
        return FedADMMState(consensus, self._block.rest(arrays), ClientTable(alpha=0.0))

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with alpha_i."""
        return {"alpha": self.alpha_of(reply)}

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedADMMInstruction]:
        """Send the anchor w - pi_i/rho, or w where clients keep their duals."""
        return {client: self._instruction(server_round, client) for client in client_ids}

    def _instruction(self, server_round: int, client: int) -> FedADMMInstruction:
        consensus, averaged = self.state.consensus, self.state.averaged_arrays
        members = self.membership
        holds_it, last = members.has_current_state(client), members.last_accepted.get(client)
        start = consensus.start(client, holds_it=holds_it, last_accepted=last)
        return FedADMMInstruction.of(
            self,
            server_round,
            anchor=self._block.model(consensus.anchor(client), averaged, copy=False),
            start=None if start is None else self._block.arrays(start),
            loss_weight=self.state.clients[client].alpha * self.membership.num_initial,
            optimised=self._block.names,
        )

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the participants' u_i, (12), (13); w is the mean of all z_i (8)."""
        state, vector = self.state, self._block.vector
        gaps = [state.consensus.update(c, vector(r.arrays)) for c, r in replies.items()]
        known = [gap for gap in gaps if gap is not None]
        state.gap = float(np.mean(known)) if known else math.nan
        state.consensus.aggregate(anew=server_round % REBUILD_EVERY == 0)
        state.averaged_arrays = weighted_average(state.averaged_arrays, replies)

    def round_metrics(self) -> Metrics:
        """Return ``gap``, the mean ||u_i - w|| of the participants, where the server knows u_i."""
        return {} if math.isnan(self.state.gap) else {"gap": self.state.gap}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w, with the averaged arrays."""
        return self._block.model(self.state.consensus.w, self.state.averaged_arrays)
