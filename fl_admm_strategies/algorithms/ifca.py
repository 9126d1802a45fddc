"""IFCA: L models, of which every client takes the one with the least loss and trains it.

    j_i = argmin_j f_i(theta_j),    theta_j <- mean of what its clients made of it

k-means for models: clients are assigned anew in every round, to one of a known number of clusters.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS
2020, arXiv:2006.04088: Algorithm 1, with both of its options, and weight sharing; see
docs/methods/ifca.md. The client is `clients.IFCAClient`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from typing import ClassVar

import numpy as np
from flwr.common import log

from ..maths.blocks import Arrays, Pattern, Spec, compile_pattern, matching, prefixed, under
from ..maths.checks import Count
from ..runtime.messages.records import ClientInstruction, Metrics, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.base import Weights, participants_mean
from .shared.clustered import ClusteredState, ClusteredStrategy, Clusters

TOOK, LOSS = "took-", "assigned-loss"
"""Metrics of a client: ``took-K``, 1 for the model that it took and 0 for all others (the paper's
one-hot s_i, of which the means are shares of the clients), and f_i there."""


@dataclass
class IFCAState(ClusteredState):
    """The server's variables.

    Attributes
    ----------
    initial : Arrays
        The model that others are drawn like. Empty without restarts, as `best` is.
    best : Arrays
        The models of the best start so far, ``K/NAME``; those of the first at first.
    best_loss : float
        Their clients' mean training loss.
    rounds : int
        The rounds so far that changed something.
    """

    initial: Arrays
    best: Arrays
    best_loss: float
    rounds: int


@dataclass(frozen=True)
class IFCAEvaluation(Instruction):
    """All models, of which the client evaluates the one that it takes.

    The first is whole; `more` has what differs in the others, ``K/NAME``.
    """

    model: Arrays
    more: Arrays | None
    num_clusters: int

    def models(self) -> list[Arrays]:
        """Return the models by their number."""
        more = self.more or {}
        return [self.model | under(f"{k}/", more) for k in range(self.num_clusters)]


@dataclass(frozen=True)
class IFCAInstruction(IFCAEvaluation):
    """What a client gets: all models. With no epochs it says which it takes, and nothing else."""

    lr: float
    local_epochs: int


class IFCA(ClusteredStrategy):
    """Iterative federated clustering with a known number of clusters (IFCA).

    Parameters
    ----------
    num_clusters : int
        L (k in the paper).
    weights : {"uniform", "size"} (default: "uniform")
        Whether the mean of models is the plain one or weighted by examples.
    clustered : str, optional
        Regular expression searched in the names of the arrays: what differs by cluster. The other
        arrays are the same in all models, and the mean over all participants (the paper's weight
        sharing). By default everything differs.
    restarts : int (default: 1)
        Starts that are tried, one after another, each with other models. The start with the least
        mean training loss goes on.
    restart_rounds : int (default: 20)
        Rounds of training of each; one more measures the loss on all clients.
    **base
        The parameters of `ClusteredStrategy`.

    Notes
    -----
    Means are over the participants that took a model; a model that no client took stays as it is.
    In `clusters()` a client is where it was last assigned, when it trained or when it was
    evaluated; a client that never was is in the first cluster. A client that joins takes the model
    of least loss, as all do. A subclass that starts from other models overrides `starting_model`.
    """

    method: ClassVar = "IFCA"
    paper: ClassVar = "Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, arXiv:2006.04088"
    upload = Upload("statistic")  # one of the models

    num_clusters: Count = field(kw_only=False)
    weights: Weights = "uniform"
    clustered: Pattern | None = None
    restarts: Count = 1
    restart_rounds: Count = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clustered = compile_pattern("clustered", self.clustered)

    # ------------------------------------------------------------------------------------------
    # The models at the start
    # ------------------------------------------------------------------------------------------

    def init_state(self, arrays: Arrays) -> IFCAState:
        """Start with L models."""
        if self._clustered is not None:
            matching("clustered", self._clustered, self.trained)
        models = self._start(arrays, 0)
        initial, best = (arrays, _joined(models)) if self.restarts > 1 else ({}, {})
        return IFCAState(Clusters(models), initial, best, math.inf, 0)

    def _start(self, initial: Arrays, trial: int) -> list[Arrays]:
        first = trial * self.num_clusters
        numbers = range(first, first + self.num_clusters)
        return [initial | self._part(self.starting_model(initial, number)) for number in numbers]

    def starting_model(self, initial: Arrays, number: int) -> Arrays:
        """Return the model of a number: 0, ..., L - 1 for the first start, L, ... for the next.

        The first is the run's initial model. In the others every trained array that differs by
        cluster is drawn with the mean and the deviation that it has there.
        """
        if number == 0:
            return initial
        trained = self._part({name: initial[name] for name in self.trained})
        if not any(array.std() for array in trained.values()):
            raise ValueError(
                "Every array of the initial model is constant, so that all models would be the "
                "same and all clients take the first. Start IFCA from a random model."
            )
        rng = np.random.default_rng([self.seed, number, *b"ifca"])
        drawn = dict(initial)
        for name, array in trained.items():
            noise = rng.standard_normal(array.shape)
            drawn[name] = (array.mean() + array.std() * noise).astype(array.dtype)
        return drawn

    def _part(self, arrays: Arrays) -> Arrays:
        """Return what differs by cluster."""
        pattern = self._clustered
        return {n: array for n, array in arrays.items() if pattern is None or pattern.search(n)}

    # ------------------------------------------------------------------------------------------
    # One round
    # ------------------------------------------------------------------------------------------

    @property
    def _trial(self) -> tuple[int, int]:
        """The start that is tried, from 0, or `restarts` when all were, and its rounds so far."""
        if self.restarts == 1:
            return 1, 0
        trial, rounds = divmod(self.state.rounds, self.restart_rounds + 1)
        return min(trial, self.restarts), rounds

    @property
    def _measures(self) -> bool:
        """Whether clients report in this round how good a start was, and do not train."""
        trial, rounds = self._trial
        return trial < self.restarts and rounds == self.restart_rounds

    def _models(self) -> tuple[Arrays, Arrays | None]:
        first, *others = self.state.clusters.models
        return first, _joined(map(self._part, others), 1) or None

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, IFCAInstruction]:
        """Send all models; to all clients that are connected where a start is to be measured."""
        members, measures = self.membership, self._measures
        model, more = self._models()
        epochs = 0 if measures else self.local_epochs
        instruction = IFCAInstruction.of(
            self, server_round, model=model, more=more, local_epochs=epochs
        )
        here = [c for c in members.ids if members.last_seen[c] >= server_round]
        return dict.fromkeys(here if measures else client_ids, instruction)

    def upload_spec(self) -> Spec:
        """Return what is uploaded: a model; nothing where a start is measured."""
        return {} if self._measures else self.model_spec

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure an upload from 0."""
        return {}

    def check_reply(self, client_id: int, reply: Reply) -> None:
        """Refuse a client that does not report which model it took."""
        if self._taken(reply.metrics) is None:
            raise ValueError(f"It does not report which of the {self.num_clusters} models it took.")

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set every model to the mean of its clients' models, what is shared to the mean of all."""
        clusters = self.state.clusters
        for client, reply in replies.items():
            clusters.of[client] = self._taken(reply.metrics)
        if self._measures:
            self._compare(replies)
        else:
            for cluster, own in clusters.split(replies).items():
                clusters.average(cluster, own, self.weights)
            first = clusters.models[0]
            shared = {name: first[name] for name in first.keys() - self._part(first).keys()}
            common = participants_mean(shared, replies, self.weights)
            clusters.models = [model | common for model in clusters.models]
        self.state.rounds += 1

    def _taken(self, metrics: Metrics) -> int | None:
        """Return the model that a client took by its report; None if it reports none or several."""
        taken = [k for k in range(self.num_clusters) if metrics.get(f"{TOOK}{k}") == 1]
        return taken[0] if len(taken) == 1 else None

    def _compare(self, replies: Mapping[int, Reply]) -> None:
        """Keep the better start, and go on with the next, or with the best of all."""
        state, clusters, (trial, _) = self.state, self.state.clusters, self._trial
        losses = [reply.metrics.get(LOSS, math.nan) for reply in replies.values()]
        loss = float(np.nan_to_num(np.mean(losses), nan=math.inf))
        log(INFO, "IFCA's start %s of %s: mean training loss %.6g", trial + 1, self.restarts, loss)
        if loss < state.best_loss:
            state.best, state.best_loss = _joined(clusters.models), loss
        if trial + 1 < self.restarts:
            clusters.models = self._start(state.initial, trial + 1)
        else:
            clusters.models = [under(f"{k}/", state.best) for k in range(self.num_clusters)]
        clusters.of = dict.fromkeys(clusters.of, 0)  # of models that are gone

    # ------------------------------------------------------------------------------------------
    # Models and clusters
    # ------------------------------------------------------------------------------------------

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, IFCAEvaluation]:
        """Send all models: clients take one anew."""
        return dict.fromkeys(client_ids, IFCAEvaluation(*self._models(), self.num_clusters))

    def _cluster_of(self) -> dict[int, int]:
        of, evaluated = super()._cluster_of(), self.evaluate_metrics
        latest = max(evaluated, default=0)
        for client, metrics in (evaluated[latest] if latest else {}).items():
            cluster = self._taken(metrics)
            is_fresh = client in of and latest >= self.membership.last_accepted[client]
            if is_fresh and cluster is not None:
                of[client] = cluster
        return of


def _joined(models: Iterable[Arrays], first: int = 0) -> Arrays:
    """Return the arrays of models under their numbers: ``K/NAME``."""
    joined: Arrays = {}
    for k, model in enumerate(models, first):
        joined |= prefixed(f"{k}/", model)
    return joined
