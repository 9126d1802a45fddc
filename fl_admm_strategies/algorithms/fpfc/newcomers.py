"""New clients after a run of `FPFC`: each says which group suits it, and trains from its model.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3, section 6.4.2. See docs/methods/fpfc.md, "New clients after the run".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, Pattern, Spec, compile_pattern, prefixed, spec_of
from ...maths.checks import Positive
from ...maths.clienttable import ClientRow, ClientTable, Row
from ...maths.pairs import algebra
from ...maths.penalties import Penalty
from ...maths.schedules import EpochSchedule, StepSize, epochs_in, rate_in
from ...runtime.algorithm import Handshake
from ...runtime.messages.records import Reply
from ...runtime.models import Models
from ...runtime.strategy import StatefulStrategy
from ..shared.base import OwnBuffers
from .messages import (
    CLUSTER_FIRST,
    KINDS,
    TRAINING_LOSS,
    FPFCQuestion,
    FPFCRule,
    NewcomerInstruction,
)
from .search import reported


@dataclass
class FPFCNewcomersState:
    """The server's variables.

    Attributes
    ----------
    omega : ndarray of shape (m, d)
        The models of the clients that the run had.
    clients : ClientTable
        Of every new client ``omega``, shape (d,); ``delta``, shape (m, d), and ``scale``, shape
        (m,), of its pairs with these; ``group``, the one of the least loss, or -1; ``buffers``,
        where the model has some.
    """

    omega: NDArray[Any]
    clients: ClientTable


class FPFCNewcomers(StatefulStrategy):
    """The new clients of section 6.4.2: they are the clients of this run, each independent.

    A new client measures the models of all groups on its training data. It begins at that of the
    least loss, omega_i = alpha_l, with a pair with every client that the earlier run had,
    theta_ij = omega_i - omega_j and v_ij = 0 as FPFC's own rounds begin. Then it trains: it is sent
    zeta_i, the mean over these and itself, and its pairs follow (6) and (A.3). The models of the
    earlier run stay as they are, and so do the arrays that are not clustered; new clients know
    nothing of each other. The "cluster" model of a new client is its group's, as it was; the
    "personal" one is what it made of it.

    Parameters
    ----------
    existing : Models
        What the run of `FPFC` left: ``strategy.models()``, or those of `load_models`.
    penalty : Penalty
        g, that of the run.
    rho, lr, local_epochs, clustered
        As in `FPFC`, and those of the run; rounds count from 1 again.
    nu : float (default: 0.1)
        With `published`: a new client belongs to the group of the nearest earlier client if
        ||theta_ij|| <= nu.
    published : bool (default: False)
        The paper's procedure: without a question, a new client trains first from the initial model,
        without a pull, and has its pairs from its first upload on. On images such a client goes
        further than a lambda from its group, and no pair pulls it back (docs/methods/fpfc.md).
    **base
        The parameters of `StatefulStrategy`.

    Examples
    --------
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=200)
    >>> new = strategy.newcomers(min_available_nodes=1)  # with the settings of the run
    >>> result = new.start(grid, strategy.global_arrays, num_rounds=30)  # a grid of new clients
    >>> new.groups()  # by client, as `strategy.models().clusters` has them; None: no group's
    {0: ...}
    """

    method: ClassVar = "FPFC"
    paper: ClassVar = "Yu et al. 2022, arXiv:2211.04218, section 6.4.2"

    existing: Models = field(kw_only=False)
    penalty: Penalty = field(kw_only=False)
    rho: Positive = 1.0
    lr: StepSize = 0.1
    local_epochs: EpochSchedule = 10
    clustered: Pattern | None = None
    nu: Positive = 0.1
    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.existing.personal or not self.existing.clusters:
            raise ValueError(
                f"existing is {self.existing!r}, expected the personal and the cluster models of a "
                "run of FPFC. Give strategy.models(), or what load_models reads of its folder."
            )
        self.penalty.check(self.rho)
        self._pattern = compile_pattern("clustered", self.clustered)

    @property
    def kinds(self) -> Mapping[str, str]:  # type: ignore[override]
        """The kinds of models; the groups' come first where new clients choose one."""
        return KINDS if self.published else CLUSTER_FIRST

    @property
    def form(self) -> str:
        """How new clients begin."""
        if self.published:
            return "the paper's form: new clients first train without a pull."
        return "not the paper's form (published=True is): new clients begin at a group's model."

    def init_state(self, arrays: Arrays) -> FPFCNewcomersState:
        """Start every new client at the initial model, with the shared arrays of the run."""
        before = list(self.existing.personal.values())
        if spec_of({name: before[0].get(name, np.zeros(0)) for name in arrays}) != spec_of(arrays):
            raise ValueError(
                "The new clients' model is not that of the run: its arrays have other names, "
                "shapes or dtypes. Give new clients the model of the run that they join."
            )
        self._block = Block.named("clustered", self._pattern, arrays, self.trained)
        self._buffers = OwnBuffers(arrays, self.trained)
        self._shared = {name: before[0][name] for name in self._block.rest(arrays)}
        omega = np.stack([self._block.vector(model) for model in before])
        self._travelling = list(arrays)
        columns: dict[str, Any] = {
            "omega": self._block.vector(arrays),
            "delta": np.zeros_like(omega),
            "scale": np.ones(len(omega)),
            "group": -1,
        }
        return FPFCNewcomersState(omega, ClientTable(**columns, **self._buffers.column(arrays)))

    def handshake(self, client_ids: Sequence[int]) -> Handshake[FPFCQuestion] | None:
        """Ask new clients for their loss under the model of every group."""
        if self.published:
            return None
        models: Arrays = {}
        for k, model in enumerate(self.existing.clusters.values()):
            models |= prefixed(f"{k}/", {name: model[name] for name in self._travelling})
        question = FPFCQuestion(models, len(self.existing.clusters))
        return Handshake(dict.fromkeys(client_ids, question))

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start at the model of the group of least loss, with theta_ij = omega_i - omega_j.

        A client without a finite loss begins as the paper's do.
        """
        losses = np.full(1, np.nan)
        if reply is not None:
            losses = reported(reply, TRAINING_LOSS, len(self.existing.clusters))
        if np.isnan(losses).all():
            return {}
        group, model = list(self.existing.clusters.items())[int(np.nanargmin(losses))]
        omega = self._block.vector(model)
        start = {"omega": omega, "delta": omega - self.state.omega, **self._buffers.column(model)}
        return {"group": group, **start}

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, NewcomerInstruction]:
        """Send zeta_i; with `published` at first the model to start from, without a pull."""
        instructions = {}
        for client in client_ids:
            row = self.state.clients[client]
            free = row.group < 0 and self.membership.is_new(client)
            anchor = row.omega if free else self._zeta(row)
            holds_it = self.membership.has_current_state(client)
            instructions[client] = NewcomerInstruction(
                model=self._personal(anchor, client),
                start=None if holds_it else {"omega": row.omega},
                lr=rate_in(server_round, self.lr),
                local_epochs=epochs_in(server_round, client, self.local_epochs),
                rule=FPFCRule(True, 0.0 if free else self.rho).text(),
                optimised=self._block.names,
            )
        return instructions

    def _zeta(self, row: ClientRow) -> NDArray[Any]:
        """Return (1/(m + 1)) [omega_i + sum_j (omega_j + theta_ij - v_ij/rho)], j from before."""
        weights = algebra.zeta_weight(row.scale.astype(np.float64))
        total = self.state.omega.sum(axis=0, dtype=np.float64) + weights @ row.delta + row.omega
        zeta: NDArray[Any] = (total / (len(self.state.omega) + 1)).astype(self._block.dtype)
        return zeta

    def upload_spec(self) -> Spec:
        """Return that omega_i is uploaded, and the buffers of its model."""
        return {
            name: spec
            for name, spec in self.model_spec.items()
            if name in self._block.spec or name not in self.trained
        }

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the new omega_i, then theta and v of the pairs with the clients from before."""
        for client, reply in replies.items():
            row = self.state.clients[client]
            row.omega = self._block.vector(reply.arrays)
            delta = algebra.next_delta(
                row.omega - self.state.omega,
                algebra.carried(row.scale)[:, None].astype(row.delta.dtype),
                row.delta,
            )
            norms = np.linalg.norm(delta.astype(np.float64), axis=1)
            row.scale = self.penalty.prox_scale(norms, self.rho)  # (6), (A.3)
            self._buffers.keep(row, reply.arrays)

    def groups(self) -> dict[int, int | None]:
        """Return the group of every new client, a number of ``existing.clusters``; None: its own.

        That of the least loss; with `published` that of the nearest client from before, if
        ||theta_ij|| <= nu, and no client that has not trained has one.
        """
        self._need_state()
        return {client: self._group(client) for client in self.client_ids}

    def _group(self, client: int) -> int | None:
        row = self.state.clients[client]
        if row.group >= 0:
            return int(row.group)
        if self.membership.is_new(client):
            return None
        norms = row.scale * np.linalg.norm(row.delta.astype(np.float64), axis=1)
        nearest = int(norms.argmin())
        members = list(self.existing.personal)
        return self.existing.cluster_of[members[nearest]] if norms[nearest] <= self.nu else None

    def model(self, kind: str, client_id: int) -> Arrays:
        """Return omega_i, the model of its group (its own where it has none), or the run's mean."""
        personal = self._personal(self.state.clients[client_id].omega, client_id)
        if kind == "personal":
            return personal
        group = self._group(client_id) if kind == "cluster" else None
        found = self.existing.global_ if kind == "global" else None
        if group is not None:
            found = self.existing.clusters[group]
        return personal if found is None else {name: found[name] for name in personal}

    def _personal(self, vector: NDArray[Any], client: int) -> Arrays:
        model = self._block.model(vector, self._shared)
        return self._buffers.into(model, self.state.clients[client])
