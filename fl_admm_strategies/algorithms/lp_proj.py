"""Lp-Proj-2 by ADMM: personal models that agree in a few random projections, and nowhere else.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||P theta_i - w_i||^2)   subject to   w_i = w

FLAME with P theta_i in the place of theta_i: a message has as many numbers as P has rows.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397, appendix C: Algorithm 2, equations (182) to (188), with
p = 2; see docs/methods/lp-proj-admm.md. The client is `clients.LpProjADMMClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, Pattern, Spec, compile_pattern
from ..maths.checks import Count, Positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, Consensus
from ..maths.projection import projected_block, projection
from ..maths.schedules import StepSize
from ..maths.seeds import short
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.messages.schema import Instruction
from .shared.models import OwnModelsStrategy
from .shared.moreau import MoreauStrategy

IMAGE = "P theta"
"""The name of the one array that a client uploads."""


@dataclass
class LpProjState:
    """The server's variables.

    Attributes
    ----------
    consensus : Consensus
        w and the sum of the messages u_i = w_i + pi_i/rho, shape (dimension,).
    first : ndarray of shape (dimension,)
        P theta^0.
    initial : Arrays
        The initial model, which clients start from.
    projection_seed : int
        Draws P.
    clients : ClientTable
        Rows ``alpha``, ``image`` (P theta_i) and ``local_w`` (w_i), shape (dimension,).
    """

    consensus: Consensus
    first: NDArray[Any]
    initial: Arrays
    projection_seed: int
    clients: ClientTable


@dataclass(frozen=True)
class LpProjInstruction(Instruction):
    """What a client gets: w_i, and before its first upload the initial model."""

    anchor: Arrays
    start: Arrays | None
    lam: float
    lr: float
    local_epochs: int
    projection_seed: int
    projected: list[str]


class LpProjADMM(OwnModelsStrategy, MoreauStrategy):
    """Federated learning with low-dimensional projections, by ADMM (Lp-Proj-2).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a projected personal model is held near the global variable.
    rho : float, optional
        rho, the ADMM penalty parameter; as FLAME's, lambda/m by default.
    lr : float or callable (default: 0.1)
        eta, the clients' step size.
    local_epochs : int (default: 3)
        H, passes over the data in a round.
    dimension : int (default: 10)
        d_sub, the rows of P: what travels is so many numbers, both ways, after a client's first
        round (in that, it receives the initial model).
    unprojected : str, optional
        Regular expression searched in the arrays' names: arrays that P leaves out, as it does all
        buffers. They stay with the client and are trained on its loss alone.
    **base
        The parameters of `WeightedStrategy`. P follows from `seed`, so that it never travels.

    Notes
    -----
    There are personal models only, on their clients. What is global is w, `dimension` numbers that
    are no model: ``strategy.state.consensus.w``.

    Examples
    --------
    >>> strategy = LpProjADMM(lam=1.0, lr=0.1, dimension=10)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "LpProjADMM"
    paper: ClassVar = "Zhu, Zeng, Wang, Sun, Li, Yao, Peng, arXiv:2407.16397, appendix C"
    kinds: ClassVar = {"personal": "personal model"}
    uploaded: ClassVar = "image"
    told: ClassVar = LpProjInstruction
    title = "ADMM-Lp-Proj-2"

    lam: Positive = 1.0
    rho: Positive | None = None
    lr: StepSize = 0.1
    local_epochs: Count = 3
    dimension: Count = 10
    unprojected: Pattern | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._unprojected = compile_pattern("unprojected", self.unprojected)

    @property
    def penalty(self) -> float:
        """rho, as it was given or by the number of clients at the start."""
        return self.lam / self.membership.num_initial if self.rho is None else self.rho

    def init_state(self, arrays: Arrays) -> LpProjState:
        """Start with theta_i^0 the initial model, w_i^0 = w^0 = P theta_i^0 and pi_i^0 = 0."""
        self._block = projected_block(arrays, self.trained, self._unprojected, self.dimension)
        theta = self._block.vector(arrays)
        first = projection(short(self.seed), self.dimension, theta.size, theta.dtype.name) @ theta
        return LpProjState(
            consensus=Consensus(
                first, first.astype(np.float64) * self.membership.num_initial, first
            ),
            first=first,
            initial=arrays,
            projection_seed=short(self.seed),
            clients=ClientTable(alpha=0.0, image=first, local_w=first),
        )

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the initial model and w_i = w."""
        state = self.state
        return {"alpha": self.alpha_of(reply), "image": state.first, "local_w": state.consensus.w}

    def given(self, server_round: int) -> dict[str, Any]:
        """Return P."""
        return {"projection_seed": self.state.projection_seed, "projected": self._block.names}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return w_i, and before a client's first upload the initial model."""
        start = self.state.initial if self.membership.is_new(client_id) else None
        return {"anchor": {"w_i": self.state.clients[client_id].local_w}, "start": start}

    def upload_spec(self) -> Spec:
        """Return the shape of P theta_i."""
        return {IMAGE: ((self.dimension,), self._block.dtype)}

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure P theta_i from w_i."""
        return {IMAGE: sent.groups["anchor"]["w_i"]}

    @property
    def _summed(self) -> Block:
        return Block(self.upload_spec())

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in P theta_i of the participants; w is the mean of u_i over all clients."""
        consensus = self.state.consensus
        for client, reply in replies.items():
            row = self.state.clients[client]
            consensus.add_change(self._advance(row, reply.arrays[IMAGE]))  # (186), (187)
        if server_round % REBUILD_EVERY == 0:
            consensus.rebuild(self._messages(self.client_ids))
        consensus.aggregate(len(self.membership))  # (188)

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Take new clients into the mean, with the initial model and w_i = w."""
        super().add_clients(client_ids, places)
        consensus = self.state.consensus
        for message in self._messages(client_ids):  # u_i is not w, which `join` takes it for
            consensus.add_change(message - consensus.w)
