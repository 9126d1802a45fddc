"""FLAME: a personal model for every client and a global one, by ADMM on Moreau envelopes.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w_i||^2)   subject to   w_i = w

A client trains its personal model theta_i near its local copy w_i of the global model w; w_i, its
dual variable pi_i and w then move in closed form.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397: Algorithm 1, equations (11) to (14), (17), (18); see
docs/methods/flame.md. The client is `clients.FLAMEClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, weighted_average
from ..maths.checks import Count, Fraction, Positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, Consensus
from ..maths.moreau import advance, messages
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from .shared.base import ConsensusStrategy, OwnBuffers


@dataclass
class FLAMEState:
    """The server's variables.

    Attributes
    ----------
    consensus : Consensus
        w and the sum of the messages u_i = w_i + pi_i/rho.
    averaged_arrays : Arrays
    clients : ClientTable
        Rows ``alpha``, ``tolerance`` (epsilon_i) and, with the duals in the strategy, ``theta``
        (theta_i) and ``local_w`` (w_i), shape (d,). pi_i = lambda alpha_i (theta_i - w_i).
    """

    consensus: Consensus
    averaged_arrays: Arrays
    clients: ClientTable


@dataclass(frozen=True)
class FLAMEInstruction(Instruction):
    """What a client gets; `start` is theta_i, sent where the client may not hold it."""

    anchor: Arrays
    start: Arrays | None
    lam: float
    rho: float
    alpha: float
    anchor_on: str
    theta_step: str
    lr: float
    local_epochs: int
    tolerance: float
    max_steps: int
    duals: str
    optimised: list[str]

    def model_of(self, upload: Arrays, metrics: Mapping[str, Any]) -> Arrays:
        """Return theta_i, which is u_i at rho = a_i; or the change of u_i where that is sent."""
        return {name: upload[name] for name in self.optimised}


@dataclass(frozen=True)
class FLAMEEvaluation(Instruction):
    """The models to evaluate; `personal` is theta_i, which a client that keeps it has itself."""

    personal: Arrays | None
    global_: Arrays
    start: Arrays | None
    optimised: list[str]


class FLAME(ConsensusStrategy):
    """Federated learning by ADMM with Moreau envelopes (FLAME).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a personal model is held near the global one.
    rho : float, optional
        rho, the ADMM penalty parameter. Beside it stands a_i = lambda alpha_i: at rho = a_i, where
        all of the paper's experiments are, a client's message is theta_i itself
        (docs/methods/flame.md, P1). By default lambda/m. The Lagrangian is sure to
        decrease for convex f_i and exact steps from rho = 2.5616 a_i on (P2).
    lr : float or callable (default: 0.1)
        eta, the step size of the theta-step, for the plain loss: alpha_i does not scale it. With
        ``theta_step="accuracy"`` 1/(L + lambda) is safe.
    local_epochs : int (default: 3)
        H, passes over the data in a round; unused unless ``theta_step="fixed"``.
    anchor_on : {"w_i", "w"} (default: "w_i")
        What the theta-step is pulled to: the local copy w_i^t (the paper), or the global w^t (the
        authors' released code). Another algorithm with the same fixed points (P3).
    theta_step : {"fixed", "accuracy", "exact"} (default: "fixed")
        H epochs; full-gradient steps until ||alpha_i (grad f_i + lambda (theta_i - w_i))||^2 <=
        epsilon_i (17); or the minimiser, by the client's own ``FLAMEClient(prox=...)``.
    tolerance : float (default: 1.0)
        epsilon_i^0 of "accuracy". The paper gives no value.
    tolerance_decay : float (default: 0.9)
        upsilon_i: epsilon_i <- upsilon_i epsilon_i in every round of client i, the first included
        (18). The paper gives no value.
    max_steps : int (default: 1000)
        Steps after which "accuracy" gives up; the clients' metric ``residual`` tells.
    **base
        The parameters of `ConsensusStrategy`. What lives where is theta_i, w_i and pi_i.

    Notes
    -----
    The clients report three kinds of models (section VI-A): ``personal``, ``global``, and the
    hybrid, where every client takes the better of the two for itself: ``hm-val``, chosen on
    validation data of its own, and ``hm-oracle``, chosen on the test data as the paper's tables
    are, which is too good to be true; see `clients.FLAMEClient`.

    Examples
    --------
    >>> strategy = FLAME(lam=1.0, lr=0.1)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    >>> personal = strategy.personal_arrays(client_id=3)
    """

    method: ClassVar = "FLAME"
    paper: ClassVar = "Zhu, Zeng, Wang, Sun, Li, Yao, Peng, arXiv:2407.16397"
    kinds: ClassVar = {
        "personal": "personal model",
        "global": "one global model",
        "hm-val": "hybrid, chosen on validation data",
        "hm-oracle": "hybrid, chosen on the test data",
    }

    lam: Positive = 1.0
    rho: Positive | None = None
    lr: StepSize = 0.1
    local_epochs: Count = 3
    anchor_on: Literal["w_i", "w"] = "w_i"
    theta_step: Literal["fixed", "accuracy", "exact"] = "fixed"
    tolerance: Positive = 1.0
    tolerance_decay: Fraction = 0.9
    max_steps: Count = 1000

    @property
    def penalty(self) -> float:
        """rho, as it was given or by the number of clients at the start."""
        return self.lam / self.membership.num_initial if self.rho is None else self.rho

    def init_state(self, arrays: Arrays) -> FLAMEState:
        """Start with theta_i^0 = w_i^0 = w^0, the initial model, so pi_i^0 = 0 as (33) wants."""
        self._block = Block.optimised(arrays, self.trained, self._averaged)
        first = self._block.vector(arrays)
        self._buffers = OwnBuffers(arrays, self.trained)
        columns = {"theta": first, "local_w": first} if self.duals == "strategy" else {}
        columns |= self._buffers.column(arrays) if self.duals == "strategy" else {}
        return FLAMEState(
            consensus=Consensus(
                first, first.astype(np.float64) * self.membership.num_initial, first
            ),
            averaged_arrays=self._block.rest(arrays),
            clients=ClientTable(alpha=0.0, tolerance=float(self.tolerance), **columns),
        )

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with theta_i = w_i = w: the message u_i = w leaves the mean as it is."""
        w = self.state.consensus.w
        buffers = self._buffers.column(self.state.averaged_arrays)
        start = {"theta": w, "local_w": w, **buffers} if self.duals == "strategy" else {}
        return {"alpha": self.alpha_of(reply), **start}

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FLAMEInstruction]:
        """Send what theta_i is pulled to, or w where clients keep their own variables."""
        return {client: self._instruction(server_round, client) for client in client_ids}

    def _instruction(self, server_round: int, client: int) -> FLAMEInstruction:
        row, w = self.state.clients[client], self.state.consensus.w
        local = self.duals == "strategy" and self.anchor_on == "w_i"
        start = self._start(client)
        return FLAMEInstruction.of(
            self,
            server_round,
            anchor=self._own(row.local_w if local else w, client),
            start=None if start is None else self._block.arrays(start),
            rho=self.penalty,
            alpha=row.alpha,
            tolerance=row.tolerance * float(self.tolerance_decay),  # (18)
            optimised=self._block.names,
        )

    def _start(self, client: int) -> NDArray[Any] | None:
        """Return theta_i where the client may not hold it."""
        members = self.membership
        consensus: Consensus = self.state.consensus
        if self.duals == "strategy":
            theta: NDArray[Any] = self.state.clients[client].theta
            return None if members.has_current_state(client) else theta
        if client in members.joining:
            return consensus.w
        return consensus.starting_point(members.last_accepted[client])

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in theta_i, or the change of u_i, of the participants; w is the mean over all."""
        consensus, clients = self.state.consensus, self.state.clients
        for client, reply in replies.items():
            change, row = self._block.vector(reply.arrays), clients[client]
            if self.duals == "strategy":
                theta, a = change, self.lam * float(row.alpha)
                row.local_w, change = advance(  # (12), (13)
                    theta, row.theta, row.local_w, consensus.w, a=a, rho=self.penalty
                )
                row.theta = theta
                self._buffers.keep(row, reply.arrays)
            consensus.add_change(change)
            row.tolerance *= self.tolerance_decay
        if server_round % REBUILD_EVERY == 0 and self.duals == "strategy":
            consensus.rebuild(self._messages(self.client_ids))
        consensus.aggregate(len(self.membership))  # (14)
        self.state.averaged_arrays = weighted_average(self.state.averaged_arrays, replies)

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Take new clients into the mean, with u_i = w."""
        self.state.consensus.join(len(client_ids))

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Take u_i out of the mean; where nobody here knows it, everybody starts from w."""
        consensus = self.state.consensus
        if self.duals == "client":
            consensus.restart(self.last_round, len(self.membership))
        else:
            consensus.rebuild(self._messages(self.client_ids))

    def _messages(self, client_ids: Sequence[int]) -> NDArray[Any]:
        """Return u_i = w_i + pi_i/rho of some clients, shape (k, d)."""
        theta, local_w, alpha = (
            self.state.clients.rows(name, client_ids) for name in ("theta", "local_w", "alpha")
        )
        return messages(theta, local_w, a=self.lam * alpha, rho=self.penalty)

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FLAMEEvaluation]:
        """Send everybody its personal model, unless it keeps that itself, and the global model."""
        model, first = self.global_model(), self._block.arrays(self.state.consensus.first)
        on_server = self.duals == "strategy"
        return {
            client: FLAMEEvaluation(
                personal=self._personal(client) if on_server else None,
                global_=model,
                start=first if not on_server and self.membership.is_new(client) else None,
                optimised=self._block.names,
            )
            for client in client_ids
        }

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w with the averaged arrays, or theta_i with them but its own buffers."""
        if kind == "global":
            return self._model(self.state.consensus.w)
        if kind == "personal" and self.duals == "strategy":
            return self._personal(client_id)
        if kind == "personal":
            return OnClient("Read FLAMEClient(...).personal_arrays() there.")
        return OnClient("The client takes the better of its personal and the global model.")

    def _personal(self, client: int) -> Arrays:
        return self._own(self.state.clients[client].theta, client)

    def _own(self, vector: NDArray[Any], client: int) -> Arrays:
        """Return a model with the client's own buffers, where they are here."""
        model = self._model(vector)
        on_server = self.duals == "strategy"
        return self._buffers.into(model, self.state.clients[client]) if on_server else model

    def _model(self, vector: NDArray[Any]) -> Arrays:
        return self._block.model(vector, self.state.averaged_arrays)
