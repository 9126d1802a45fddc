"""FPFC: clustered federated learning based on nonconvex pairwise fusion.

Every client has a model of its own; a penalty on the distance of every pair of models fuses those
that belong together, so that the clusters and their number come out of the optimisation.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: Algorithm 2 (appendix) with partial participation, equations (5), (6), (A.3);
its l1 branch is `penalty=L1(lam)`; see docs/methods/fpfc.md. The client is `clients.FPFCClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, compile_pattern, matching, spec_of, weighted_average
from ..maths.checks import check_count, check_positive
from ..maths.clienttable import ClientTable, Row
from ..maths.clustering import (
    NormDistribution,
    cluster_models,
    clusters,
    fusion_bound,
    norm_quantiles,
)
from ..maths.pairs import PairwiseStore
from ..maths.penalties import L1, MCP, Penalty
from ..runtime.algorithm import OnClient
from ..runtime.messages import Reply, to_array_record
from ..runtime.sampled import SampledSettings, SampledStrategy
from ..runtime.schema import Instruction
from .base import OwnBuffers

EpochSchedule = int | Callable[[int, int], int]
RateSchedule = float | Callable[[int], float]


@dataclass
class FPFCState:
    """The server's variables.

    Attributes
    ----------
    pairs : PairwiseStore
        The client models omega, shape (m, d), and theta_ij, v_ij of every pair.
    averaged_arrays : Arrays
        phi, the arrays that are averaged and not clustered, by name.
    clients : ClientTable
        Rows ``num_examples``: n_i as last reported, 0 before a client's first upload; and
        ``buffers``, where the model has some: see `OwnBuffers`.
    """

    pairs: PairwiseStore
    averaged_arrays: Arrays
    clients: ClientTable


@dataclass(frozen=True)
class FPFCInstruction(Instruction):
    """What a client gets: zeta_i and phi; omega_i where it may not hold it."""

    anchor: Arrays
    start: Arrays | None
    lr: float
    local_epochs: int
    rho: float
    clustered: list[str]


@dataclass(frozen=True)
class FPFCEvaluation(Instruction):
    """The models to evaluate; (1/m) sum_j v_ij, where the client is to report its gradients."""

    personal: Arrays
    cluster: Arrays
    global_: Arrays
    mean_dual: Arrays | None
    clustered: list[str]


@dataclass(frozen=True)
class FPFCDiagnostics:
    """What helps to judge a run and to choose lambda; see `FPFC.diagnostics`.

    Attributes
    ----------
    stationarity : float
        r1 = max_i ||grad f_i(omega_i) + (1/m) sum_j v_ij||, over the clients that reported it.
    primal_residual : float
        r2 = max_ij ||omega_i - omega_j - theta_ij||.
    labels : ndarray of shape (m,)
        Found cluster of every client, at the strategy's nu.
    gradient_norms : ndarray of shape (m,)
        ||grad f_i(alpha_l)|| of every client at its cluster's model; NaN where it did not report.
    fusion_bounds : ndarray of shape (L,)
        lambda (|G_l| - 1) / m: a cluster can be exactly fused only where no client's gradient norm
        is above it; otherwise lambda is too small for that cluster (docs/methods/fpfc.md, P4).
    theta_norms : ndarray of shape (m, m)
        ||theta_ij||.
    norm_distribution : NormDistribution or None
        Quantiles of ||theta_ij|| over the pairs: a nu in a wide gap separates the clusters. None
        where one client is alone.
    clusters_at : dict of float to int
        Number of clusters at several nu.
    """

    stationarity: float
    primal_residual: float
    labels: NDArray[np.int64]
    gradient_norms: NDArray[np.float64]
    fusion_bounds: NDArray[np.float64]
    theta_norms: NDArray[np.float64]
    norm_distribution: NormDistribution | None
    clusters_at: dict[float, int]


class FPFC(SampledStrategy):
    """Fusion-penalised federated clustering (FPFC).

    Parameters
    ----------
    penalty : Penalty
        g, with its lambda: `SmoothedSCAD(lam)` (the paper's), `L1(lam)` (FPFC-l1) or `MCP(lam)`.
    rho : float (default: 1.0)
        rho, the ADMM penalty parameter. Smoothed SCAD needs (a - 1) rho > 1.
    lr : float or callable (default: 0.1)
        alpha, the clients' step size; a callable, such as `StepDecay`, gets the round (from 1).
    local_epochs : int or callable (default: 10)
        T_i, the local epochs: full-gradient steps with GD, passes over the data with SGD. A
        callable gets (round, client id), which covers clients of unequal power (section 6.4.3,
        E.2.5) and growing workloads (section 6.4.4).
    clustered : str, optional
        Regular expression searched in the names of the arrays: the block omega_i that is clustered.
        The other arrays are shared: trained by everybody without the proximal term and averaged
        over the participants, weighted by their examples (section 6.1; the paper leaves the
        weights open). By default everything is clustered.
    nu : float (default: 0.1)
        Clients whose ||theta_ij|| is at most nu, directly or through others, form a cluster
        (Remark 2).
    report_diagnostics : bool (default: True)
        Let clients that evaluate report two gradient norms as well; see `diagnostics()`.
    **base
        The parameters of `SampledStrategy`.

    Notes
    -----
    A pair is updated if one of its clients took part, and once if both did (Algorithm 2; Algorithm
    1 prints "and": docs/methods/fpfc.md, P1). The convergence theory wants rho > 2 lambda / xi,
    which the paper's own experiments do not satisfy (P6).

    A client that connects in mid-run does as the newcomers of section 6.4.2, only that the others
    go on training: it first trains on its own, without a pull, from the global model, and from its
    first accepted upload on it has pairs with everybody, with v_ij = 0 at first (P2), and counts
    in every mean. When a client has left, its model and its pairs are dropped; m in (5) is the
    number of clients at the time.

    Examples
    --------
    >>> strategy = FPFC(SmoothedSCAD(lam=0.6), rho=1.0, lr=0.3, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=200)
    >>> strategy.clusters()
    array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    """

    method: ClassVar = "FPFC"
    kinds: ClassVar = {
        "personal": "personal model",
        "cluster": "cluster model",
        "global": "one global model",
    }

    def __init__(
        self,
        penalty: Penalty,
        *,
        rho: float = 1.0,
        lr: RateSchedule = 0.1,
        local_epochs: EpochSchedule = 10,
        clustered: str | None = None,
        nu: float = 0.1,
        report_diagnostics: bool = True,
        **base: Unpack[SampledSettings],
    ) -> None:
        super().__init__(**base)
        check_positive("rho", rho)
        check_positive("nu", nu)
        if not callable(getattr(penalty, "prox_scale", None)):
            raise TypeError(
                f"penalty is {penalty!r}, expected SmoothedSCAD(lam), L1(lam) or MCP(lam)."
            )
        penalty.check(rho)
        if not callable(lr):
            check_positive("lr", lr)
        if not callable(local_epochs):
            check_count("local_epochs", local_epochs, least=1)
        self.penalty = penalty
        self.rho = rho
        self.lr = lr
        self.local_epochs = local_epochs
        self.clustered = clustered
        self.nu = nu
        self.report_diagnostics = report_diagnostics
        self._pattern = compile_pattern("clustered", clustered)

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return {L1: "FPFC-l1", MCP: "FPFC-MCP"}.get(type(self.penalty), "FPFC")

    def init_state(self, arrays: Arrays) -> FPFCState:
        """Start with omega_i = omega^0 for every client and theta = v = 0."""
        if self._pattern is None:
            self._block = Block.optimised(arrays, self.trained)
        else:
            names = matching("clustered", self._pattern, self.trained)
            self._block = Block(spec_of({name: arrays[name] for name in names}), list(arrays))
        first, m = self._block.vector(arrays), self.membership.num_initial
        self._buffers = OwnBuffers(arrays, self.trained)
        return FPFCState(
            pairs=PairwiseStore(np.tile(first, (m, 1)), self.penalty, self.rho),
            averaged_arrays=self._block.rest(arrays),
            clients=ClientTable(num_examples=0.0, **self._buffers.column(arrays)),
        )

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with the mean of the buffers."""
        return self._buffers.column(self.state.averaged_arrays)

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FPFCInstruction]:
        """Send zeta_i (and phi); omega_i as well where the client may not hold it.

        The paper's clients keep omega_i. One that has not taken part yet has only seen omega^0 in
        the paper's initial broadcast, and one whose last reply did not become part of the state
        holds another iterate than the server, so these are sent omega_i to start from. A client
        that is joining trains the global model on its own, without a pull (section 6.4.2).
        """
        members, omega = self.membership, self.state.pairs.omega
        rows = {client: members.row(client) for client in client_ids if client in members}
        zeta = dict(zip(rows, self.state.pairs.zeta(list(rows.values())), strict=True))
        mean = omega.mean(axis=0) if len(rows) < len(client_ids) else None
        instructions = {}
        for client in client_ids:
            if client in rows:
                anchor, start, rho = zeta[client], omega[rows[client]], self.rho
            else:
                anchor, start, rho = mean, mean, 0.0
            holds_it = members.has_current_state(client)
            instructions[client] = FPFCInstruction(
                anchor=self._own(anchor, client),
                start=None if holds_it else self._block.arrays(start),
                lr=self._rate(server_round),
                local_epochs=self._epochs(server_round, client),
                rho=rho,
                clustered=self._block.names,
            )
        return instructions

    def _rate(self, server_round: int) -> float:
        lr = self.lr(server_round) if callable(self.lr) else self.lr
        check_positive(f"lr in round {server_round}", lr)
        return lr

    def _epochs(self, server_round: int, client: int) -> int:
        if not callable(self.local_epochs):
            return self.local_epochs
        epochs = self.local_epochs(server_round, client)
        check_count(f"local_epochs({server_round}, {client})", epochs, least=1)
        return epochs

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the new omega_i, then theta and v of every pair with an active client."""
        state = self.state
        active = [self.membership.row(client) for client in replies]
        omega = np.stack([self._block.vector(reply.arrays) for reply in replies.values()])
        state.pairs.update(active, omega)  # (6), (A.3)
        state.averaged_arrays = weighted_average(state.averaged_arrays, replies)
        for client, reply in replies.items():
            state.clients[client].num_examples = reply.num_examples
            self._buffers.keep(state.clients[client], reply.arrays)

    def add_clients(self, client_ids: Sequence[int], places: Sequence[int]) -> None:
        """Give new clients pairs with all others, with v_ij = 0; omega_i comes with the update."""
        mean = self.state.pairs.omega.mean(axis=0)
        self.state.pairs.add(places, np.tile(mean, (len(places), 1)))

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Drop the clients' models and their pairs."""
        self.state.pairs.remove(rows)

    # ------------------------------------------------------------------------------------------
    # Models and clusters
    # ------------------------------------------------------------------------------------------

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FPFCEvaluation]:
        """Send each client its own, its cluster's and the global model."""
        pairs, labels = self.state.pairs, self.clusters()
        rows = [self.membership.row(client) for client in client_ids]
        alpha, everybody = self._cluster_models(labels), self.global_model()
        duals = pairs.mean_dual(rows) if self.report_diagnostics else [None] * len(rows)
        return {
            client: FPFCEvaluation(
                personal=self._own(pairs.omega[row], client),
                cluster=alpha[labels[row]],
                global_=everybody,
                mean_dual=None if dual is None else self._block.arrays(dual),
                clustered=self._block.names,
            )
            for client, row, dual in zip(client_ids, rows, duals, strict=True)
        }

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return omega_i, its cluster's alpha_l, or the mean of all omega: (1) weighs all alike.

        Buffers are the client's own, the means over its cluster, or those over all participants.
        """
        omega, row = self.state.pairs.omega, self.membership.row(client_id)
        if kind == "global":
            return self._model(omega.mean(axis=0))
        if kind == "personal":
            return self._own(omega[row], client_id)
        labels = self.clusters()
        return self._cluster_models(labels)[int(labels[row])]

    def _own(self, vector: NDArray[Any], client: int) -> Arrays:
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
        return clusters(self.state.pairs.theta_norms(), self.nu if nu is None else nu)

    def cluster_arrays(self, nu: float | None = None) -> list[ArrayRecord]:
        """Return the model of every cluster: alpha_l = sum n_i omega_i / sum n_i over its clients.

        A client that has not taken part yet has no n_i and counts only where nobody has.
        """
        complete = self.run.layout.complete
        return [to_array_record(complete(m)) for m in self._cluster_models(self.clusters(nu))]

    def _cluster_models(self, labels: NDArray[np.int64]) -> list[Arrays]:
        clients = self.state.clients
        alpha = cluster_models(self.state.pairs.omega, clients.column("num_examples"), labels)
        return self._buffers.into_clusters([self._model(a) for a in alpha], clients, labels)

    def diagnostics(self, nus: Sequence[float] = (0.01, 0.1, 0.5)) -> FPFCDiagnostics:
        """Return what helps to choose lambda and nu, from the last evaluation and the state.

        Parameters
        ----------
        nus : sequence of float
            The thresholds at which to count clusters.

        Raises
        ------
        RuntimeError
            Before `start`.
        """
        self._need_state()
        norms = self.state.pairs.theta_norms()
        labels = clusters(norms, self.nu)
        latest = self.evaluate_metrics[max(self.evaluate_metrics)] if self.evaluate_metrics else {}
        stationarity = [m["stationarity"] for m in latest.values() if "stationarity" in m]
        gradient_norms = np.array(
            [latest.get(c, {}).get("cluster-gradient-norm", np.nan) for c in self.client_ids]
        )
        return FPFCDiagnostics(
            stationarity=max(stationarity, default=np.nan),
            primal_residual=self.state.pairs.primal_residual(),
            labels=labels,
            gradient_norms=gradient_norms,
            fusion_bounds=fusion_bound(labels, self.penalty.lam),
            theta_norms=norms,
            norm_distribution=norm_quantiles(norms) if len(norms) > 1 else None,
            clusters_at={nu: int(clusters(norms, nu).max()) + 1 for nu in nus},
        )
