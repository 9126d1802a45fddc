"""FedADMM: one global model by inexact consensus ADMM, the ancestor of FedAPM and FLAME.

Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023, in the form of FedAPM's Algorithm 1
without personal parameters; see docs/methods/fedadmm.md. The client is `clients.FedADMMClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from flwr.common import log

from ..maths.blocks import Arrays, Block, weighted_average
from ..maths.checks import Count, check_positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, ConsensusADMM
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import STEP_SUM, Metrics, Reply
from .shared.base import ConsensusInstruction, ConsensusStrategy

_PULL = 0.3  # rho S, docs/methods/fedadmm-notes.md, P9
FIXED_RHO = 0.1  # rho where it is not sought, or nobody knows S
_REPORTS = 3  # of a median of three one client decides nothing
_LARGEST = 1e9  # S beyond it, or below its inverse, is no sum of step sizes


def check_rho(name: str, value: object) -> None:
    """Raise ValueError or TypeError unless `value` is "auto" or a finite number above 0."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"{name} is {value!r}, expected 'auto' or a number > 0.")
    if value != "auto":
        check_positive(name, value)


Rho = Annotated[float | Literal["auto"], check_rho]


@dataclass
class FedADMMState:
    """w with all u_i and pi_i; phi, the averaged arrays; rows ``alpha``.

    Where rho is sought also rows ``step_sum``: S_i of clients that took part meanwhile, -1 where
    one did not know it, and 0 of all others.
    """

    consensus: ConsensusADMM
    averaged_arrays: Arrays
    clients: ClientTable


@dataclass(frozen=True)
class FedADMMInstruction(ConsensusInstruction):
    """What a client gets: w or w - pi_i/rho, and how to go on from there.

    With `wants_step_sum` rho is still sought: the one here is what pi_i belongs to, local steps
    take `FIXED_RHO`, and clients are to report the metric ``step-sum``.
    """

    rho: float
    lr: float
    local_epochs: int
    loss_weight: float
    wants_step_sum: bool


class FedADMM(ConsensusStrategy):
    """Federated learning by inexact ADMM (FedADMM); u_i and pi_i live where `duals` says.

    Parameters
    ----------
    rho : float or "auto", optional
        The ADMM penalty parameter beside the plain loss: m rho, where the paper has rho beside
        f_i/m (docs/methods/fedadmm-notes.md, P3). "auto", the default: 0.3 over the sum of the step
        sizes of a client's round, the median of what the first clients report (P9). Until three
        have reported, in the paper's form, and where `start_at` or `averaging` is the paper's, it
        is 0.1.
    lr : float or callable (default: 0.1)
        The clients' step size on their plain loss, as in plain training: the paper's eta over m.
    local_epochs : int (default: 3)
        E, local epochs: full-gradient steps with GD, passes over the data with SGD.
    **base
        The parameters of `ConsensusStrategy`.

    Examples
    --------
    >>> strategy = FedADMM(lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedADMM"
    paper: ClassVar = 'Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023'
    kinds: ClassVar = {"global": "one global model"}
    told: ClassVar[type[FedADMMInstruction]] = FedADMMInstruction

    rho: Rho | None = None
    lr: StepSize = 0.1
    local_epochs: Count = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        sought = (self.start_at, self.averaging) == ("global", "participants")
        if self.rho == "auto" and not sought:
            raise ValueError(
                f"rho is 'auto', expected a number with start_at={self.start_at!r} and "
                f"averaging={self.averaging!r}: the rule is for the default form. Give a number, "
                f"or leave rho out, which is {FIXED_RHO} here."
            )
        if self.rho is None:
            self.rho = "auto" if sought else FIXED_RHO

    def init_state(self, arrays: Arrays) -> FedADMMState:
        """Start with u_i^0 = w^0, the initial model, and pi_i^0 = 0."""
        self._block = Block.optimised(arrays, self.trained, self._averaged)
        first, on_clients = self._block.vector(arrays), self.duals == "client"
        consensus = ConsensusADMM(
            first,
            None if isinstance(self.rho, str) else self.rho,
            on_clients=on_clients,
            from_w=self.start_at == "global",
            of_participants=self.averaging == "participants",
        )
        sought = {"step_sum": 0.0} if consensus.seeks_rho else {}
        clients = ClientTable(alpha=0.0, **sought)
        return FedADMMState(consensus, self._block.rest(arrays), clients)

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with alpha_i."""
        return {"alpha": self.alpha_of(reply)}

    def given(self, server_round: int) -> dict[str, Any]:
        """Return rho, and whether it is sought."""
        rho, seeks = self.state.consensus.rho, self.state.consensus.seeks_rho
        return {"rho": rho, "wants_step_sum": seeks, "optimised": self._block.names}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return the anchor w - pi_i/rho, or w where clients keep pi_i or start at w."""
        anchor, averaged = self.state.consensus.anchor(client_id), self.state.averaged_arrays
        return {
            "anchor": self._block.model(anchor, averaged, copy=False),
            "loss_weight": self.state.clients[client_id].alpha * self.membership.num_initial,
            **self._variables_for(client_id),
        }

    def _variables_for(self, client: int) -> dict[str, Arrays | None]:
        """Return u_i and pi_i where the client needs them and may not hold them."""
        members = self.membership
        holds_start = members.has_current_state(client)
        start, dual = self.state.consensus.beginning(
            client,
            holds_start=holds_start,
            # In half precision a client's pi_i and the strategy's would drift apart.
            holds_dual=holds_start and self.wire_dtype is None and not self._is_of_old_rho(client),
            last_accepted=members.last_accepted.get(client),
        )
        return self.variables(start, dual)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the participants' u_i, (12), (13); set w, (8) where it is the paper's."""
        state = self.state
        uploads = {client: self._block.joined(reply.arrays) for client, reply in replies.items()}
        state.consensus.update(uploads)
        state.consensus.aggregate(anew=server_round % REBUILD_EVERY == 0)
        state.averaged_arrays = weighted_average(state.averaged_arrays, replies)
        if "step_sum" in state.clients:
            self._note_step_sums(replies)

    def _note_step_sums(self, replies: Mapping[int, Reply]) -> None:
        """Take in what clients report while rho is sought, and set it once they are enough; P9."""
        table, seeking = self.state.clients, self.state.consensus.seeks_rho
        for client, reply in replies.items():
            found = reply.metrics.get(STEP_SUM, 0.0)
            plausible = 1 / _LARGEST < found < _LARGEST
            table[client].step_sum = (found if plausible else -1.0) if seeking else 0.0
        sums = table.column("step_sum")
        known, unknown = sums[sums > 0].tolist(), int((sums < 0).sum())
        enough = min(_REPORTS, len(table))
        if seeking and len(known) >= enough:
            middle = median(known)
            self.state.consensus.set_rho(_PULL / middle)
            log(
                INFO,
                f"rho is {_PULL / middle:.3g}: {_PULL} over {middle:.3g}, the sum of the step "
                f"sizes of a client's round (median of {len(known)})",
            )
        elif seeking and unknown > min(_REPORTS - 1, len(table) - enough):
            self.state.consensus.set_rho(FIXED_RHO)
            log(
                WARNING,
                f"rho is {FIXED_RHO}: {unknown} clients did not say the sum of the step sizes of "
                "their round, from which it follows. Let them report it as the metric "
                f"{STEP_SUM!r} (docs/own-client.md), or give {self.title} a rho.",
            )

    def _is_of_old_rho(self, client: int) -> bool:
        """Return whether the pi_i that a client keeps is from when rho was sought."""
        table = self.state.clients
        found = "step_sum" in table and not self.state.consensus.seeks_rho
        return found and bool(table[client].step_sum)

    def round_metrics(self) -> Metrics:
        """Return the residuals of ADMM (Boyd et al., 2011, section 3.3).

        ``primal-residual`` is the mean ||u_i - w|| of the participants, with the w that they were
        sent; it is left out where the server does not know u_i. ``dual-residual`` is rho times how
        far w moved. With ``rho="auto"`` also ``rho``, once it is found.
        """
        consensus = self.state.consensus
        found = {"primal-residual": consensus.primal, "dual-residual": consensus.dual}
        if self.rho == "auto" and not consensus.seeks_rho:
            found["rho"] = consensus.rho
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w, with the averaged arrays."""
        return self._block.model(self.state.consensus.w, self.state.averaged_arrays)
