"""FedADMM: one global model by inexact consensus ADMM, the ancestor of FedAPM and FLAME.

Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023, in the form of FedAPM's Algorithm 1
without personal parameters; see docs/methods/fedadmm.md. The client is `clients.FedADMMClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..maths.blocks import Arrays, Block, weighted_average
from ..maths.checks import Count, Positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, ConsensusADMM
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import Metrics, Reply
from .shared.base import ConsensusInstruction, ConsensusStrategy


@dataclass
class FedADMMState:
    """w with all u_i and pi_i; phi, the averaged arrays; rows ``alpha``."""

    consensus: ConsensusADMM
    averaged_arrays: Arrays
    clients: ClientTable


@dataclass(frozen=True)
class FedADMMInstruction(ConsensusInstruction):
    """What a client gets: w or w - pi_i/rho, and how to go on from there."""

    rho: float
    lr: float
    local_epochs: int
    loss_weight: float


class FedADMM(ConsensusStrategy):
    """Federated learning by inexact ADMM (FedADMM); u_i and pi_i live where `duals` says.

    Parameters
    ----------
    rho : float (default: 0.1)
        The ADMM penalty parameter beside the plain loss: m rho, where the paper has rho beside
        f_i/m (docs/methods/fedadmm-notes.md, P3). Take about 0.3 over the sum of the step sizes of
        a client's round, in which momentum 0.9 counts ten times: docs/settings.md.
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
        consensus = ConsensusADMM(
            first,
            self.rho,
            on_clients=on_clients,
            from_w=self.start_at == "global",
            of_participants=self.averaging == "participants",
        )
        return FedADMMState(consensus, self._block.rest(arrays), ClientTable(alpha=0.0))

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with alpha_i."""
        return {"alpha": self.alpha_of(reply)}

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedADMMInstruction]:
        """Send the anchor w - pi_i/rho, or w where clients keep pi_i or start at w."""
        return {client: self._instruction(server_round, client) for client in client_ids}

    def _instruction(self, server_round: int, client: int) -> FedADMMInstruction:
        consensus, averaged = self.state.consensus, self.state.averaged_arrays
        return FedADMMInstruction.of(
            self,
            server_round,
            anchor=self._block.model(consensus.anchor(client), averaged, copy=False),
            **self._variables_for(client),
            loss_weight=self.state.clients[client].alpha * self.membership.num_initial,
            optimised=self._block.names,
        )

    def _variables_for(self, client: int) -> dict[str, Arrays | None]:
        """Return u_i and pi_i where the client needs them and may not hold them."""
        members = self.membership
        holds_start = members.has_current_state(client)
        start, dual = self.state.consensus.beginning(
            client,
            holds_start=holds_start,
            # In half precision a client's pi_i and the strategy's would drift apart.
            holds_dual=holds_start and self.wire_dtype is None,
            last_accepted=members.last_accepted.get(client),
        )
        return self.variables(start, dual)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the participants' u_i, (12), (13); set w, (8) where it is the paper's."""
        state = self.state
        for client, reply in replies.items():
            state.consensus.update(client, self._block.vector(reply.arrays))
        state.consensus.aggregate(anew=server_round % REBUILD_EVERY == 0)
        state.averaged_arrays = weighted_average(state.averaged_arrays, replies)

    def round_metrics(self) -> Metrics:
        """Return the residuals of ADMM (Boyd et al., 2011, section 3.3).

        ``primal-residual`` is the mean ||u_i - w|| of the participants, with the w that they were
        sent; it is left out where the server does not know u_i. ``dual-residual`` is rho times how
        far w moved.
        """
        consensus = self.state.consensus
        found = {"primal-residual": consensus.primal, "dual-residual": consensus.dual}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w, with the averaged arrays."""
        return self._block.model(self.state.consensus.w, self.state.averaged_arrays)
