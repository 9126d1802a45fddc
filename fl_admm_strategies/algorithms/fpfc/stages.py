"""What the stages of a run without a lambda share: the variables, the interface, what is reported.

The stages themselves, in `finding`, `recheck` and `together`, keep nothing: what one leaves to the
next is in the `Search`. When one is over it names the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, Spec, any_length, check_saved, prefixed, spec_of, under
from ...maths.candidates import Candidates
from ...maths.clienttable import ClientTable
from ...maths.clustering import cluster_models
from ...maths.grouping import Labels, holding_lambda, numbered, smallest_distance, winsorised
from ...maths.recheck import Recheck
from ...runtime.messages.records import Reply
from .source import (
    NO_FUSION,
    FPFCState,
    HoldOut,
    Matrix,
    PenaltySource,
    Replies,
    RoundStart,
    Rows,
    Task,
)
from .types import ERROR

# docs/methods/fpfc-notes.md has the evidence for these, and those beside the stages.
PROBE_FACTOR = 5
REFIT_ROUNDS = 5
FUSION_ROUNDS = 30  # at the end of a run
MARGIN = 0.6  # of the distance of two groups: as with rho = 0.8 and more

_COUNTS = (
    *("rounds", "last_round", "refits", "rechecks", "rechecked"),
    *("fused_from", "fused_until", "chosen"),
)
_RESULT = ("lam", "lam_inside", "smallest_distance", "lam_needed")
"""The variables of `Search` that are numbers: whole ones, and others."""


@dataclass
class Search:
    """The variables of the search.

    Attributes
    ----------
    block : Block
        omega_i.
    hold_out : HoldOut
    consensus_rounds : int
        C.
    in_rounds : bool
        Whether FPFC's own rounds take in several replies, so that a group can move by their mean.
    rounds : int
        Rounds in this stage: with a usable reply, or, of the probes, begun.
    last_round : int
        The last round of the search, once it is over.
    lam : float
        lambda, from then on.
    center : ndarray of shape (d,)
        The mean that all clients set out from; empty in the consensus.
    probes : dict of int to ndarray of shape (d,)
        Where they came to; kept until the last re-check of the groups.
    local : dict of int to ndarray of shape (d,)
        Where they came to from their group's model, in a re-check.
    rechecks, rechecked : int
        How often groups were looked at again; the round of the last time.
    comparison : Recheck or None
        What the re-check compares, made of the rest.
    optimism : dict of int to float
        What clients without held-out data said of their training losses.
    refits : int
        How often the groups' models were trained since.
    candidates : Candidates
        The groupings that are tried, with their groups' models.
    unplaced : set of int
        Clients that took no part in the search and have not trained since.
    groups : dict of int to int
        The settled group of every client that has one: what the search chose, and what became of it
        since. Members of a group that is trained together have equal omega_i.
    fused_from, fused_until : int
        The round before the first of FPFC's own; the last one, where they were given up.
    losses : dict of int to ndarray of shape (2,)
        The training losses that a client reported first and last in FPFC's own rounds.
    lam_inside : float
        lambda of the pairs inside a group, from then on: large enough to hold it.
    moved : set of int
        Clients whose omega_i has moved with their group since they uploaded it.
    scores : dict of int to ndarray of shape (3 + K, K)
        Losses, gradient norms and training losses of the clients at their groups' models; the
        standard errors of the losses' differences.
    table : ndarray of shape (3, K)
        Of every grouping: number of groups, mean loss, the vote against it.
    chosen : int
        The grouping that was chosen.
    smallest_distance, lam_needed : float
        See `FoundGroups`.
    """

    block: Block
    hold_out: HoldOut
    consensus_rounds: int
    in_rounds: bool
    rounds: int = 0
    last_round: int = 0
    lam: float = 0.0
    center: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    probes: dict[int, NDArray[Any]] = field(default_factory=dict)
    optimism: dict[int, float] = field(default_factory=dict)
    refits: int = 0
    candidates: Candidates = field(default_factory=Candidates)
    local: dict[int, NDArray[Any]] = field(default_factory=dict)
    rechecks: int = 0
    rechecked: int = 0
    comparison: Recheck | None = None
    unplaced: set[int] = field(default_factory=set)
    groups: dict[int, int] = field(default_factory=dict)
    fused_from: int = 0
    fused_until: int = 0
    losses: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    lam_inside: float = 0.0
    moved: set[int] = field(default_factory=set)
    scores: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    table: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 0)))
    chosen: int = 0
    smallest_distance: float = 0.0
    lam_needed: float = 0.0

    def groups_of(self, client_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the groups of clients; -1 for one that has none yet."""
        return np.array([self.groups.get(client, -1) for client in client_ids], np.int64)

    def weights(self, clients: ClientTable) -> NDArray[np.float64]:
        """Return how much every client counts in its group: n_i over the group's mean."""
        examples, groups = counted_examples(clients), self.groups_of(clients.ids)
        weights = np.ones(len(groups))
        for group in np.unique(groups[(groups >= 0) & (examples > 0)]):
            rows = (groups == group) & (examples > 0)
            weights[rows] = examples[rows] / examples[rows].mean()
        return weights

    def group_models(
        self, state: FPFCState, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.intp], Labels, NDArray[Any]]:
        """Return the rows of clients that have a group, their groups, and the groups' models."""
        groups = self.groups_of(state.clients.ids)
        rows = np.flatnonzero(groups >= 0)
        labels = numbered(groups[rows])
        return rows, labels, cluster_models(state.pairs.omega[rows], weights[rows], labels)

    def renew_lambda(self, state: FPFCState) -> None:
        """Set lambda by the models of the present groups, and what it takes to hold them.

        By the gradients that the clients reported with their scores, which fall as models get
        better.
        """
        weights = self.weights(state.clients)
        rows, labels, models = self.group_models(state, weights)
        scores = [self.scores.get(client) for client in state.clients.ids]
        norms = np.array([np.nan if of is None else of[1, self.chosen] for of in scores])
        needed = holding_lambda(labels, (weights * norms)[rows])
        self.lam = lambda_between(smallest_distance(models), needed, state.pairs.rho)
        self.lam_inside = max(2 * needed, self.lam)

    def remove(self, client: int) -> None:
        """Forget a client; a group that loses its last one is out of every count."""
        for rows, *_ in self._by_client.values():
            rows.pop(client, None)
        self.unplaced.discard(client)
        self.moved.discard(client)
        self.comparison = None

    @property
    def _by_client(self) -> dict[str, tuple[dict[int, Any], tuple[int, ...], Any]]:
        """What is kept by client, with the shape and the dtype of an entry."""
        d, dtype, tried = self.block.size, self.block.dtype, self.table.shape[1]
        return {
            "probe": (self.probes, (d,), dtype),
            "local": (self.local, (d,), dtype),
            "optimism": (self.optimism, (), np.float64),
            "label": (self.candidates.labels, (len(self.candidates),), np.int64),
            "group": (self.groups, (), np.int64),
            "loss": (self.losses, (2,), np.float64),
            "score": (self.scores, (3 + tried, tried), np.float64),
        }

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables as plain arrays."""
        arrays = {
            "counts": np.array([getattr(self, name) for name in _COUNTS]),
            "result": np.array([getattr(self, name) for name in _RESULT]),
            "unplaced": np.array(sorted(self.unplaced), np.uint64),
            "moved": np.array(sorted(self.moved), np.uint64),
            "center": self.center.astype(self.block.dtype),
            "table": self.table,
            **{f"models.{k}": models for k, models in enumerate(self.candidates.models)},
        }
        for name, (rows, shape, dtype) in self._by_client.items():
            arrays[f"{name}_ids"] = np.array(list(rows), np.uint64)
            arrays[f"{name}_rows"] = np.array(list(rows.values()), dtype).reshape(len(rows), *shape)
        return arrays

    def loaded(self, arrays: Mapping[str, NDArray[Any]]) -> Search:
        """Return a search of the same run with what `state_arrays` returned.

        Raises
        ------
        ValueError
            If the arrays do not fit together, or this model.
        """
        d, dtype = self.block.size, self.block.dtype
        count = sum(name.startswith("models.") for name in arrays)
        spec = dict.fromkeys([f"models.{k}" for k in range(count)], ((-1, d), dtype))
        check_saved(arrays, spec | {"center": ((-1,), dtype), "table": ((3, -1), np.dtype("f8"))})
        found = Search(self.block, self.hold_out, self.consensus_rounds, self.in_rounds)
        found.center, found.table = np.array(arrays["center"]), np.array(arrays["table"])
        found.candidates.models = [np.array(arrays[name]) for name in spec]
        if len(found.center) not in (0, d):
            raise ValueError("the center of the search is of another model")
        own = spec_of(found.state_arrays())
        lists = {n: own[n] for n in own if n.endswith(("_ids", "_rows", "unplaced", "moved"))}
        check_saved(arrays, own | any_length(lists))
        for names, values in ((_COUNTS, arrays["counts"]), (_RESULT, arrays["result"])):
            for name, value in zip(names, values.tolist(), strict=True):
                setattr(found, name, value)
        for name, (rows, _, _) in found._by_client.items():
            saved = np.array(arrays[f"{name}_rows"])
            rows |= dict(zip(arrays[f"{name}_ids"].tolist(), saved, strict=True))
        found.unplaced, found.moved = (set(arrays[name].tolist()) for name in ("unplaced", "moved"))
        return found


Next: TypeAlias = "type[Stage] | None"
"""The stage that follows; None: the present one goes on."""


class Stage:
    """A stage of a run without a lambda, and the interface of all."""

    is_search: ClassVar[bool] = True
    """Whether the groups are not settled yet."""

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Return the stage that a round begins with, if it is another one."""
        return None

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Return what clients are asked."""
        raise NotImplementedError

    def upload_spec(self, search: Search) -> Spec | None:
        """Return what an upload holds; None: the client's model."""
        return None

    def take_models(self, search: Search, state: FPFCState, rows: Rows, omega: Matrix) -> None:
        """Take in the new omega_i of a round; see `PenaltySource`."""
        PenaltySource.take_models(state.source, state, rows, omega)

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Take in the replies of a round; return the next stage if this one is over."""
        raise NotImplementedError


class Everybody(Stage):
    """A stage that sends models to all connected clients, whoever was sampled."""

    epochs_factor: ClassVar[int] = 1
    """Local epochs of the stage, in those that are usual; with 0 clients only measure."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Further fields of the clients' `FPFCInstruction`."""

    def asked(self, search: Search, start: RoundStart) -> list[int]:
        """Return which clients are asked: by default those that have a place in the groupings."""
        return [client for client in start.connected if client in search.candidates.labels]

    def models(self, search: Search, start: RoundStart, client: int) -> list[NDArray[Any]]:
        """Return what a client is sent: by default its group's model under every grouping."""
        return search.candidates.models_of(client)

    def num_uploads(self, search: Search) -> int:
        """Return how many models a client uploads."""
        return len(search.candidates) if self.epochs_factor else 0

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask clients to train or measure their models, without a pull."""
        client_ids, tasks = self.asked(search, start), {}
        held_out = search.hold_out.settings(client_ids)
        for client in client_ids:
            models = self.models(search, start, client)
            further: Arrays = {}  # the first one is in the anchor
            for k, model in enumerate(models[1:], start=1):
                further |= prefixed(f"{k}/", search.block.arrays(model))
            settings = {"candidates": len(models), "more": further or None, **self.settings}
            tasks[client] = Task(
                models[0], None, 0.0, self.epochs_factor, {**held_out[client], **settings}
            )
        return tasks

    def upload_spec(self, search: Search) -> Spec:
        """Return the names, shapes and dtypes of the block of every model that is trained."""
        return {
            f"{k}/{name}": spec
            for k in range(self.num_uploads(search))
            for name, spec in search.block.spec.items()
        }

    def uploads(self, search: Search, reply: Reply) -> NDArray[Any]:
        """Return the models of an upload, shape (number, d)."""
        count = self.num_uploads(search)
        return np.stack([search.block.vector(under(f"{k}/", reply.arrays)) for k in range(count)])


def counted_examples(clients: ClientTable) -> NDArray[np.float64]:
    """Return n_i, the largest winsorised, since the clients report them; 0 if never heard of."""
    examples = clients.column("num_examples").astype(np.float64)
    known = np.where(examples > 0, examples, np.nan)
    return np.fmin(examples, winsorised(known))


def lambda_between(b: float, needed: float, rho: float) -> float:
    """Return lambda for groups whose models are b or more apart.

    b/a: SCAD is flat beyond a lambda, so that no two groups pull on each other. With a small rho
    less: (6) pulls at full strength up to lambda + lambda/rho, which is to be well below b. With
    one group (b is NaN) twice what holding it takes.
    """
    return min(b / NO_FUSION.a, MARGIN * b / (1 + 1 / rho)) if np.isfinite(b) else 2 * needed


def reported(reply: Reply, name: str, count: int) -> NDArray[np.float64]:
    """Return what a client says of every model; NaN where it says nothing, or nothing finite."""
    values = np.array([reply.metrics.get(f"{name}-{k}", np.nan) for k in range(count)])
    return np.where(np.isfinite(values), values, np.nan)


def loss_errors(reply: Reply, name: str, count: int) -> NDArray[np.float64]:
    """Return the standard errors of a client's differences of loss; NaN where it says nothing."""
    errors = np.zeros((count, count))
    for j, k in combinations(range(count), 2):
        errors[j, k] = errors[k, j] = reply.metrics.get(f"{name}-{ERROR}-{j}-{k}", np.nan)
    return errors
