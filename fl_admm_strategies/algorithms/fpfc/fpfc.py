"""FPFC: clustered federated learning based on nonconvex pairwise fusion.

Every client has a model of its own; a penalty on the distance of every pair of models fuses those
that belong together, so that the clusters and their number come out of the optimisation.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: Algorithm 2 (appendix) with partial participation, equations (5), (6), (A.3);
its l1 branch is `penalty=L1(lam)`; see docs/methods/fpfc.md. The client is `clients.FPFCClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import (
    Arrays,
    Block,
    Pattern,
    Spec,
    compile_pattern,
    prefixed,
    weighted_average,
)
from ...maths.clienttable import ClientTable, Row
from ...maths.clustering import cluster_models
from ...maths.pairs import PairwiseStore
from ...maths.schedules import EpochSchedule, StepSize, epochs_in, rate_in
from ...runtime.algorithm import OnClient
from ...runtime.messages.records import ClientInstruction, Reply, to_array_record
from ..shared.base import OwnBuffers
from .diagnostics import FPFCDiagnostics, diagnose
from .given import PenaltySetting
from .newcomers import FPFCNewcomers
from .source import FPFCState, RoundStart, Task
from .types import CLUSTER_FIRST, KINDS, FPFCEvaluation, FPFCInstruction


class FPFC(PenaltySetting):
    """Fusion-penalised federated clustering (FPFC).

    Parameters
    ----------
    penalty : Penalty, LambdaPath or "auto" (default: "auto")
        g, with its lambda: `SmoothedSCAD(lam)` (the paper's), `L1(lam)` (FPFC-l1) or `MCP(lam)`.
        "auto": the paper's, and the first rounds of the run find groups of clients and from them
        lambda: `consensus_rounds` and 2 to 11 more. Then every group trains one model, and in the
        last 30 rounds pairs hold it together (docs/methods/fpfc.md, "Without a lambda").
        `LambdaPath([...])`: lambda is chosen from a grid in the run, by validation. Set
        ``strategy.penalty`` between rounds, in `on_round`, say, and the run goes on from where it
        is with another one, which is saved with it.
    rho : float (default: 1.0)
        rho, the ADMM penalty parameter. Smoothed SCAD needs (a - 1) rho > 1.
    lr : float or callable (default: 0.1)
        alpha, the clients' step size; a callable, such as `StepDecay`, gets the round (from 1).
    local_epochs : int or callable (default: 10)
        T_i, the local epochs: full-gradient steps with GD, passes over the data with SGD. A
        callable gets (round, client id): `RandomEpochs` for clients of unequal power (section
        6.4.3, E.2.5), `GrowingEpochs` for growing workloads (section 6.4.4).
    clustered : str, optional
        Regular expression searched in the names of the arrays: the block omega_i that is clustered.
        The other arrays are shared: trained by everybody without the proximal term and averaged
        over the participants, weighted by their examples (section 6.1; the paper leaves the
        weights open). By default everything is clustered.
    nu : float, optional
        Clients whose ||theta_ij|| is at most nu, directly or through others, form a cluster
        (Remark 2). By default 0.1 with a penalty of one's own; with "auto" clusters are the groups
        that were found.
    consensus_rounds : int (default: 20)
        With "auto": rounds in which all clients train one model, before they part.
    validation_share : float (default: 0.2)
        The share of its samples that a client holds out unless it has a ``validation_loader``: with
        "auto" until the groups are found, on a path of lambdas always. With "auto" it may be 0:
        then clients compare groups by their training losses, corrected by cross-validation.
    report_diagnostics : bool (default: False)
        Let clients that evaluate report two gradient norms as well, which costs each two passes
        over its training data; see `diagnostics()`.
    **base
        The parameters of `SampledStrategy`.

    Notes
    -----
    A pair is updated if one of its clients took part, and once if both did (Algorithm 2; Algorithm
    1 prints "and": docs/methods/fpfc-notes.md, P1). The convergence theory wants
    rho > 2 lambda / xi, which the paper's own experiments do not satisfy (P6).

    A client that connects in mid-run does as the newcomers of section 6.4.2, only that the others
    go on training: it first trains on its own, without a pull, from the global model, and from its
    first accepted upload on it has pairs with everybody, with v_ij = 0 at first (P2), and counts
    in every mean. With "auto" it says then which group's model suits it, and begins there. When a
    client has left, its model and its pairs are dropped; m in (5) is the number of clients at the
    time.

    Examples
    --------
    >>> strategy = FPFC(lr=0.3, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=200)
    >>> strategy.clusters()  # of each client, here of twelve
    array([0, ...])
    """

    method: ClassVar = "FPFC"
    paper: ClassVar = "Yu, Liu, Wang, Sun, arXiv:2211.04218"

    lr: StepSize = 0.1
    local_epochs: EpochSchedule = 10
    clustered: Pattern | None = None
    report_diagnostics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pattern = compile_pattern("clustered", self.clustered)

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> FPFCState:
        """Start with omega_i = omega^0 for every client and theta = v = 0."""
        self._block = Block.named("clustered", self._pattern, arrays, self.trained)
        self._buffers = OwnBuffers(arrays, self.trained)
        self._warned = False
        source = self._new_source(self._block, self._buffers, arrays)
        omega = np.tile(self._block.vector(arrays), (self.membership.num_initial, 1))
        columns = {**self._buffers.column(arrays), **source.columns}
        return FPFCState(
            source,
            PairwiseStore(omega, source.penalty, self.rho),
            self._block.rest(arrays),
            ClientTable(num_examples=0.0, **columns),
        )

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the mean of the buffers."""
        return self._buffers.column(self.state.averaged_arrays)

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, ClientInstruction]:
        """Ask what the source of the penalty must know of clients."""
        return self.state.source.handshake_instructions(client_ids)

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FPFCInstruction]:
        """Send what the source of the penalty asks: in FPFC's own rounds zeta_i, and phi.

        omega_i goes along where the client may not hold it. The paper's clients keep omega_i. One
        that has not taken part yet has only seen omega^0 in the paper's initial broadcast, and one
        whose last reply did not become part of the state holds another iterate than the server.
        """
        source, members = self.state.source, self.membership
        connected = [c for c in members.ids if members.last_seen[c] >= server_round]
        ends = np.inf if self.run.num_rounds is None else self.run.num_rounds
        left = ends - server_round + 1 if self.in_rounds else 0
        count = server_round - source.offset
        lr = rate_in(count, self.lr)
        start = RoundStart(client_ids, connected, members, self.state, lr, server_round, left)
        return {
            client: FPFCInstruction(
                anchor=self._personal(task.anchor, client),
                start=self._start(task, client),
                lr=lr,
                local_epochs=task.epochs_factor * epochs_in(count, client, self.local_epochs),
                rho=task.rho,
                clustered=self._block.names,
                **task.settings,
            )
            for client, task in source.tasks(start).items()
        }

    def _start(self, task: Task, client: int) -> Arrays | None:
        """Return where a client is to start from; None: at what it surely holds, or the anchor."""
        members = self.membership
        holds_it = members.has_current_state(client) and self.state.source.holds_omega(
            client, members.last_accepted[client]
        )
        return None if task.start is None or holds_it else self._block.arrays(task.start)

    def upload_spec(self) -> Spec:
        """Return what an upload holds: a model, unless the source asks for something else."""
        spec = self.state.source.upload_spec()
        return self.model_spec if spec is None else spec

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure omega_i from the anchor; a candidate's block from what was sent of it."""
        anchor = super().upload_reference(sent)
        return anchor | prefixed("0/", anchor) | sent.groups.get("more", {})

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the new omega_i, then theta and v of every pair with an active client."""
        state = self.state
        for client, reply in replies.items():
            state.clients[client].num_examples = reply.num_examples
        if state.source.upload_spec() is None:  # the uploads are models
            rows = [self.membership.row(client) for client in replies]
            omega = np.stack([self._block.vector(reply.arrays) for reply in replies.values()])
            state.source.take_models(state, rows, omega)
            state.averaged_arrays = weighted_average(state.averaged_arrays, replies)
            for client, reply in replies.items():
                self._buffers.keep(state.clients[client], reply.arrays)
        state.source.after_round(server_round, state, replies)

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Give new clients pairs with all others, with v_ij = 0; omega_i comes with the update."""
        mean = self.state.mean
        self.state.pairs.add(places, np.tile(mean, (len(places), 1)))

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Drop the clients' models and their pairs."""
        self.state.pairs.remove(rows)

    # ------------------------------------------------------------------------------------------
    # Models and clusters
    # ------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> Mapping[str, str]:  # type: ignore[override]
        """The kinds of models; with "auto" the clusters' are the headline (Remark 2)."""
        return CLUSTER_FIRST if self._penalty == "auto" else KINDS

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FPFCEvaluation]:
        """Send each client its own, its cluster's and the global model."""
        pairs, labels = self.state.pairs, self.state.source.labels(self.state)
        rows = [self.membership.row(client) for client in client_ids]
        alpha, everybody = self._cluster_models(labels), self.global_model()
        duals = pairs.mean_dual(rows) if self.report_diagnostics else [None] * len(rows)
        return {
            client: FPFCEvaluation(
                personal=self._personal(pairs.omega[row], client),
                cluster=alpha[labels[row]],
                global_=everybody,
                headline=next(iter(self.kinds)),
                mean_dual=None if dual is None else self._block.arrays(dual),
                clustered=None if dual is None else self._block.names,
            )
            for client, row, dual in zip(client_ids, rows, duals, strict=True)
        }

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return omega_i, its cluster's alpha_l, or the mean of all omega: (1) weighs all alike.

        Buffers are the client's own, the means over its cluster, or those over all participants.
        """
        omega, row = self.state.pairs.omega, self.membership.row(client_id)
        if kind == "global":
            return self._model(self.state.mean)
        if kind == "personal":
            return self._personal(omega[row], client_id)
        labels = self.state.source.labels(self.state)
        return self._cluster_models(labels)[int(labels[row])]

    def _personal(self, vector: NDArray[Any], client: int) -> Arrays:
        return self._buffers.into(self._model(vector), self.state.clients[client])

    def _model(self, vector: NDArray[Any]) -> Arrays:
        return self._block.model(vector, self.state.averaged_arrays)

    def clusters(self, nu: float | None = None) -> NDArray[np.int64]:
        """Return the cluster of every client, in the order of `client_ids`.

        Clusters are the connected components of ||theta_ij|| <= nu (Remark 2; the relation itself
        is not transitive, P3), numbered by their first client.

        Parameters
        ----------
        nu : float, optional
            By default the strategy's.

        Returns
        -------
        ndarray of shape (m,)
        """
        self._need_state()
        source = self.state.source
        if source.is_searching and not self._warned:
            self._warned = True
            log(WARNING, "%s", source.too_short(self.last_round))
        return source.labels(self.state, nu)

    def cluster_arrays(self, nu: float | None = None) -> list[ArrayRecord]:
        """Return the model of every cluster: alpha_l = sum n_i omega_i / sum n_i over its clients.

        A client that has not taken part yet has no n_i and counts only where nobody has.
        """
        complete = self.run.layout.complete
        return [to_array_record(complete(m)) for m in self._cluster_models(self.clusters(nu))]

    def _cluster_models(self, labels: NDArray[np.int64]) -> list[Arrays]:
        clients = self.state.clients
        examples = self.state.source.examples(clients)
        alpha = cluster_models(self.state.pairs.omega, examples, labels)
        return self._buffers.into_clusters([self._model(a) for a in alpha], clients, labels)

    def newcomers(self, **base: Any) -> FPFCNewcomers:
        """Return the strategy for new clients after this run, which change none of its models.

        ``start`` it on a grid of new clients, from `global_arrays`; one is enough, with
        ``min_available_nodes=1``. `base` has the parameters of `SampledStrategy`, and `published`.
        """
        return FPFCNewcomers(
            self.models(),
            self.penalty_in_use,
            rho=self.rho,
            lr=self.lr,
            local_epochs=self.local_epochs,
            clustered=self.clustered,
            nu=self.nu_in_use,
            **base,
        )

    def diagnostics(self) -> FPFCDiagnostics:
        """Return what helps to choose lambda and nu, from the last evaluation and the state.

        Raises
        ------
        RuntimeError
            Before `start`.
        """
        self._need_state()
        self.clusters()  # which warns where a run has ended too early
        metrics = self.evaluate_metrics
        return diagnose(self.state, metrics[max(metrics)] if metrics else {})
