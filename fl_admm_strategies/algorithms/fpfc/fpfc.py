"""FPFC: clustered federated learning based on nonconvex pairwise fusion.

Every client has a model of its own; a penalty on the distance of every pair of models fuses those
that belong together, so that the clusters and their number come out of the optimisation.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: Algorithm 2 (appendix) with partial participation, equations (5), (6), (A.3);
its l1 branch is `penalty=L1(lam)`; see docs/methods/fpfc.md. The client is `clients.FPFCClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from numpy.typing import ArrayLike, NDArray

from ...maths.blocks import (
    Arrays,
    Block,
    Spec,
    compile_pattern,
    matching,
    prefixed,
    spec_of,
    weighted_average,
)
from ...maths.checks import check_count, check_fraction, check_positive
from ...maths.clienttable import ClientTable, Row
from ...maths.clustering import cluster_models, clusters, fusion_bound, norm_quantiles
from ...maths.pairs import PairwiseStore
from ...maths.penalties import L1, MCP, Penalty, SmoothedSCAD, penalty_to_text
from ...maths.schedules import (
    EpochSchedule,
    RateSchedule,
    check_epoch_schedule,
    check_rate_schedule,
    epochs_in,
    rate_in,
)
from ...runtime.algorithm import OnClient
from ...runtime.messages.records import ClientInstruction, Reply, to_array_record
from ...runtime.sampled import SampledSettings, SampledStrategy
from ..shared.base import OwnBuffers
from . import search as fpfc_search
from .newcomers import FPFCNewcomers
from .path import LambdaPath, PathProgress
from .search import CONSENSUS, FUSION, NO_FUSION, GroupSearch, scad
from .types import (
    KINDS,
    FPFCDiagnostics,
    FPFCEvaluation,
    FPFCInstruction,
    FPFCPathState,
    FPFCSearchState,
    FPFCState,
    SetPenalty,
)


class FPFC(SampledStrategy):
    """Fusion-penalised federated clustering (FPFC).

    Parameters
    ----------
    penalty : Penalty, LambdaPath or "auto" (default: "auto")
        g, with its lambda: `SmoothedSCAD(lam)` (the paper's), `L1(lam)` (FPFC-l1) or `MCP(lam)`.
        "auto": the paper's, and the first rounds of the run find groups of clients and from them
        lambda: `consensus_rounds` and 7 to 11 more (docs/methods/fpfc.md, "Without a lambda").
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
        (Remark 2). By default 0.1 with a penalty of one's own; with "auto" a lambda/2, half of what
        was between the two nearest groups.
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
    1 prints "and": docs/methods/fpfc.md, P1). The convergence theory wants rho > 2 lambda / xi,
    which the paper's own experiments do not satisfy (P6).

    A client that connects in mid-run does as the newcomers of section 6.4.2, only that the others
    go on training: it first trains on its own, without a pull, from the global model, and from its
    first accepted upload on it has pairs with everybody, with v_ij = 0 at first (P2), and counts
    in every mean. When a client has left, its model and its pairs are dropped; m in (5) is the
    number of clients at the time.

    Examples
    --------
    >>> strategy = FPFC(lr=0.3, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=200)
    >>> strategy.clusters()  # of each client, here of twelve
    array([0, ...])
    """

    method: ClassVar = "FPFC"
    paper: ClassVar = "Yu, Liu, Wang, Sun, arXiv:2211.04218"
    kinds: ClassVar = KINDS

    def __init__(
        self,
        penalty: Penalty | LambdaPath | Literal["auto"] = "auto",
        *,
        rho: float = 1.0,
        lr: RateSchedule = 0.1,
        local_epochs: EpochSchedule = 10,
        clustered: str | None = None,
        nu: float | None = None,
        consensus_rounds: int = 20,
        validation_share: float = 0.2,
        report_diagnostics: bool = False,
        **base: Unpack[SampledSettings],
    ) -> None:
        super().__init__(**base)
        check_positive("rho", rho)
        if nu is not None:
            check_positive("nu", nu)
        if (
            penalty != "auto"
            and not isinstance(penalty, LambdaPath)
            and not callable(getattr(penalty, "prox_scale", None))
        ):
            raise TypeError(
                f"penalty is {penalty!r}, expected SmoothedSCAD(lam), L1(lam), MCP(lam) or 'auto', "
                "or a LambdaPath([...])."
            )
        (SmoothedSCAD(1.0) if penalty == "auto" else penalty).check(rho)
        check_count("consensus_rounds", consensus_rounds, least=1)
        check_fraction("validation_share", validation_share, zero=True)
        if validation_share == 0 and isinstance(penalty, LambdaPath):
            raise ValueError(
                "validation_share is 0, but a LambdaPath is chosen by held-out samples. Give it a "
                "share above 0."
            )
        if validation_share == 1:
            raise ValueError("validation_share is 1, expected less. Nothing is left to train on.")
        check_rate_schedule("lr", lr)
        check_epoch_schedule("local_epochs", local_epochs)
        self._penalty = penalty
        self.rho = rho
        self.lr = lr
        self.local_epochs = local_epochs
        self.clustered = clustered
        self.nu = nu
        self.consensus_rounds = consensus_rounds
        self.validation_share = validation_share
        self.report_diagnostics = report_diagnostics
        self._pattern = compile_pattern("clustered", clustered)
        self._warned = False

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        penalty = self.penalty
        kind = type(penalty.penalty(0)) if isinstance(penalty, LambdaPath) else type(penalty)
        return {L1: "FPFC-l1", MCP: "FPFC-MCP"}.get(kind, "FPFC")

    @property
    def penalty(self) -> Penalty | LambdaPath | Literal["auto"]:
        """g, or how its lambda is found.

        Raises
        ------
        TypeError, ValueError
            Where it is set in the course of a run: if it is not one of `SmoothedSCAD`, `L1` and
            `MCP`, does not go with rho, or the run is still finding a lambda itself.
        """
        record = None if self._record is None else self._record.current
        return self._penalty if record is None else record

    @penalty.setter
    def penalty(self, penalty: Penalty) -> None:
        if self._record is not None:
            penalty_to_text(penalty)  # raises where it cannot be saved
        penalty.check(self.rho)
        search = self._search
        if self._path is not None or (search is not None and search.stage != FUSION):
            raise ValueError(
                f"penalty is set to {penalty!r}, but this run finds its lambda itself: the "
                f"constructor got {self.penalty!r}. Give it the penalty instead."
            )
        self._penalty = penalty
        if self._record is not None:
            self._record.current = penalty

    @property
    def _record(self) -> SetPenalty | None:
        return getattr(getattr(self, "state", None), "penalty", None)

    @property
    def given_settings(self) -> Mapping[str, Any]:
        """The penalty that the run was given."""
        return {} if self._record is None else {"penalty": self._record.given}

    def init_state(self, arrays: Arrays) -> FPFCState:
        """Start with omega_i = omega^0 for every client and theta = v = 0."""
        if self._pattern is None:
            self._block = Block.optimised(arrays, self.trained)
        else:
            names = matching("clustered", self._pattern, self.trained)
            self._block = Block(spec_of({name: arrays[name] for name in names}), list(arrays))
        first, m = self._block.vector(arrays), self.membership.num_initial
        self._buffers = OwnBuffers(arrays, self.trained)
        self._penalty, self._warned = self.penalty, False
        shared = self._block.rest(arrays)
        columns: dict[str, ArrayLike] = {**self._buffers.column(arrays)}
        path = None
        penalty: Penalty = NO_FUSION
        if isinstance(self._penalty, LambdaPath):
            path = PathProgress(self._penalty, first, shared, self.rho)
            penalty = path.penalty
            columns |= path.columns(self._penalty)
        elif self._penalty != "auto":
            penalty = self._penalty
        parts: dict[str, Any] = {
            "penalty": SetPenalty(self._penalty),
            "pairs": PairwiseStore(np.tile(first, (m, 1)), penalty, self.rho),
            "averaged_arrays": shared,
            "clients": ClientTable(num_examples=0.0, **columns),
        }
        if path is not None:
            return FPFCPathState(**parts, path=path)
        if self._penalty != "auto":
            return FPFCState(**parts)
        log(
            INFO,
            "The groups of the clients are searched for in the first %s rounds or a few more",
            self._search_rounds,
        )
        return FPFCSearchState(**parts, search=GroupSearch(self.consensus_rounds, self._block))

    @property
    def _search(self) -> GroupSearch | None:
        return getattr(getattr(self, "state", None), "search", None)

    @property
    def _path(self) -> PathProgress | None:
        return getattr(getattr(self, "state", None), "path", None)

    @property
    def _search_rounds(self) -> int:
        return self.consensus_rounds + fpfc_search.REFIT_ROUNDS + 4

    @property
    def penalty_in_use(self) -> Penalty:
        """The penalty of the next update; with "auto" lambda is 0 until the groups are found."""
        self._need_state()
        penalty = self.penalty
        if self._path is not None and isinstance(penalty, LambdaPath):
            return self._path.penalty
        assert not isinstance(penalty, LambdaPath)
        return scad(self.state.search.lam) if penalty == "auto" else penalty

    @property
    def nu_in_use(self) -> float:
        """The threshold of `clusters`; with "auto" 0 until the groups are found."""
        if self.nu is not None:
            return self.nu
        penalty = self.penalty_in_use
        return 0.1 if self.penalty != "auto" else penalty.lam * NO_FUSION.a / 2

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

        In the search for groups see `GroupSearch`.
        """
        members, omega = self.membership, self.state.pairs.omega
        search, path, held_out = self._search, self._path, None
        if search is not None and search.everybody:
            here = [c for c in members.ids if members.last_seen[c] >= server_round]
            search.begin_round(here, omega)
            return self._search_instructions(server_round, search, here)
        newcomers = set(client_ids).difference(members.ids)
        if search is not None:
            newcomers |= search.unplaced
        consensus = search is not None and search.stage == CONSENSUS
        held_out = self.validation_share if consensus or path is not None else None
        rows = {client: members.row(client) for client in client_ids if client not in newcomers}
        if not consensus:
            zeta = dict(zip(rows, self.state.pairs.zeta(list(rows.values())), strict=True))
        mean = omega.mean(axis=0)
        split_seeds = {} if held_out is None else self._split_seeds(client_ids)
        instructions = {}
        for client in client_ids:
            if client in rows:
                anchor = mean if consensus else zeta[client]
                start, rho = omega[rows[client]], self.rho
            else:
                anchor, start, rho = mean, mean, 0.0
            holds_it = members.has_current_state(client) and self._holds_omega(client)
            instructions[client] = FPFCInstruction(
                anchor=self._own(anchor, client),
                start=None if holds_it else self._block.arrays(start),
                lr=self._rate(server_round),
                local_epochs=self._epochs(server_round, client),
                rho=rho,
                clustered=self._block.names,
                held_out=held_out,
                held_out_seed=split_seeds.get(client),
                monitor=None if path is None else path.path.monitor,
            )
        return instructions

    def handshake_instructions(self, client_ids: Sequence[int]) -> dict[int, ClientInstruction]:
        """On a path of lambdas, see to it that clients can say which lambda suits them."""
        if (path := self._path) is None:
            return {}
        seeds = self._split_seeds(client_ids)
        share, monitor = self.validation_share, path.path.monitor
        return {
            client: ClientInstruction(
                {"nothing": {}},
                {"held-out": share, "held-out-seed": seeds[client], "monitor": monitor},
            )
            for client in client_ids
        }

    def _holds_omega(self, client: int) -> bool:
        """Return whether a client's last upload was its omega_i: since the search, if any."""
        search = self._search
        if self._path is not None:
            return self.membership.last_accepted[client] > self._path.reset_round
        return search is None or (
            self.membership.last_accepted[client] > search.last_round or search.stage == CONSENSUS
        )

    def _search_instructions(
        self, server_round: int, search: GroupSearch, here: Sequence[int]
    ) -> dict[int, FPFCInstruction]:
        """Send every client that is there the models to train or to measure, of its own groups."""
        instructions = {}
        asked = search.asked(here)
        split_seeds = self._split_seeds(asked)
        for client in asked:
            vectors = search.vectors(client)
            instructions[client] = FPFCInstruction(
                anchor=self._own(vectors[0], client),
                start=None,
                lr=self._rate(server_round),
                local_epochs=search.epochs(self._epochs(server_round, client)),
                rho=0.0,
                clustered=self._block.names,
                more=fpfc_search.candidate_arrays(vectors, self._block),
                candidates=len(vectors),
                held_out=self.validation_share,
                held_out_seed=split_seeds[client],
                folds=fpfc_search.FOLDS if search.stage == fpfc_search.PROBE else None,
                choosing=True if search.stage == fpfc_search.JOIN else None,
            )
        return instructions

    def _split_seeds(self, clients: Sequence[int]) -> dict[int, int]:
        """Return the seeds by which clients hold samples out, the same in every round."""
        return self.run.sampling.client_seeds(clients, 0)

    def upload_spec(self) -> Spec:
        """Return what an upload holds: a model, or the blocks of the candidates in the search."""
        search = self._search
        if search is None or not search.everybody:
            return self.model_spec
        return search.upload_spec()

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure omega_i from the anchor; a candidate's block from what was sent of it."""
        anchor = super().upload_reference(sent)
        if "candidates" not in sent.config:
            return anchor
        return prefixed("0/", anchor) | sent.groups.get("more", {})

    def _rate(self, server_round: int) -> float:
        server_round -= 0 if self._path is None else self._path.offset
        return rate_in(server_round, self.lr)

    def _epochs(self, server_round: int, client: int) -> int:
        server_round -= 0 if self._path is None else self._path.offset
        return epochs_in(server_round, client, self.local_epochs)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the new omega_i, then theta and v of every pair with an active client.

        In the search for groups see `GroupSearch`.
        """
        state, search = self.state, self._search
        if search is not None and search.everybody:
            self._update_search(server_round, replies, search)
            return
        state.pairs.penalty = self.penalty_in_use
        active = [self.membership.row(client) for client in replies]
        omega = np.stack([self._block.vector(reply.arrays) for reply in replies.values()])
        state.pairs.update(active, omega)  # (6), (A.3)
        state.averaged_arrays = weighted_average(state.averaged_arrays, replies)
        for client, reply in replies.items():
            state.clients[client].num_examples = reply.num_examples
            self._buffers.keep(state.clients[client], reply.arrays)
        if self._path is not None:
            self._path.after_round(
                server_round, state, replies, self._labels, lambda c: self.new_client(c, None)
            )
        if search is None:
            return
        if search.stage == CONSENSUS:
            search.end_consensus_round(state.pairs.omega)
            return
        search.unplaced -= replies.keys()
        if self.penalty == "auto" and search.is_due(server_round):
            labels = state.pairs.clusters(self.nu_in_use)
            weights = state.clients.column("num_examples")
            search.renew(cluster_models(state.pairs.omega, weights, labels))

    def _update_search(
        self, server_round: int, replies: Mapping[int, Reply], search: GroupSearch
    ) -> None:
        if search.stage == fpfc_search.PROBE:
            search.take_probes(replies)
        elif search.stage in (fpfc_search.TRIAL, fpfc_search.REFIT):
            search.take_refits(replies)
        elif search.stage == fpfc_search.JOIN:
            search.take_choices(server_round, replies)
        else:
            search.take_scores(server_round, replies)
            # theta_ij = omega_i - omega_j, v_ij = 0: every pair is plain.
            start = search.start_of(self.membership.ids)
            self.state.pairs = PairwiseStore(start, self.penalty_in_use, self.rho)

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
        pairs, labels = self.state.pairs, self._labels()
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
        labels = self._labels()
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
        search = self._search
        if self._path is not None and self._path.chosen < 0 and not self._warned:
            self._warned = True
            log(
                WARNING,
                "After round %s no lambda of the path is chosen yet, and these are the clusters at "
                "%g. If the run is over, give start() a larger num_rounds, or LambdaPath fewer "
                "max_rounds",
                self.last_round,
                self.penalty_in_use.lam,
            )
        if search is not None and search.stage != FUSION and not self._warned:
            self._warned = True
            log(
                WARNING,
                "After round %s the groups are still searched for, and all clients count as one "
                "group: the search takes %s rounds or a few more. If the run is over, give start() "
                "a larger num_rounds, or FPFC fewer consensus_rounds or a penalty of your own",
                self.last_round,
                self._search_rounds,
            )
        return self._labels(nu)

    def _labels(self, nu: float | None = None) -> NDArray[np.int64]:
        """Return the clusters; in the search for groups, one."""
        search = self._search
        if search is not None and search.stage != FUSION:
            return np.zeros(len(self.membership), dtype=np.int64)
        pairs: PairwiseStore = self.state.pairs
        return pairs.clusters(self.nu_in_use if nu is None else nu)

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

    def newcomers(self, **base: Unpack[SampledSettings]) -> FPFCNewcomers:
        """Return the strategy for new clients after this run, which change none of its models.

        ``start`` it on a grid of new clients, from `global_arrays`; one is enough, with
        ``min_available_nodes=1``. `base` has the parameters of `SampledStrategy`.
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
        norms, lam, search = self.state.pairs.theta_norms(), self.penalty_in_use.lam, self._search
        labels = self.clusters()
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
            fusion_bounds=fusion_bound(labels, lam),
            theta_norms=norms,
            norm_distribution=norm_quantiles(norms) if len(norms) > 1 else None,
            clusters_at={nu: int(clusters(norms, nu).max()) + 1 for nu in nus},
            lam=lam,
            nu=self.nu_in_use,
            search=None if search is None else search.found(),
            path=None if self._path is None else self._path.taken(self.state.clients),
        )
