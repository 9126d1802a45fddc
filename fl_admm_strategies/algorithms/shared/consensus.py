"""The strategy of all methods of consensus ADMM: rows, sums, messages, joining and leaving.

What a method does to a client's variables is its `Rule`. The strategy holds the rows. Each client
holds a mirror of its own row, and both move by the same rule, so that w goes down and u_i comes up.
With ``duals="client"`` the client alone holds its row and uploads the change of its message; the
strategy has the sum of the messages.

Both sides move by what travelled: w and u_i with the roundings of the wire. So the mirror has the
bits of the row, in half precision too, and a row that is sent along changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, ClassVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, pieces, weighted_average
from ...maths.clienttable import ClientTable
from ...runtime.algorithm import Handshake, MembersChange, OnClient, Phase
from ...runtime.messages.records import ClientInstruction, Metrics, Reply
from ...runtime.messages.schema import Instruction
from ...runtime.uploads import Upload
from .base import Duals, OwnBuffers
from .models import OneMessageStrategy, on_client
from .rule import Rule
from .stepsum import COLUMN, noted_step_sum, pull_by

Vector = NDArray[Any]
BEGIN = "begin"
"""The name, in `start` of a message, of the point at which a row begins."""
REBUILD_EVERY = 256  # rounds, after which the running sum's roundings are taken out


@dataclass
class ConsensusState:
    """The server's variables.

    Attributes
    ----------
    w : ndarray of shape (d,)
        As it was sent last.
    total : ndarray of shape (d,), float64
        The sum of all clients' messages.
    averaged_arrays : Arrays
        Buffers, and arrays that are averaged and not optimised together.
    clients : ClientTable
        Rows ``alpha``, ``turns`` (how many uploads moved the client's row) and, with
        ``duals="strategy"``, the vectors of the rule.
    first : ndarray of shape (d,)
        Where clients that alone hold their rows begin, until an upload of theirs was accepted.
    began_in : int
        The round since which that is so; 0 is the start.
    step_sum : float
        S, the sum of the step sizes of a client's round; NaN until it is known.
    """

    w: Vector
    total: NDArray[np.float64]
    averaged_arrays: Arrays
    clients: ClientTable
    first: Vector
    began_in: int = 0
    step_sum: float = math.nan


@dataclass(frozen=True)
class ConsensusInstruction(Instruction):
    """What a client of any of the methods gets.

    `start` is its row where it may not hold it: no array for a client that begins at this w, the
    point alone, under `BEGIN`, for one that begins elsewhere. `rule` is the text of its rule.
    """

    model: Arrays
    start: Arrays | None
    rule: str
    duals: str
    optimised: list[str]


@dataclass(frozen=True)
class ProximalInstruction(ConsensusInstruction):
    """What a client gets that descends.

    With a `tolerance` it takes full-gradient steps until the squared norm of `loss_weight` times
    the gradient is at most that. With `wants_step_sum` it reports the metric ``step-sum``.
    """

    lr: float
    local_epochs: int
    wants_step_sum: bool
    tolerance: float | None = None
    max_steps: int | None = None
    loss_weight: float | None = None


class ConsensusMethod(OneMessageStrategy):
    """Base of the methods of consensus ADMM.

    Parameters
    ----------
    published : bool (default: False)
        The paper's form: clients start at their own copy u_i, and w is the mean of u_i + pi_i/rho
        over all clients. By default it is FedDyn's (Acar et al., ICLR 2021): w is the participants'
        mean of u_i plus the mean of all pi_i/rho.
    duals : {"strategy", "client"} (default: "strategy")
        Where the clients' variables live. "client": with the clients alone, which needs O(d) memory
        here; differential privacy and secure aggregation need it. When a client has left, or has
        lost its variables, all clients begin anew from w.
    **base
        The parameters of `StatefulStrategy`.
    """

    message_type: ClassVar[type[Instruction]] = ProximalInstruction
    rule: ClassVar[type[Rule]]
    own: ClassVar[str] = ""
    """The vector of a row that is the client's own model, where there is one."""

    weights = "uniform"
    """alpha_i: 1/m, or, where a method has it as a setting, "size", which is n_i/n."""
    _averaged: re.Pattern[str] | None = None
    """Trained arrays that are averaged, where a method has such a setting."""

    published: bool = False
    duals: Duals = "strategy"

    # What a method says beside its rule

    def rule_of(self, client_id: int) -> Rule:
        """Return a client's rule."""
        raise NotImplementedError

    @property
    def penalty(self) -> float:
        """The rho in use."""
        raise NotImplementedError

    @property
    def seeks_step_sum(self) -> bool:
        """Whether rho follows from S, which clients report in their first turns."""
        return False

    def agreed(self, arrays: Arrays) -> Arrays:
        """Return the arrays that the clients agree on, at their start: here the whole model."""
        return arrays

    def center(self, mean: NDArray[np.float64]) -> Vector:
        """Return w for the mean of the messages: a proximal step where w has a term of its own."""
        return mean

    # The same for all methods

    def __post_init__(self) -> None:
        super().__post_init__()
        self._residuals: Metrics = {}

    @property
    def _here(self) -> bool:
        """Whether the strategy holds the rows."""
        return self.duals == "strategy"

    @property
    def upload(self) -> Upload:
        """Changes of the clients' messages where the clients alone hold their rows."""
        return Upload("own copy" if self._here else "sum")

    @property
    def form(self) -> str:
        """Which form runs."""
        if self.published:
            return "the paper's form."
        return (
            "not the paper's form (published=True is): w is the participants' mean of the clients' "
            "copies plus the mean of all scaled duals."
        )

    @property
    def default_norm(self) -> float | None:
        """The paper's form takes in every upload as it is."""
        return math.inf if self.published else None

    def init_state(self, arrays: Arrays) -> ConsensusState:
        """Start all clients at the initial model, with duals of 0."""
        arrays = self.agreed(arrays)
        trained = [name for name in arrays if name in self.trained or name not in self.model_spec]
        self._block = Block.optimised(arrays, trained, self._averaged)
        self._buffers = OwnBuffers(arrays, trained if self.own and self._here else list(arrays))
        w, averaged = self._as_sent(self._block.vector(arrays)), self._block.rest(arrays)
        sought = {COLUMN: 0.0} if self.seeks_step_sum else {}
        clients = ClientTable(alpha=0.0, turns=0, **sought, **self._columns(w, averaged))
        total = self._first_messages(w, self.membership.num_initial)
        return ConsensusState(w, total, averaged, clients, w)

    def _columns(self, w: Vector, averaged: Arrays) -> dict[str, Any]:
        """Return the row of a client that begins at w, and its buffers."""
        if not self._here:
            return {}
        kept = self.rule.keeps(self.published)
        return {name: w * at_w for name, at_w in kept.items()} | self._buffers.column(averaged)

    def _first_messages(self, w: Vector, count: int) -> NDArray[np.float64]:
        """Return the sum of the messages of clients that begin at w."""
        return np.multiply(w, count if self.published else 0, dtype=np.float64)

    def _as_sent(self, w: Vector) -> Vector:
        """Return w with the roundings of its way: of the arrays' own dtypes, and of the wire."""
        arrays = self._block.arrays(w, copy=False)
        if self.wire_dtype is not None:
            arrays = {n: a.astype(self.wire_dtype).astype(a.dtype) for n, a in arrays.items()}
        return self._block.vector(arrays)

    def handshake(self, client_ids: Sequence[int]) -> Handshake[ClientInstruction] | None:
        """Ask for n_i where the clients are weighted by it."""
        if self.weights == "uniform":
            return None
        return Handshake(dict.fromkeys(client_ids, ClientInstruction({"nothing": {}})))

    def new_client(self, client_id: int, reply: Reply | None) -> dict[str, Any]:
        """Start with alpha_i, at the present w."""
        alpha = 1 / self.membership.num_initial
        if self.weights == "size" and reply is not None:
            alpha = reply.num_examples / self.membership.initial_examples
        return {"alpha": alpha, **self._columns(self.state.w, self.state.averaged_arrays)}

    def weight_of(self, client_id: int) -> float:
        """Return alpha_i."""
        return float(self.state.clients[client_id].alpha)

    # Messages

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return the global model, and whether S is asked for."""
        seeks = self.seeks_step_sum and math.isnan(self.state.step_sum)
        wanted = (
            {"wants_step_sum": seeks} if issubclass(self.message_type, ProximalInstruction) else {}
        )
        model = self._block.model(self.state.w, self.state.averaged_arrays)
        return {"model": model, "optimised": self._block.names, **wanted}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return a client's rule, and its row where it may not hold it."""
        rule, row = self.rule_of(client_id), self._row_to_send(client_id)
        start: Arrays | None = None
        if row is not None and self._here and self.state.clients[client_id].turns:
            start = {name: getattr(row, name) for name in rule.vectors}
        elif row is not None:  # all of its vectors that are not 0 are one point
            points = [getattr(row, name) for name, at_w in rule.vectors.items() if at_w]
            known = not points or np.array_equal(points[0], self.state.w)
            start = {} if known else {BEGIN: points[0]}
        return {"rule": rule.text(), "start": start}

    def _row(self, client: int) -> Any:
        """Return a client's row; in the default form it begins at the w of its first turn."""
        row = self.state.clients[client]
        begins = row.turns == 0 and not self.published
        return self.rule_of(client).begin(self.state.w) if begins else row

    def _row_to_send(self, client: int) -> Any:
        """Return a client's row where it may not hold it, else None."""
        state, members = self.state, self.membership
        if self._here:
            return None if members.has_current_state(client) else self._row(client)
        if members.last_accepted.get(client, 0) > state.began_in:
            return None
        at_first = self.published and client in members
        return self.rule_of(client).begin(state.first if at_first else state.w)

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure u_i from w, the change of a message from 0."""
        arrays = super().upload_reference(sent)
        return arrays if self._here else self._block.rest(arrays)

    # The update

    def uploaded(self, reply: Reply) -> Any:
        """Return a client's upload as one vector, to be read a part at a time."""
        return self._block.joined(reply.arrays)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Move the participants' rows, or take in the changes of their messages; set w."""
        state, before = self.state, self.state.w
        rows = [state.clients[client] for client in replies]
        mean = self._moved(replies) if self._here else self._changed(replies)
        state.w = self._as_sent(self.center(mean))
        self._residuals["dual-residual"] = self.penalty * float(np.linalg.norm(state.w - before))
        for row, reply in zip(rows, replies.values(), strict=True):
            row.turns += 1
            self._buffers.keep(row, reply.arrays)
        state.averaged_arrays = weighted_average(state.averaged_arrays, replies)
        if self._here and server_round % REBUILD_EVERY == 0:
            self._rebuild()
        if self.seeks_step_sum and math.isnan(state.step_sum):
            state.step_sum = noted_step_sum(state.clients, replies)

    def _moved(self, replies: Mapping[int, Reply]) -> NDArray[np.float64]:
        """Move the participants' rows, by the rules of their messages; return the mean for w."""
        state, mean = self.state, np.empty(self.state.w.shape)
        sent = {client: str(reply.sent.config["rule"]) for client, reply in replies.items()}
        rules = {text: self.rule.read(text) for text in {*sent.values()}}
        turns = [
            (rules[sent[client]], self._row(client), state.clients[client], self.uploaded(reply))
            for client, reply in replies.items()
        ]
        squares = [0.0] * len(turns)
        for part in pieces(len(mean)):  # of all clients, so that the sums stay in the cache
            w, total, gaps = state.w[part], state.total[part], np.zeros(len(mean[part]))
            for place, (rule, row, kept, upload) in enumerate(turns):
                old = rule.part(row, part)
                new = rule.move(old, upload[part], w)
                gap = rule.copy(new) - w
                squares[place] += float(gap @ gap)
                gaps += gap
                if self.published:
                    total += rule.message(new) - rule.message(old)
                for name in rule.vectors:
                    getattr(kept, name)[part] = getattr(new, name)
            if self.published:
                mean[part] = total / len(self.membership)
            else:  # pi_i/rho changes by the client's copy less w
                total += gaps
                mean[part] = total / len(self.membership) + w + gaps / len(turns)
        distances = [math.sqrt(square) for square in squares]
        self._residuals = {"primal-residual": sum(distances) / len(distances)}
        return mean

    def _changed(self, replies: Mapping[int, Reply]) -> NDArray[np.float64]:
        """Take in the changes of the participants' messages; return the mean for w."""
        state, changes = self.state, np.zeros(self.state.w.shape)
        for reply in replies.values():
            changes += self._block.vector(reply.arrays)
        state.total = state.total + changes
        mean: NDArray[np.float64] = state.total / len(self.membership)
        if not self.published:  # pi_i/rho changes by the client's copy less w
            mean += state.w + changes / len(replies)
        return mean

    def metrics(self, phase: Phase, clients: Mapping[int, Metrics], means: Metrics) -> Metrics:
        """Add the residuals of ADMM to those of a training (Boyd et al., 2011, section 3.3).

        ``primal-residual`` is the participants' mean distance of their copy from the w of their
        message; only with ``duals="strategy"``. ``dual-residual`` is rho times how far w moved.
        """
        found = super().metrics(phase, clients, means)
        return found | self._residuals if phase == "train" else found

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w, or a client's own model with its own buffers."""
        if kind == "global":
            return self._block.model(self.state.w, self.state.averaged_arrays)
        if not self._here:
            return on_client(self)
        own = getattr(self._row(client_id), self.own)
        model = self._block.model(own, self.state.averaged_arrays)
        return self._buffers.into(model, self.state.clients[client_id])

    # Joining and leaving

    def members_changed(self, change: MembersChange) -> None:
        """Count new clients, which begin at w, and leave out those that are gone.

        Where the clients alone know their messages, all begin anew when one has left or lost its.
        """
        if change.joined:
            self.state.total += self._first_messages(self.state.w, len(change.joined))
        elif not self._here:
            self._begin_anew(change.server_round)
        elif change.left:
            self._rebuild()

    def _rebuild(self) -> None:
        self.state.total = np.zeros(self.state.w.shape)
        for client in self.client_ids:
            self.state.total += self.rule_of(client).message(self.state.clients[client])

    def _begin_anew(self, server_round: int) -> None:
        state = self.state
        state.total = self._first_messages(state.w, len(self.membership))
        state.first, state.began_in = state.w, server_round
        log(INFO, "All clients go on from the global model with duals of 0")

    # The strength of the pull

    @property
    def pull(self) -> float:
        """The weight of the proximal term by S."""
        return pull_by(self.state.step_sum)
