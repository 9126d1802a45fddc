"""How `FPFC` without a lambda finds its groups, and with them lambda.

Not in FPFC's paper. A run goes through stages, each a few rounds: FedAvg, one probe, a choice among
clusterings of the probes, a re-check; FedAvg in every group; FPFC's own rounds with the lambda that
was found. The stages are in `finding`, `recheck` and `together`; docs/methods/fpfc.md, "Without a
lambda", has the reasons and the evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Spec, prefixed, under
from ...maths.clustering import cluster_models
from ...maths.grouping import (
    Labels,
    group_means,
    holding_lambda,
    numbered,
    smallest_distance,
    winsorised,
)
from ...maths.penalties import Penalty
from ...maths.recheck import Recheck
from ...runtime.messages.records import Reply
from .messages import ERROR, TrialInstruction
from .source import (
    NO_FUSION,
    FusionStrategy,
    Messages,
    PenaltySource,
    Replies,
    Round,
    Variables,
    Vector,
    scad,
)

STAGES = ("OneModel", "Probe", "Refit", "Choice", "Reprobe", "Judge", "Together", "Fusion")
"""In the order in which a run first comes to them; groups that train are probed again."""

# docs/methods/fpfc-notes.md has the evidence for these, and those beside the stages.
PROBE_FACTOR = 5
REFIT_ROUNDS = 5
FUSION_ROUNDS = 30  # at the end of a run
MARGIN = 0.6  # of the distance of two groups: as with rho = 0.8 and more


@dataclass
class FoundGroups:
    """What the search of `FPFC` without a lambda found.

    Attributes
    ----------
    last_round : int
        The last round of the search; 0 before.
    num_groups : ndarray of shape (K,)
        Of every grouping in the last comparison.
    losses : ndarray of shape (K,)
        Mean loss on the held-out data.
    against : ndarray of shape (K,)
        By how many standard errors clients prefer a grouping with more groups, at most.
    chosen : int
        The grouping that was chosen.
    smallest_distance : float
        b, between the models of two groups as they came out of the search; NaN for one group.
    lam_needed : float
        The least lambda that can hold these groups together (docs/methods/fpfc-notes.md, P4).
    fused_from, fused_until : int
        The round before the first of FPFC's own, and the last one where they raised the losses and
        were given up; 0 for none, as long as every group trains one model.
    lam_inside : float
        lambda of the pairs inside a group, which holds it; 0 before FPFC's own rounds.
    """

    last_round: int = 0
    num_groups: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    against: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    chosen: int = 0
    smallest_distance: float = 0.0
    lam_needed: float = 0.0
    fused_from: int = 0
    fused_until: int = 0
    lam_inside: float = 0.0


@dataclass
class SearchState(FoundGroups, Variables):
    """The variables of a search; what one stage leaves to the next is here.

    Attributes
    ----------
    stage : int
        The place of the present stage in `STAGES`.
    rounds : int
        Rounds in this stage: with a usable reply, or, of the probes, begun.
    refits, rechecks, rechecked : int
        How often the groupings' models were trained; how often groups were compared again, and the
        round of the last time.
    lam : float
        lambda between groups.
    center : ndarray of shape (d,)
        The mean that all clients set out from; empty before.
    models : ndarray of shape (G, d)
        The models of all groups of the groupings under trial.
    labels : dict of int to ndarray of shape (K,)
        The row in `models` of the client's group in every grouping, the coarsest first.
    probes : dict of int to ndarray of shape (d,)
        Where clients came to from the center; kept until the last re-check of the groups.
    local : dict of int to ndarray of shape (d,)
        Where they came to from their group's model, in a re-check.
    norms : dict of int to float
        The gradient norms that clients reported at the models of the groups that were chosen.
    groups : dict of int to int
        The settled group of every client that has one: the search's choice, and what became of it
        since. Members of a group that is trained together have equal omega_i.
    training_losses : dict of int to ndarray of shape (2,)
        The training losses that a client reported first and last in FPFC's own rounds.
    """

    stage: int = 0
    rounds: int = 0
    refits: int = 0
    rechecks: int = 0
    rechecked: int = 0
    lam: float = 0.0
    center: Vector = field(default_factory=lambda: np.zeros(0))
    models: Vector = field(default_factory=lambda: np.zeros((0, 0)))
    labels: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    probes: dict[int, Vector] = field(default_factory=dict)
    local: dict[int, Vector] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    training_losses: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def try_groupings(
        self, clients: Sequence[int], groupings: Sequence[Labels], vectors: Vector
    ) -> None:
        """Begin to try groupings of clients, with the mean of its members for a group's model."""
        means = [group_means(vectors, labels) for labels in groupings]
        firsts = np.cumsum([0, *map(len, means[:-1])])
        columns = np.array(groupings, dtype=np.int64).T + firsts
        self.models = np.concatenate(means)
        self.labels = dict(zip(clients, columns, strict=True))

    def refit(self, trained: Mapping[int, Sequence[Vector]]) -> None:
        """Set every group's model to the mean of its clients' models, all alike as in (1).

        A group without a reply keeps its model.
        """
        members: dict[int, list[Vector]] = defaultdict(list)
        for client, models in trained.items():
            for row, model in zip(self.labels[client].tolist(), models, strict=True):
                members[row].append(model)
        for row, models in members.items():
            self.models[row] = np.mean(models, axis=0)

    def keep(self, kept: Sequence[int]) -> None:
        """Go on with these groupings only."""
        self.labels = {client: rows[kept] for client, rows in self.labels.items()}


class GroupSearch(PenaltySource):
    """The source of the penalty of a run with ``penalty="auto"``.

    Parameters
    ----------
    fpfc : FusionStrategy

    Attributes
    ----------
    found : SearchState
        What the stages so far have found.
    comparison : Recheck or None
        What a re-check compares, made of the rest.
    """

    found: SearchState

    def __init__(self, fpfc: FusionStrategy) -> None:
        super().__init__(fpfc)
        self.found = SearchState()
        self.comparison: Recheck | None = None
        # Probe and score take a round each where no reply is lost.
        self.least_rounds = fpfc.consensus_rounds + REFIT_ROUNDS + 2

    @property
    def stage(self) -> Stage:
        """The present stage."""
        return Stage.kinds[STAGES[self.found.stage]](self)

    def _enter(self, name: str) -> None:
        self.found.stage, self.found.rounds = STAGES.index(name), 0
        self.fpfc.run.limit.forget_norms()  # uploads are of another kind

    # ------------------------------------------------------------------------------------------
    # The penalty and the clusters
    # ------------------------------------------------------------------------------------------

    @property
    def penalty(self) -> Penalty:
        """The paper's penalty; lambda is 0 until the groups are found."""
        return scad(self.found.lam)

    @property
    def lam_inside(self) -> float:
        """That of the pairs inside a group."""
        return self.found.lam_inside

    @property
    def nu(self) -> float:
        """The threshold of the clusters: a lambda/2, 0 until the groups are found."""
        return self.found.lam * NO_FUSION.a / 2 if self.fpfc.nu is None else self.fpfc.nu

    @property
    def is_searching(self) -> bool:  # type: ignore[override]
        """Whether the groups are not found yet."""
        return self.stage.is_search

    @property
    def stage_text(self) -> str:  # type: ignore[override]
        """How far the search has come."""
        done = self.fpfc.last_round
        of_about = f"round {done} of about {max(done, self.least_rounds)}"
        return f"looking for groups, {of_about}" if self.is_searching else ""

    @property
    def waits_for_all(self) -> bool:
        """Whether the present stage is one of all clients."""
        return self.is_searching or isinstance(self.stage, AllClients)

    @property
    def outside(self) -> set[int]:  # type: ignore[override]
        """Clients that took no part in the search and have not trained since."""
        known = self.found.groups.keys()
        return set() if self.is_searching else set(self.state.clients.ids) - known

    def labels(self, nu: float | None = None) -> NDArray[np.int64]:
        """Return the groups, one for all until they are found; by a nu of the user's, clusters."""
        ids = self.state.clients.ids
        if self.is_searching:
            return np.zeros(len(ids), dtype=np.int64)
        if nu is None and self.fpfc.nu is None:
            return np.array(numbered([self.found.groups.get(c, -1 - c) for c in ids]))
        alone = [row for row, client in enumerate(ids) if client in self.outside]
        return self.state.pairs.clusters(self.nu if nu is None else nu, alone)

    def examples(self) -> NDArray[np.float64]:
        """Return n_i, the largest winsorised, since the clients report them; 0 if unknown."""
        examples = super().examples().astype(np.float64)
        known = np.where(examples > 0, examples, np.nan)
        return np.fmin(examples, winsorised(known))

    def report(self) -> dict[str, Any]:
        """Return the `FoundGroups`, once there are any."""
        if self.is_searching:
            return {}
        names = [one.name for one in fields(FoundGroups)]
        return {"search": FoundGroups(**{name: getattr(self.found, name) for name in names})}

    # ------------------------------------------------------------------------------------------
    # What the stages share
    # ------------------------------------------------------------------------------------------

    def groups_of(self, client_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the groups of clients; -1 for one that has none yet."""
        return np.array([self.found.groups.get(client, -1) for client in client_ids], np.int64)

    def weights(self) -> NDArray[np.float64]:
        """Return how much every client counts in its group: n_i over the group's mean."""
        examples, groups = self.examples(), self.groups_of(self.state.clients.ids)
        weights = np.ones(len(groups))
        for group in np.unique(groups[(groups >= 0) & (examples > 0)]):
            rows = (groups == group) & (examples > 0)
            weights[rows] = examples[rows] / examples[rows].mean()
        return weights

    def group_models(
        self, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.intp], Labels, NDArray[Any]]:
        """Return the rows of clients that have a group, their groups, and the groups' models."""
        groups = self.groups_of(self.state.clients.ids)
        rows = np.flatnonzero(groups >= 0)
        labels = numbered(groups[rows])
        return rows, labels, cluster_models(self.state.pairs.omega[rows], weights[rows], labels)

    def renew_lambda(self) -> None:
        """Set lambda by the models of the present groups, and what it takes to hold them.

        By the gradients that the clients reported with their scores, which fall as models get
        better.
        """
        found, weights = self.found, self.weights()
        rows, labels, models = self.group_models(weights)
        norms = np.array([found.norms.get(client, np.nan) for client in self.state.clients.ids])
        needed = holding_lambda(labels, (weights * norms)[rows])
        found.lam = lambda_between(smallest_distance(models), needed, self.state.pairs.rho)
        found.lam_inside = max(2 * needed, found.lam)

    # ------------------------------------------------------------------------------------------
    # A round
    # ------------------------------------------------------------------------------------------

    def messages(self, now: Round) -> Messages:
        """Return what the present stage asks; a stage may be over before its round begins."""
        while following := self.stage.begin_round(now):
            self._enter(following)
        return self.stage.messages(now)

    def upload_spec(self) -> Spec | None:
        """Return what an upload of the present stage holds."""
        return self.stage.upload_spec()

    def take_models(self, rows: list[int], omega: Vector) -> NDArray[np.intp]:
        """Let the present stage take in the new omega_i of a round."""
        return self.stage.take_models(rows, omega)

    def after_round(self, server_round: int, replies: Replies) -> None:
        """Let the present stage take in the replies; go on to the next one if it is over."""
        if following := self.stage.take(server_round, replies):
            self._enter(following)

    def remove(self, clients: Collection[int]) -> None:
        """Forget clients; a group that loses its last one is out of every count."""
        super().remove(clients)
        self.comparison = None


Next: TypeAlias = str | None
"""The name of the stage that follows; None: the present one goes on."""


class Stage:
    """A stage of a run without a lambda, and the interface of all. It keeps nothing itself.

    Parameters
    ----------
    search : GroupSearch
    """

    kinds: ClassVar[dict[str, type[Stage]]] = {}
    """The stages by name."""
    is_search: ClassVar[bool] = True
    """Whether the groups are not settled yet."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Stage.kinds[cls.__name__] = cls

    def __init__(self, search: GroupSearch) -> None:
        self.search, self.found = search, search.found
        self.fpfc = search.fpfc

    def begin_round(self, now: Round) -> Next:
        """Return the stage that a round begins with, if it is another one."""
        return None

    def messages(self, now: Round) -> Messages:
        """Return the messages of a round."""
        raise NotImplementedError

    def upload_spec(self) -> Spec | None:
        """Return what an upload holds; None: the client's model."""
        return None

    def take_models(self, rows: list[int], omega: Vector) -> NDArray[np.intp]:
        """Take in the new omega_i of a round."""
        return PenaltySource.take_models(self.search, rows, omega)

    def take(self, server_round: int, replies: Replies) -> Next:
        """Take in the replies of a round; return the next stage if this one is over."""
        raise NotImplementedError


class AllClients(Stage):
    """A stage that sends models to all connected clients, not only to the sampled ones."""

    kind: ClassVar[type[TrialInstruction]] = TrialInstruction
    epochs_factor: ClassVar[int] = 1
    """Local epochs of the stage, in those that are usual; with 0 clients only measure."""

    def recipients(self, connected: Sequence[int]) -> list[int]:
        """Return the clients of a round: by default those that have a place in the groupings."""
        return [client for client in connected if client in self.found.labels]

    def models(self, client: int) -> Sequence[Vector]:
        """Return the models for a client: by default its group's under every grouping."""
        return list(self.found.models[self.found.labels[client]])

    def num_uploads(self) -> int:
        """Return how many models a client uploads: one before there are groupings, a probe."""
        if not self.epochs_factor:
            return 0
        return len(next(iter(self.found.labels.values()), [self.found.center]))

    def messages(self, now: Round) -> Messages:
        """Ask clients to train or measure their models, without a pull."""
        clients = self.recipients(now.connected)
        held_out, messages = self.fpfc.hold_out(clients), {}
        for client in clients:
            first, *others = self.models(client)
            more: Arrays = {}
            for k, model in enumerate(others, start=1):
                more |= prefixed(f"{k}/", self.fpfc.block.arrays(model))
            fields = {"more": more or None, "num_models": 1 + len(others), **held_out[client]}
            messages[client] = now.message(self.kind, client, first, self.epochs_factor, **fields)
        return messages

    def upload_spec(self) -> Spec:
        """Return the names, shapes and dtypes of the block of every model that is trained."""
        return {
            f"{k}/{name}": spec
            for k in range(self.num_uploads())
            for name, spec in self.fpfc.block.spec.items()
        }

    def uploads(self, reply: Reply) -> list[Vector]:
        """Return the models of an upload."""
        blocks = [under(f"{k}/", reply.arrays) for k in range(self.num_uploads())]
        return [self.fpfc.block.vector(block) for block in blocks]


def lambda_between(b: float, needed: float, rho: float) -> float:
    """Return lambda for groups whose models are b or more apart.

    b/a: SCAD is flat beyond a lambda, so that no two groups pull on each other. With a small rho
    less: (6) pulls at full strength up to lambda + lambda/rho, which is to be well below b. With
    one group (b is NaN) twice what holding it takes.
    """
    return min(b / NO_FUSION.a, MARGIN * b / (1 + 1 / rho)) if np.isfinite(b) else 2 * needed


def reported(reply: Reply, name: str, count: int) -> NDArray[np.float64]:
    """Return a client's metric of every model; NaN where there is none, or none that is finite."""
    values = np.array([reply.metrics.get(f"{name}-{k}", np.nan) for k in range(count)])
    return np.where(np.isfinite(values), values, np.nan)


def loss_errors(reply: Reply, name: str, count: int) -> NDArray[np.float64]:
    """Return the standard errors of a client's differences of loss; NaN where there is none."""
    errors = np.zeros((count, count))
    for j, k in combinations(range(count), 2):
        errors[j, k] = errors[k, j] = reply.metrics.get(f"{name}-{ERROR}-{j}-{k}", np.nan)
    return errors
