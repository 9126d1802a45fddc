"""FLAME: a personal model for every client and a global one, by ADMM on Moreau envelopes.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w_i||^2)   subject to   w_i = w

A client trains its personal model theta_i near its local copy w_i of the global model w; w_i, its
dual variable pi_i and w then move in closed form. By default theta_i and w_i are minimised over
jointly, in FedDyn's form (Acar et al., ICLR 2021); ``published=True`` is the paper's iteration.

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

from ..maths.blocks import Arrays, Block, pieces, prefixed, under, weighted_average
from ..maths.checks import Count, Fraction, Positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, Consensus
from ..maths.moreau import change_of, moved, slope
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import Reply, room_for
from ..runtime.messages.schema import Instruction
from .shared.base import ConsensusInstruction, ConsensusStrategy, OwnBuffers
from .shared.models import on_client
from .shared.moreau import MoreauStrategy

THETA, LOCAL_W = "theta/", "w_i/"  # prefixes of theta_i and w_i in what a client keeps


@dataclass
class FLAMEState:
    """The server's variables.

    Attributes
    ----------
    consensus : Consensus
        w and the sum of the messages: pi_i/rho, or u_i = w_i + pi_i/rho where w is the mean of
        these over all clients.
    averaged_arrays : Arrays
    clients : ClientTable
        Rows ``alpha``, ``tolerance`` (epsilon_i) and, with the duals in the strategy, ``theta``
        (theta_i) and ``local_w`` (w_i), shape (d,). pi_i = lambda alpha_i (theta_i - w_i).
    """

    consensus: Consensus
    averaged_arrays: Arrays
    clients: ClientTable


@dataclass(frozen=True)
class FLAMEInstruction(ConsensusInstruction):
    """What a client gets; u_i is theta_i here.

    `anchor` is w, or w_i where theta_i is pulled to that and the client does not keep it. With the
    duals on the clients what is held of their uploads is theta_i and w_i, as the client keeps them.
    """

    lam: float
    rho: float
    alpha: float
    anchor_on: str
    theta_step: str
    lr: float
    local_epochs: int
    tolerance: float
    max_steps: int

    def model_of(self, upload: Arrays, metrics: Mapping[str, Any], held: Arrays) -> Arrays:
        """Return theta_i, of which w_i and the message follow."""
        sent = {name: upload[name] for name in self.optimised}
        if self.duals == "strategy":
            return sent
        nothing = {name: np.zeros_like(array) for name, array in sent.items()}
        fixed = self._change(nothing, held)
        return {name: (array - fixed[name]) / self.slope for name, array in sent.items()}

    def upload_of(
        self, model: Arrays, upload: Arrays, metrics: Mapping[str, Any], held: Arrays
    ) -> Arrays:
        """Return theta_i, or the change of its message."""
        if self.duals == "client":
            model = self._change(model, held)
        return upload | model

    def first_held(self) -> Arrays | None:
        """Return theta_i and w_i, which begin with pi_i = 0."""
        if self.duals == "strategy":
            return {}
        first = {name: (self.start or self.anchor)[name] for name in self.optimised}
        return prefixed(THETA, first) | prefixed(LOCAL_W, first) if self.begins else None

    def next_held(self, model: Arrays, held: Arrays) -> Arrays:
        """Return theta_i and w_i."""
        local_w = self.moved(model, self._held(held)[0])
        return prefixed(THETA, model) | prefixed(LOCAL_W, local_w)

    def _held(self, held: Arrays) -> tuple[Arrays, Arrays]:
        theta, local_w = under(THETA, held), under(LOCAL_W, held)
        return self.dual_of(theta, local_w), local_w

    @property
    def slope(self) -> float:
        """Of the change of the message in theta_i."""
        over = self.averaging == "participants"
        return slope(a=self.lam * self.alpha, rho=self.rho, of_participants=over)

    def dual_of(self, theta: Arrays, local_w: Arrays) -> Arrays:
        """Return pi_i = a_i (theta_i - w_i)."""
        found, a = Arrays(), self.lam * self.alpha
        for name, array in local_w.items():
            found[name] = np.subtract(theta[name], array, out=np.empty_like(array))
            found[name] *= a
        return found

    def moved(self, theta: Arrays, dual: Arrays) -> Arrays:
        """Return w_i for a new theta_i, (12); it is `packed`."""
        found, a = Arrays(), self.lam * self.alpha
        for name, array in theta.items():
            room, written = room_for(array.shape, array.dtype)
            moved(array, dual[name], self.anchor[name], room, a=a, rho=self.rho)
            found[name] = written()
        return found

    def change_of(self, theta: Arrays, new: Arrays, dual: Arrays, local_w: Arrays) -> Arrays:
        """Return the change of the message for a new theta_i and w_i, (13)."""
        a, rho, over = self.lam * self.alpha, self.rho, self.averaging == "participants"
        return {
            n: change_of(
                t, new[n], dual[n], local_w[n], self.anchor[n], a=a, rho=rho, of_participants=over
            )
            for n, t in theta.items()
        }

    def _change(self, theta: Arrays, held: Arrays) -> Arrays:
        dual, local_w = self._held(held)
        return self.change_of(theta, self.moved(theta, dual), dual, local_w)


@dataclass(frozen=True)
class FLAMEEvaluation(Instruction):
    """The models to evaluate; `personal` is theta_i, which a client that keeps it has itself."""

    personal: Arrays | None
    global_: Arrays
    start: Arrays | None
    optimised: list[str]


class FLAME(MoreauStrategy, ConsensusStrategy):
    """Federated learning by ADMM with Moreau envelopes (FLAME).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a personal model is held near the global one.
    rho : float, optional
        rho, the ADMM penalty parameter. Beside it stands a_i = lambda alpha_i: at rho = a_i, where
        all of the paper's experiments are, a client's message is theta_i itself
        (docs/methods/flame-notes.md, P1). By default lambda/(10 m), with ``published=True``
        lambda/m. The paper's Lagrangian is sure to decrease for convex f_i and exact steps from
        rho = 2.5616 a_i on (P2).
    lr : float or callable (default: 0.1)
        eta, the step size of the theta-step, for the plain loss: alpha_i does not scale it. With
        ``theta_step="accuracy"`` 1/(L + lambda) is safe.
    local_epochs : int (default: 3)
        H, passes over the data in a round; unused unless ``theta_step="fixed"``.
    anchor_on : {"joint", "w_i", "w"}, optional
        What the theta-step is pulled to: w^t - pi_i/rho, with weight lambda rho/(a_i + rho), which
        minimises over theta_i and w_i jointly ("joint", the default, P18); the local copy w_i^t
        (the paper, the default with ``published=True``); or the global w^t (the authors' released
        code). Three algorithms with the same fixed points (P3). With "w_i" clients start at their
        own theta_i, so it needs ``start_at="own"``.
    theta_step : {"fixed", "accuracy", "exact"} (default: "fixed")
        H epochs; full-gradient steps until the squared norm of alpha_i times the gradient is at
        most epsilon_i (17); or the minimiser, by the client's own ``FLAMEClient(prox=...)``.
    tolerance : float (default: 1.0)
        epsilon_i^0 of "accuracy". The paper gives no value.
    tolerance_decay : float (default: 0.9)
        upsilon_i: epsilon_i <- upsilon_i epsilon_i in every round of client i, the first included
        (18). The paper gives no value.
    max_steps : int (default: 1000)
        Steps after which "accuracy" gives up; the clients' metric ``residual`` tells.
    **base
        The parameters of `ConsensusStrategy`; u_i is theta_i where clients start, and w_i in the
        mean that makes w. What lives where is theta_i, w_i and pi_i.

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
    symbols: ClassVar = ("theta_i", "w_i", "w", "pi_i/rho")
    uploaded: ClassVar = "theta"
    told: ClassVar = FLAMEInstruction
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
    anchor_on: Literal["joint", "w_i", "w"] | None = None
    theta_step: Literal["fixed", "accuracy", "exact"] = "fixed"
    tolerance: Positive = 1.0
    tolerance_decay: Fraction = 0.9
    max_steps: Count = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_on == "joint" and self.published:
            raise ValueError(
                "anchor_on is 'joint', expected 'w_i' (the paper) or 'w' (its authors' code) with "
                "published=True. Leave out one of the two."
            )
        if self.anchor_on == "w_i" and self.start_at == "global":
            raise ValueError(
                "anchor_on is 'w_i', expected 'joint' or 'w' where clients start at the global w. "
                "Give start_at='own', or published=True."
            )
        self.anchor_on = self.anchor_on or ("w_i" if self.published else "joint")

    @property
    def is_published(self) -> bool:
        """Whether the paper's iteration runs, however it was asked for."""
        return super().is_published and self.anchor_on == "w_i"

    @property
    def _more(self) -> str:
        to = {"joint": "w - pi_i/rho (theta_i and w_i jointly)"}
        return f", pulled to {to.get(str(self.anchor_on), self.anchor_on)}"

    @property
    def penalty(self) -> float:
        """rho, as it was given or by the number of clients at the start."""
        if self.rho is not None:
            return self.rho
        # With lambda = 1 the joint step's pull is that of FedADMM's default rho = 0.1.
        return (1 if self.published else 0.1) * self.lam / self.membership.num_initial

    @property
    def _of_participants(self) -> bool:
        return self.averaging == "participants"

    def init_state(self, arrays: Arrays) -> FLAMEState:
        """Start with theta_i^0 = w_i^0 = w^0, the initial model, so pi_i^0 = 0 as (33) wants."""
        self._block = Block.optimised(arrays, self.trained, self._averaged)
        first = self._block.vector(arrays)
        self._buffers = OwnBuffers(arrays, self.trained)
        columns = {"theta": first, "local_w": first} if self.duals == "strategy" else {}
        columns |= self._buffers.column(arrays) if self.duals == "strategy" else {}
        consensus = Consensus.start(first, of_participants=self._of_participants)
        consensus.join(self.membership.num_initial)
        return FLAMEState(
            consensus=consensus,
            averaged_arrays=self._block.rest(arrays),
            clients=ClientTable(alpha=0.0, tolerance=float(self.tolerance), **columns),
        )

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with theta_i = w_i = w and pi_i = 0, which leaves w as it is."""
        w = self.state.consensus.w
        buffers = self._buffers.column(self.state.averaged_arrays)
        start = {"theta": w, "local_w": w, **buffers} if self.duals == "strategy" else {}
        return {"alpha": self.alpha_of(reply), **start}

    def given(self, server_round: int) -> dict[str, Any]:
        """Return rho, as it was given or by the number of clients."""
        return {"rho": self.penalty, "optimised": self._block.names}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return what theta_i is pulled to, or w where clients keep their own variables."""
        row, w = self.state.clients[client_id], self.state.consensus.w
        local = self.duals == "strategy" and self.anchor_on == "w_i"
        return {
            "anchor": self._own(row.local_w if local else w, client_id, copy=False),
            "alpha": row.alpha,
            "tolerance": row.tolerance * float(self.tolerance_decay),  # (18)
            **self.variables(*self._variables_for(client_id)),
        }

    def _variables_for(self, client: int) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return theta_i and pi_i where the client needs them and may not hold them."""
        members, joint = self.membership, self.anchor_on == "joint"
        from_w = self.start_at == "global"
        if self.duals == "client":
            consensus: Consensus = self.state.consensus
            return consensus.beginning(members.last_accepted.get(client), from_w=from_w)
        # In half precision the client's pi_i and the strategy's would drift apart.
        if members.has_current_state(client) and not (joint and self.wire_dtype):
            return None, None
        row = self.state.clients[client]
        dual = self.lam * float(row.alpha) * (row.theta - row.local_w) if joint else None
        return None if from_w and joint else row.theta, dual

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in theta_i, or the change of a message, of the participants; set w."""
        consensus, clients = self.state.consensus, self.state.clients
        move = np.zeros(consensus.w.shape) if self._of_participants else None
        rows = [clients[client] for client in replies]
        uploads = [self._block.joined(reply.arrays) for reply in replies.values()]
        for part in pieces(self._block.size):  # of all clients, so that the sums stay in the cache
            for row, uploaded in zip(rows, uploads, strict=True):
                change = uploaded[part]
                if self.duals == "strategy":
                    change = self._advance(row, change, part)  # (12), (13)
                consensus.total[part] += change
                if move is not None:
                    move[part] += change / len(replies)
        for row, reply in zip(rows, replies.values(), strict=True):
            if self.duals == "strategy":
                self._buffers.keep(row, reply.arrays)
            row.tolerance *= self.tolerance_decay
        if server_round % REBUILD_EVERY == 0 and self.duals == "strategy":
            consensus.rebuild(self._messages(self.client_ids))
        consensus.aggregate(len(self.membership), move=move)  # (14), where w is over all
        self.state.averaged_arrays = weighted_average(self.state.averaged_arrays, replies)

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Take a message out of the sum; where nobody here knows it, everybody starts from w."""
        if self.duals == "client":
            self.state.consensus.restart(self.last_round, len(self.membership))
        else:
            super().remove_clients(client_ids, rows)

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
            return self._block.model(self.state.consensus.w, self.state.averaged_arrays)
        if kind == "personal" and self.duals == "strategy":
            return self._personal(client_id)
        if kind == "personal":
            return on_client(self)
        return OnClient("The client takes the better of its personal and the global model.")

    def _personal(self, client: int) -> Arrays:
        return self._own(self.state.clients[client].theta, client)

    def _own(self, vector: NDArray[Any], client: int, *, copy: bool = True) -> Arrays:
        """Return a model with the client's own buffers, where they are here."""
        model = self._block.model(vector, self.state.averaged_arrays, copy=copy)
        on_server = self.duals == "strategy"
        return self._buffers.into(model, self.state.clients[client]) if on_server else model
