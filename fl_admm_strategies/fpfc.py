"""FPFC: clustered federated learning based on nonconvex pairwise fusion.

Every client has a model of its own; a penalty on the distance of every pair of models fuses those
that belong together, so that the clusters and their number come out of the optimisation.

Yu, Liu, Wang, Sun, "Clustered Federated Learning based on Nonconvex Pairwise Fusion",
arXiv:2211.04218v3: Algorithm 2 (appendix) with partial participation, equations (5), (6), (A.3);
its l1 branch is `penalty=L1(lam)`. The client's half is `clients.FPFCClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from . import wire
from .blocks import Block, compile_pattern, matching, prefixed, spec_of, under, weighted_average
from .checks import check_positive
from .clustering import NormDistribution, cluster_models, clusters, fusion_bound, norm_quantiles
from .pairwise import PairwiseStore
from .penalties import Penalty
from .strategy import StatefulStrategy
from .wire import Arrays, Order, Reply

EpochSchedule = int | Callable[[int, int], int]
RateSchedule = float | Callable[[int], float]


@dataclass
class FPFCState:
    """The server's variables.

    Attributes
    ----------
    pairs : PairwiseStore
        The client models omega, shape (m, d), and theta_ij, v_ij of every pair.
    shared : Arrays
        phi, the arrays that are averaged and not clustered, by name.
    num_examples : ndarray of shape (m,)
        n_i as last reported; 0 for a client that has not taken part yet.
    """

    pairs: PairwiseStore
    shared: Arrays
    num_examples: NDArray[np.float64]


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
        is above it (specs, 3.4(8)); otherwise lambda is too small for that cluster.
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


class FPFC(StatefulStrategy):
    """Fusion-penalised federated clustering (FPFC).

    Parameters
    ----------
    penalty : Penalty
        g, with its lambda: `SmoothedSCAD(lam)` (the paper's), `L1(lam)` (FPFC-l1) or `MCP(lam)`.
    rho : float (default: 1.0)
        rho, the ADMM penalty parameter. Smoothed SCAD needs (a - 1) rho > 1.
    lr : float or callable (default: 0.1)
        alpha, the clients' step size; a callable gets the round (from 1).
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
    diagnostics : bool (default: True)
        Let clients that evaluate report two gradient norms as well; see `diagnostics()`.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    A pair is updated if one of its clients took part, and once if both did (Algorithm 2; Algorithm
    1 prints "and", specs 6.2 A1 and A2). The convergence theory wants rho > 2 lambda / xi, which
    the paper's own experiments do not satisfy (specs 6.1 E8).

    A client that connects in mid-run does as the newcomers of section 6.4.2, only that the others
    go on training: it first trains on its own, without a pull, from the global model (the paper
    does not say from where), and from its first accepted upload on it has pairs with everybody,
    with v_ij = 0 at first (specs 6.2 A19), and counts in every mean. When a client has left
    (`forget_after`), its model and its pairs are dropped; m in (5) is the number of clients at the
    time.

    Examples
    --------
    >>> strategy = FPFC(SmoothedSCAD(lam=0.6), rho=1.0, lr=0.3, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=200)
    >>> strategy.clusters()
    array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    """

    def __init__(
        self,
        penalty: Penalty,
        *,
        rho: float = 1.0,
        lr: RateSchedule = 0.1,
        local_epochs: EpochSchedule = 10,
        clustered: str | None = None,
        nu: float = 0.1,
        diagnostics: bool = True,
        **base: Any,
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
            _check_epochs(local_epochs, "local_epochs")
        self.penalty = penalty
        self.rho = rho
        self.lr = lr
        self.local_epochs = local_epochs
        self.clustered = clustered
        self.nu = nu
        self.report_diagnostics = diagnostics
        self._pattern = compile_pattern("clustered", clustered)
        self._block = Block({})

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings for the log."""
        return {
            "Penalty": self.penalty,
            "rho": self.rho,
            "Learning rate": "a schedule" if callable(self.lr) else self.lr,
            "Local epochs": "a schedule" if callable(self.local_epochs) else self.local_epochs,
            "Clustered arrays": self.clustered or "all",
            "nu": self.nu,
        }

    # ------------------------------------------------------------------------------------------
    # The algorithm
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> None:
        """Start with omega_i = omega^0 for every client and theta = v = 0."""
        self._block = Block(spec_of({name: arrays[name] for name in self._clustered(arrays)}))
        first = self._block.vector(arrays)
        num_clients = len(self.client_ids)
        self.state = FPFCState(
            pairs=PairwiseStore(np.tile(first, (num_clients, 1)), self.penalty, self.rho),
            shared={n: array for n, array in arrays.items() if n not in self._block.spec},
            num_examples=np.zeros(num_clients),
        )

    def _clustered(self, arrays: Arrays) -> list[str]:
        if self._pattern is not None:
            return matching("clustered", self._pattern, arrays)
        floating = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        if not floating:
            raise ValueError("The model has no array of floating point numbers to cluster.")
        return floating

    def train_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send zeta_i (and phi); omega_i as well where the client may not hold it.

        The paper's clients keep omega_i. One that has not taken part yet has only seen omega^0 in
        the paper's initial broadcast, and one whose last reply did not become part of the state
        holds another iterate than the server, so these are sent omega_i to start from.
        """
        zeta = self.state.pairs.zeta([self._index[client] for client in client_ids])
        orders = {}
        for client, anchor in zip(client_ids, zeta, strict=True):
            index = self._index[client]
            groups = {"anchor": self._model(anchor)}
            if not self.in_sync(client):
                groups["start"] = self._block.arrays(self.state.pairs.omega[index])
            config = self._settings(server_round, client)
            orders[client] = Order(groups, config | {"rho": float(self.rho)})
        return orders

    def newcomer_orders(
        self, server_round: int, newcomers: Mapping[int, Reply]
    ) -> dict[int, Order]:
        """Let new clients train the global model on their own, without a pull (section 6.4.2)."""
        model = self.global_model()
        start = {name: model[name] for name in self._block.names}
        return {
            client: Order(
                {"anchor": model, "start": start},
                self._settings(server_round, client) | {"rho": 0.0},
            )
            for client in newcomers
        }

    def _settings(self, server_round: int, client: int) -> dict[str, wire.Scalar]:
        lr = self.lr(server_round) if callable(self.lr) else self.lr
        check_positive(f"lr in round {server_round}", lr)
        return {
            "lr": float(lr),
            "local-epochs": self._epochs(server_round, client),
            "clustered": ",".join(self._block.names),
        }

    def add_clients(self, newcomers: Mapping[int, Reply], places: Sequence[int]) -> None:
        """Give new clients pairs with all others, with v_ij = 0; omega_i comes with the update."""
        state = self.state
        mean = state.pairs.omega.mean(axis=0)
        state.pairs.add(places, np.tile(mean, (len(places), 1)))
        state.num_examples = np.insert(state.num_examples, places, 0)

    def remove_clients(self, indices: Sequence[int]) -> None:
        """Drop the clients' models and their pairs."""
        self.state.pairs.remove(indices)
        self.state.num_examples = np.delete(self.state.num_examples, indices)

    def _epochs(self, server_round: int, client: int) -> int:
        if not callable(self.local_epochs):
            return int(self.local_epochs)
        epochs = self.local_epochs(server_round, client)
        _check_epochs(epochs, f"local_epochs({server_round}, {client})")
        return int(epochs)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the new omega_i, then theta and v of every pair with an active client."""
        state = self.state
        active = [self._index[client] for client in replies]
        omega = np.stack([self._block.vector(reply.arrays) for reply in replies.values()])
        state.pairs.update(active, omega)  # (6), (A.3)
        state.shared = weighted_average(state.shared, replies)
        state.num_examples[active] = [reply.num_examples for reply in replies.values()]

    # ------------------------------------------------------------------------------------------
    # Models
    # ------------------------------------------------------------------------------------------

    def evaluate_orders(self, server_round: int, client_ids: Sequence[int]) -> dict[int, Order]:
        """Send each client its own, its cluster's and the global model."""
        omega = self.state.pairs.omega
        labels = self.clusters()
        alpha = self._cluster_vectors(labels)
        everybody = self.global_model()
        indices = [self._index[client] for client in client_ids]
        groups = {
            client: {
                "personal": self._model(omega[index]),
                "cluster": self._model(alpha[labels[index]]),
                "global": everybody,
            }
            for client, index in zip(client_ids, indices, strict=True)
        }
        if self.report_diagnostics:
            duals = self.state.pairs.mean_dual(indices)
            for client, dual in zip(client_ids, duals, strict=True):
                groups[client]["mean-dual"] = self._block.arrays(dual)
        config: dict[str, wire.Scalar] = {"clustered": ",".join(self._block.names)}
        return {client: Order(own, config) for client, own in groups.items()}

    def global_model(self) -> Arrays:
        """Return the mean of all client models: clients count equally, as in the objective (1)."""
        return self._model(self.state.pairs.omega.mean(axis=0))

    def personal_model(self, client_id: int) -> Arrays:
        """Return omega_i, with the shared arrays."""
        return self._model(self.state.pairs.omega[self._index[client_id]])

    def clusters(self, nu: float | None = None) -> NDArray[np.int64]:
        """Return the cluster of every client, in the order of `client_ids`.

        Clusters are the connected components of ||theta_ij|| <= nu (Remark 2; the relation itself
        is not transitive, specs 6.2 A8), numbered by their first client.

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
        alpha = self._cluster_vectors(self.clusters(nu))
        return [wire.to_array_record(self._model(vector)) for vector in alpha]

    def _cluster_vectors(self, labels: NDArray[np.int64]) -> NDArray[Any]:
        return cluster_models(self.state.pairs.omega, self.state.num_examples, labels)

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

    def _model(self, vector: NDArray[Any]) -> Arrays:
        """Return a whole model: the clustered arrays from a d-vector, the others shared."""
        block = self._block.arrays(vector)
        return {name: block.get(name, self.state.shared.get(name)) for name in self._spec}  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------
    # Checkpoints
    # ------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return omega, the pairs (views of the store), phi and n_i."""
        return {
            **prefixed("pairs/", self.state.pairs.state_arrays()),
            **prefixed("shared/", self.state.shared),
            "num_examples": self.state.num_examples,
        }

    def may_grow(self, name: str) -> bool:
        """Return whether it is of the pairs that are stored, whose number changes."""
        return name.startswith(("pairs/pair_", "pairs/norm", "pairs/scale", "pairs/delta."))

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `state_arrays` returned."""
        pairs = under("pairs/", arrays)
        self.state = FPFCState(
            pairs=PairwiseStore.from_state_arrays(pairs, self.penalty, self.rho),
            shared=under("shared/", arrays),
            num_examples=arrays["num_examples"].astype(np.float64),
        )


def _check_epochs(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected an integer >= 1.")
