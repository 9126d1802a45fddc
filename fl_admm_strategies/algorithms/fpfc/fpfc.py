"""FPFC: clustered federated learning based on nonconvex pairwise fusion.

Every client has a model of its own; a penalty on the distance of every pair of models fuses those
that belong together, so that the clusters and their number come out of the optimisation.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: Algorithm 2 (appendix) with partial participation, equations (5), (6), (A.3);
its l1 branch is `penalty=L1(lam)`; see docs/methods/fpfc.md. The client is `clients.FPFCClient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from logging import INFO, WARNING
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import (
    Arrays,
    Block,
    Spec,
    compile_pattern,
    prefixed,
    weighted_average,
)
from ...maths.clienttable import ClientTable, Row
from ...maths.clustering import cluster_models
from ...maths.pairs import PairwiseStore
from ...maths.penalties import L1, MCP, Penalty
from ...runtime.algorithm import MembersChange, OnClient
from ...runtime.messages.records import ClientInstruction, Reply, to_array_record
from ...runtime.messages.schema import Instructions
from ...runtime.trust.limit import UploadLimit
from ..shared.base import OwnBuffers
from ..shared.stepsum import COLUMN, FIXED_PULL, noted_step_sum, pull_by
from . import finding, recheck, together  # noqa: F401 (the stages of a search)
from .diagnostics import FPFCDiagnostics, diagnose
from .messages import CLUSTER_FIRST, KINDS, MEAN_DUAL, LateInstruction
from .newcomers import FPFCNewcomers
from .path import LambdaPath, PathProgress
from .search import GroupSearch
from .source import FPFCState, FusionStrategy, Messages, PenaltySource, Round, scad

GivenPenalty = Penalty | LambdaPath | Literal["auto"]


class FPFC(FusionStrategy):
    """Fusion-penalised federated clustering (FPFC).

    Parameters
    ----------
    penalty : Penalty, LambdaPath or "auto" (default: "auto")
        g, with its lambda: `SmoothedSCAD(lam)` (the paper's), `L1(lam)` (FPFC-l1) or `MCP(lam)`.
        "auto": the paper's, and the first rounds of the run find groups of clients and from them
        lambda: `consensus_rounds` and 2 to 11 more. Then every group trains one model, and in the
        last 30 rounds pairs hold it together (docs/methods/fpfc.md, "Without a lambda").
        `LambdaPath([...])`: lambda is chosen from a grid in the run, by validation.
    rho : float, optional
        rho, the ADMM penalty parameter; the paper has 1. Smoothed SCAD needs (a - 1) rho > 1. By
        default 1 with "auto". With a penalty of yours 0.3/S, S being the sum of the step sizes of a
        client's round, and lambda is in the unit in which that rho is 1: g(sqrt(rho) t) takes the
        place of g(t) (docs/methods/fpfc.md, "rho by the local steps").
    lr : float or callable (default: 0.1)
        alpha, the clients' step size; a callable, such as `StepDecay`, gets the round (from 1).
    local_epochs : int or callable (default: 10)
        T_i, the local epochs: full-gradient steps with GD, passes over the data with SGD. A
        callable gets (round, client id): `RandomEpochs` for clients of unequal power (section
        6.4.3, E.2.5), `GrowingEpochs` for growing workloads (section 6.4.4).
    clustered : str, optional
        Regular expression searched in the names of the arrays: the block omega_i that is clustered.
        The other arrays are shared: trained by all clients without the proximal term and averaged
        over the participants, weighted by their examples (section 6.1; the paper leaves the
        weights open). By default everything is clustered.
    nu : float, optional
        Clients whose ||theta_ij|| is at most nu, directly or through others, form a cluster
        (Remark 2). By default half the distance from which on the penalty is flat, or 0.1 with a
        rho of yours or L1; with "auto" clusters are the groups that were found.
    consensus_rounds : int (default: 20)
        With "auto": rounds in which all clients train one model, before they part.
    validation_share : float (default: 0.2)
        The share of its samples, below 1, that a client holds out unless it has a
        ``validation_loader``: with "auto" until the groups are found, on a path of lambdas always.
    report_diagnostics : bool (default: False)
        Let clients that evaluate report two gradient norms as well, which costs each two passes
        over its training data; see `diagnostics()`.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    A pair is updated if one of its clients took part, and once if both did (Algorithm 2; Algorithm
    1 prints "and": docs/methods/fpfc-notes.md, P1). The convergence theory wants
    rho > 2 lambda / xi, which the paper's own experiments do not satisfy (P6).

    A client that connects in mid-run does as the newcomers of section 6.4.2, only that the others
    go on training: it first trains on its own, without a pull, from the global model, and from its
    first accepted upload on it has pairs with all others, with v_ij = 0 at first (P2), and counts
    in every mean. With "auto" it joins the group whose model has the least loss on its samples.
    When a client has left, its model and its pairs are dropped; m in (5) is the number of clients
    at the time.

    Examples
    --------
    >>> strategy = FPFC(lr=0.3, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=200)
    >>> strategy.clusters()  # of each client, here of twelve
    array([0, ...])
    """

    method: ClassVar = "FPFC"
    paper: ClassVar = "Yu, Liu, Wang, Sun, arXiv:2211.04218"

    penalty: GivenPenalty = field(default="auto", kw_only=False)
    report_diagnostics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pattern = compile_pattern("clustered", self.clustered)
        self.seeks_step_sum = self.rho is None and self.penalty != "auto"
        if self.validation_share == 1:
            raise ValueError("validation_share is 1, expected less. Nothing is left to train on.")
        if isinstance(self.penalty, LambdaPath):
            self.penalty.check(self.rho or 1.0)
        elif self.penalty == "auto" or callable(getattr(self.penalty, "prox_scale", None)):
            self._kind_of_penalty.check(self.rho or 1.0)
        else:
            raise TypeError(
                f"penalty is {self.penalty!r}, expected SmoothedSCAD(lam), L1(lam), MCP(lam) or "
                "'auto', or a LambdaPath([...])."
            )

    @property
    def _kind_of_penalty(self) -> Penalty:
        """A penalty of the kind that the run will have."""
        if isinstance(self.penalty, LambdaPath):
            return self.penalty.penalty_of(0)
        return scad(1.0) if self.penalty == "auto" else self.penalty

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return {L1: "FPFC-l1", MCP: "FPFC-MCP"}.get(type(self._kind_of_penalty), "FPFC")

    @property
    def stage(self) -> str:
        """How far the search for groups, or for lambda, has come."""
        return self.state.source.stage_text

    @property
    def penalty_in_use(self) -> Penalty:
        """The penalty of the next update; with "auto" lambda is 0 until the groups are found."""
        self._need_state()
        return self.state.source.penalty

    @property
    def nu_in_use(self) -> float:
        """The threshold of `clusters`; with "auto" 0 until the groups are found."""
        self._need_state()
        return self.state.source.nu

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> FPFCState:
        """Start with omega_i = omega^0 for every client and theta = v = 0."""
        self.block = Block.named("clustered", self._pattern, arrays, self.trained)
        self.buffers = OwnBuffers(arrays, self.trained)
        source = self._source()
        rho = self.rho or (FIXED_PULL if self.seeks_step_sum else 1.0)
        omega = np.tile(self.block.vector(arrays), (self.membership.num_initial, 1))
        sought = {COLUMN: 0.0} if self.seeks_step_sum else {}
        buffers = self.buffers.column(arrays)
        clients = ClientTable(num_examples=0.0, moved_in=0, **sought, **buffers)
        return FPFCState(
            source,
            PairwiseStore(omega, scad(0.0), rho),  # each update sets the penalty
            self.block.rest(arrays),
            clients,
        )

    def _source(self) -> PenaltySource:
        """Return where the penalty of a run comes from."""
        self.run.limit = UploadLimit(self, self.max_norm or math.inf)
        if isinstance(self.penalty, LambdaPath):
            return PathProgress(self, self.penalty)
        if self.penalty != "auto":  # a penalty holds far clients off by itself
            return PenaltySource(self, self.penalty)
        if self.max_norm is None:
            self.run.limit = UploadLimit(
                self, "auto", is_loose=self._is_settled, is_free=self._is_late
            )
        search = GroupSearch(self)
        log(
            INFO,
            "The groups of the clients are searched for in the first %s rounds or a few more",
            search.least_rounds,
        )
        return search

    def _is_settled(self) -> bool:
        return not self.state.source.waits_for_all

    def _is_late(self, sent: ClientInstruction) -> bool:
        """Return whether an upload is that of a client that trained alone, and moves no other."""
        return sent.config.get("task") == LateInstruction.__name__

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the mean of the buffers."""
        return self.buffers.column(self.state.averaged_arrays)

    def train_instructions(self, server_round: int, client_ids: Sequence[int]) -> Messages:
        """Send the messages of the penalty's source: in FPFC's own rounds zeta_i, and phi."""
        return self.state.source.messages(Round(self, server_round, client_ids))

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
        state, source = self.state, self.state.source
        are_models = source.upload_spec() is None
        for client, reply in replies.items():
            row = state.clients[client]
            row.num_examples = reply.num_examples
            if not are_models:
                row.moved_in = server_round  # the upload is not omega_i
        if self.seeks_step_sum and math.isnan(source.found.step_sum):
            source.found.step_sum = noted_step_sum(state.clients, replies)
            state.pairs.rho = pull_by(source.found.step_sum)
        if are_models:
            rows = [self.membership.row(client) for client in replies]
            omega = np.stack([self.block.vector(reply.arrays) for reply in replies.values()])
            moved = source.take_models(rows, omega)
            state.clients.column("moved_in")[moved] = server_round
            state.averaged_arrays = weighted_average(state.averaged_arrays, replies)
            for client, reply in replies.items():
                self.buffers.keep(state.clients[client], reply.arrays)
        source.after_round(server_round, replies)

    def members_changed(self, change: MembersChange) -> None:
        """Give new clients pairs with v_ij = 0 with all others, or drop those of gone clients.

        omega_i of a new client comes with the update.
        """
        if change.joined:
            self.state.pairs.add(change.rows, np.tile(self.state.mean, (len(change.rows), 1)))
        elif change.left:
            self.state.pairs.remove(change.rows)
            self.state.source.remove(change.left)

    # ------------------------------------------------------------------------------------------
    # Models and clusters
    # ------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> Mapping[str, str]:  # type: ignore[override]
        """The kinds of models; with "auto" the clusters' are the headline (Remark 2)."""
        return CLUSTER_FIRST if self.penalty == "auto" else KINDS

    def evaluate_instructions(self, server_round: int, client_ids: Sequence[int]) -> Instructions:
        """Send each client its own, its cluster's and the global model, the headline first.

        With `report_diagnostics` (1/m) sum_j v_ij as well.
        """
        pairs, labels = self.state.pairs, self.state.source.labels()
        rows = [self.membership.row(client) for client in client_ids]
        alpha, global_model = self._cluster_models(labels), self.global_model()
        duals = pairs.mean_dual(rows) if self.report_diagnostics else None
        instructions = {}
        for place, (client, row) in enumerate(zip(client_ids, rows, strict=True)):
            models = {
                "personal": self.personal(pairs.omega[row], client),
                "cluster": alpha[labels[row]],
                "global": global_model,
            }
            groups = {kind: models[kind] for kind in self.kinds}
            if duals is not None:
                groups[MEAN_DUAL] = self.block.arrays(duals[place])
            instructions[client] = ClientInstruction(groups)
        return instructions

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return omega_i, its cluster's alpha_l, or the mean of all omega: (1) weighs all alike.

        Buffers are the client's own, the means over its cluster, or those over all participants.
        """
        omega, row = self.state.pairs.omega, self.membership.row(client_id)
        if kind == "global":
            return self.whole(self.state.mean)
        if kind == "personal":
            return self.personal(omega[row], client_id)
        labels = self.state.source.labels()
        return self._cluster_models(labels)[int(labels[row])]

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
        if source.is_searching:
            log(
                WARNING,
                "After round %s lambda is still searched for, so the clusters are not final. If "
                "the run is over, give start() a larger num_rounds, or FPFC fewer "
                "consensus_rounds or a penalty of your own",
                self.last_round,
            )
        return source.labels(nu)

    def cluster_arrays(self, nu: float | None = None) -> list[ArrayRecord]:
        """Return the model of every cluster: alpha_l = sum n_i omega_i / sum n_i over its clients.

        A client that has not taken part yet has no n_i; it counts where all members have none.
        """
        complete = self.run.layout.complete
        return [to_array_record(complete(m)) for m in self._cluster_models(self.clusters(nu))]

    def _cluster_models(self, labels: NDArray[np.int64]) -> list[Arrays]:
        clients = self.state.clients
        examples = self.state.source.examples()
        alpha = cluster_models(self.state.pairs.omega, examples, labels)
        return self.buffers.into_clusters([self.whole(a) for a in alpha], clients, labels)

    def newcomers(self, **base: Any) -> FPFCNewcomers:
        """Return the strategy for new clients after this run, which change none of its models.

        ``start`` it on a grid of new clients, from `global_arrays`; one is enough, with
        ``min_available_nodes=1``. `base` has the parameters of `StatefulStrategy`, and `published`.
        """
        return FPFCNewcomers(
            self.models(),
            self.penalty_in_use,
            rho=self.state.pairs.rho,
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
