"""IFCA: L models, of which every client takes the one with the least loss and trains it.

    j_i = argmin_j f_i(theta_j),    theta_j <- mean of what its clients made of it

k-means for models: clients are assigned anew in every round, to one of a known number of clusters.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS
2020, arXiv:2006.04088: Algorithm 1, with both of its options, and weight sharing; see
docs/methods/ifca.md. The client is `clients.IFCAClient`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log

from ..maths.blocks import Arrays, Pattern, Spec, compile_pattern, matching, prefixed, under
from ..maths.checks import Count
from ..runtime.messages.records import ClientInstruction, Metrics, Reply, from_array_record
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.base import Weights, participants_mean
from .shared.clustered import ClusteredState, ClusteredStrategy, Clusters

TOOK, LOSS = "took-", "assigned-loss"
"""Metrics of a client: ``took-K``, 1 for the model that it took and 0 for all others (the paper's
one-hot s_i, whose means are shares of the clients), and f_i there."""


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
        Their clients' mean training loss; 0 before the first was measured.
    trial : int
        The start that is tried, from 0; `restarts` when all were.
    rounds : int
        Its rounds so far.
    """

    initial: Arrays
    best: Arrays
    best_loss: float
    trial: int
    rounds: int


@dataclass(frozen=True)
class IFCAEvaluation(Instruction):
    """All models, of which the client evaluates the one that it takes.

    The first is whole; `more` has of the others what is not the same, ``K/NAME``.
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
        arrays are everybody's, moved by all participants (the paper's weight sharing). By default
        everything is clustered.
    initial_models : callable, optional
        ``initial_models(k)`` returns the k-th model to start from, as an `ArrayRecord`, k = 0, ...,
        L - 1, and on for restarts. By default the first is the run's initial model and the others
        are drawn: every array with the mean and the deviation that it has there.
    restarts : int (default: 1)
        Starts that are tried, one after another, each with other models. The one whose models have
        the least mean training loss goes on.
    restart_rounds : int (default: 20)
        Rounds of training of each; one more measures the loss on all clients.
    **base
        The parameters of `ClusteredStrategy`.

    Notes
    -----
    Means are over the participants that took a model; one that nobody took stays as it is. In
    `clusters()` a client is where it was last assigned, when it trained or when it was evaluated;
    one that never was is in the first cluster. A client that joins takes the model of least loss,
    as all do.
    """

    method: ClassVar = "IFCA"
    paper: ClassVar = "Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, arXiv:2006.04088"
    upload = Upload("statistic")  # a change of one of the models

    num_clusters: Count = field(kw_only=False)
    weights: Weights = "uniform"
    clustered: Pattern | None = None
    initial_models: Callable[[int], ArrayRecord] | None = None
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
        initial, best = (arrays, _stacked(models)) if self.restarts > 1 else ({}, {})
        return IFCAState(Clusters(models), initial, best, 0.0, 0, 0)

    def _start(self, initial: Arrays, trial: int) -> list[Arrays]:
        first = trial * self.num_clusters
        numbers = range(first, first + self.num_clusters)
        return [initial | self._part(self._drawn(initial, number)) for number in numbers]

    def _drawn(self, initial: Arrays, number: int) -> Arrays:
        """Return the model of a number, 0, ..., L - 1 for the first start, L, ... for the next."""
        if self.initial_models is not None:
            given = from_array_record(self.initial_models(number))
            for name, array in initial.items():
                if name not in given or given[name].shape != array.shape:
                    raise ValueError(
                        f"initial_models({number}) has no '{name}' of shape {array.shape}. Return "
                        "a model with the arrays of the run's initial one."
                    )
            return {name: given[name].astype(array.dtype) for name, array in initial.items()}
        if number == 0:
            return initial
        trained = self._part({name: initial[name] for name in self.trained})
        if not any(array.std() for array in trained.values()):
            raise ValueError(
                "Every array of the initial model is constant, so that all models would be the "
                "same and all clients take the first. Give IFCA initial_models, or "
                "start from a random model."
            )
        rng = np.random.default_rng([self.seed, number, *b"ifca"])
        drawn: Arrays = {}
        for name, array in trained.items():
            noise = rng.standard_normal(array.shape)
            drawn[name] = (array.mean() + array.std() * noise).astype(array.dtype)
        return initial | drawn

    def _part(self, arrays: Arrays) -> Arrays:
        """Return what differs by cluster."""
        pattern = self._clustered
        return {n: array for n, array in arrays.items() if pattern is None or pattern.search(n)}

    # ------------------------------------------------------------------------------------------
    # One round
    # ------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """Whether clients are to say in this round how good a start was, and nothing else."""
        if self.restarts == 1 or self.state.trial == self.restarts:
            return False
        return bool(self.state.rounds >= self.restart_rounds)

    def _models(self) -> tuple[Arrays, Arrays | None]:
        first, *others = self.state.clusters.models
        return first, _stacked(map(self._part, others), 1) or None

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, IFCAInstruction]:
        """Send all models; to everybody that is there where a start is to be measured."""
        members, measures = self.membership, self._measures
        model, more = self._models()
        instruction = IFCAInstruction.of(
            self,
            server_round,
            model=model,
            more=more,
            local_epochs=0 if measures else self.local_epochs,
        )
        here = [c for c in members.ids if members.last_seen[c] >= server_round]
        return dict.fromkeys(here if measures else client_ids, instruction)

    def upload_spec(self) -> Spec:
        """Return what is uploaded: a change; nothing where a start is measured."""
        return {} if self._measures else self.model_spec

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure a change from 0."""
        model = super().upload_reference(sent)
        return {name: array for name, array in model.items() if array.dtype.kind != "f"}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Move every model by those who took it, and what is everybody's by all."""
        state = self.state
        everybody: dict[int, Reply] = {}
        taken: dict[int, dict[int, Reply]] = {}
        for client, reply in replies.items():
            if (cluster := self._taken(reply.metrics)) is None:
                reason = f"it does not say which one of the {self.num_clusters} models it took"
                log(WARNING, "round %s: client %s refused: %s", server_round, client, reason)
                continue
            state.clusters.of[client] = cluster
            everybody[client] = taken.setdefault(cluster, {})[client] = reply
        if not everybody:
            return
        if self._measures:
            self._compare(everybody)
            return
        models = state.clusters.models
        common = {n: array for n, array in models[0].items() if n not in self._part(models[0])}
        shared = self._moved(common, everybody)
        for cluster, model in enumerate(models):
            part = self._part(model)
            if cluster in taken:
                part = self._moved(part, taken[cluster])
            models[cluster] = {name: (shared | part)[name] for name in model}
        state.rounds += 1

    def _taken(self, metrics: Metrics) -> int | None:
        """Return the model that a client says it took; None if that is none, or not one."""
        said = [k for k in range(self.num_clusters) if metrics.get(f"{TOOK}{k}") == 1]
        return said[0] if len(said) == 1 else None

    def _moved(self, arrays: Arrays, replies: Mapping[int, Reply]) -> Arrays:
        """Return arrays moved by the mean change of some clients; integers are their mean."""
        mean = participants_mean(arrays, replies, self.weights)
        return {
            name: array + mean[name] if array.dtype.kind == "f" else mean[name]
            for name, array in arrays.items()
        }

    def _compare(self, replies: Mapping[int, Reply]) -> None:
        """Keep the better start, and go on with the next, or with the best of all."""
        state, trial = self.state, self.state.trial
        losses = [reply.metrics.get(LOSS, math.nan) for reply in replies.values()]
        loss = float(np.nan_to_num(np.mean(losses), nan=math.inf))
        log(INFO, "IFCA's start %s of %s: mean training loss %.6g", trial + 1, self.restarts, loss)
        if loss < state.best_loss or trial == 0:
            state.best, state.best_loss = _stacked(state.clusters.models), loss
        state.trial, state.rounds = trial + 1, 0
        state.clusters.models = (
            self._start(state.initial, trial + 1)
            if trial + 1 < self.restarts
            else [under(f"{k}/", state.best) for k in range(self.num_clusters)]
        )
        state.clusters.of = dict.fromkeys(state.clusters.of, 0)  # of models that are gone

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


def _stacked(models: Iterable[Arrays], first: int = 0) -> Arrays:
    stacked: Arrays = {}
    for k, model in enumerate(models, first):
        stacked |= prefixed(f"{k}/", model)
    return stacked
