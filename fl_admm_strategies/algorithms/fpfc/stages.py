"""The stages of the search for groups: what each asks of clients, and what their replies change.

The stages themselves keep nothing: what one leaves to the next is in the `Search`. When one is over
it names the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from logging import INFO, WARNING
from typing import Any, ClassVar, TypeAlias

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, Block, Spec, prefixed, under
from ...maths.candidates import OPTIONS, Candidates
from ...maths.checks import listing
from ...maths.clienttable import ClientTable
from ...maths.clustering import cluster_models
from ...maths.grouping import (
    candidate_groups,
    compare,
    corrected,
    holding_lambda,
    numbered,
    smallest_distance,
    winsorised,
)
from ...maths.pairs import Groups, PairwiseStore
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
    fusion_tasks,
    scad,
)

# docs/methods/fpfc-notes.md has the evidence for these.
PROBE_FACTOR = 5
PROBE_ROUNDS = 3  # at most: who did not reply is asked again
REFIT_ROUNDS = 5
VOTERS = 40  # of more clients these choose a grouping, by models that are not refitted
FOLDS = 4
CUTS = 3
STANDARD_ERRORS = 1.5
FUSION_ROUNDS = 30  # at the end of a run
RENEWAL = 20  # rounds from one lambda to the next
MARGIN = 0.6  # of the distance of two groups: as with rho = 0.8 and more

HELD_OUT_LOSS, TRAINING_LOSS, GRADIENT_NORM = "held-out-loss", "training-loss", "gradient-norm"
"""What clients report in the stage of the scores, each followed by ``-K`` for candidate K."""

ERROR = "error"
"""With the name of a loss before it and ``-J-K`` behind: the standard error of the difference of
two of them."""

OPTIMISM, NO_VOTE = "optimism", "held-out-none"
"""What a client that holds nothing out reports with its probe: how much too low its training loss
is; or, having one sample, that it cannot say, and so has no say in the choice."""


@dataclass
class Search:
    """The variables of the search.

    Attributes
    ----------
    block : Block
        omega_i.
    hold_out : HoldOut
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
    optimism : dict of int to ndarray of shape (1,)
        What clients without held-out data said of their training losses.
    candidates : Candidates
        The groupings that are tried, with their groups' models.
    unplaced : set of int
        Clients that took no part in the search and have not trained since.
    groups : dict of int to int
        The settled group of every client that has one: what the search chose, and what became of it
        since. Members of a group that is trained together have equal omega_i.
    fused_from : int
        The round before the first of FPFC's own.
    lam_inside : float
        lambda of the pairs inside a group, from then on: large enough to hold it.
    moved : set of int
        Clients whose omega_i has moved with their group since they uploaded it.
    scores : dict of int to ndarray of shape (2 + K, K)
        Losses and gradient norms of the clients at their groups' models; the standard errors of the
        losses' differences.
    table : ndarray of shape (3, K)
        Of every grouping: number of groups, mean loss, the vote against it.
    chosen : int
        The grouping that was chosen.
    smallest_distance, lam_needed : float
        See `FoundGroups`.
    """

    block: Block
    hold_out: HoldOut
    rounds: int = 0
    last_round: int = 0
    lam: float = 0.0
    center: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    probes: dict[int, NDArray[Any]] = field(default_factory=dict)
    optimism: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    candidates: Candidates = field(default_factory=Candidates)
    local: dict[int, NDArray[Any]] = field(default_factory=dict)
    rechecks: int = 0
    rechecked: int = 0
    comparison: Recheck | None = None
    unplaced: set[int] = field(default_factory=set)
    groups: dict[int, int] = field(default_factory=dict)
    fused_from: int = 0
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

    def renew_lambda(self, state: FPFCState) -> None:
        """Set lambda by the models of the present groups, and what it takes to hold them.

        By the gradients that the clients reported with their scores, which fall as models get
        better.
        """
        ids, groups = state.clients.ids, self.groups_of(state.clients.ids)
        has_one, weights = groups >= 0, self.weights(state.clients)
        labels = numbered(groups[has_one])
        models = cluster_models(state.pairs.omega[has_one], weights[has_one], labels)
        scores = [self.scores.get(client) for client in ids]
        norms = np.array([np.nan if of is None else of[1, self.chosen] for of in scores])
        needed = holding_lambda(labels, (weights * norms)[has_one])
        self.lam = lambda_between(smallest_distance(models), needed, state.pairs.rho)
        self.lam_inside = max(2 * needed, self.lam)


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


class Consensus(Stage):
    """All clients train one model: every anchor is the mean of the omega_i, without pairs.

    Parameters
    ----------
    num_rounds : int
        C.
    """

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients for (5) with the mean for zeta_i.

        Of many clients most have not seen omega^0, so a new one starts at the mean, without a pull.
        """
        held_out = search.hold_out.settings(start.sampled)
        mean, members = start.pairs.omega.mean(axis=0), start.members
        new = {c for c in start.sampled if len(members) > VOTERS and members.is_new(c)}
        others = start._replace(sampled=[c for c in start.sampled if c not in new])
        tasks = fusion_tasks(others, anchors=lambda rows: [mean] * len(rows))
        tasks |= {client: Task(mean, None, 0.0) for client in new}
        return {client: replace(task, settings=held_out[client]) for client, task in tasks.items()}

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Count the rounds; after the last, the mean of the omega_i is where all set out."""
        search.rounds += 1
        if search.rounds < self.num_rounds:
            return None
        search.center = state.pairs.omega.mean(axis=0)
        return Probe


class Everybody(Stage):
    """A stage that sends models to all connected clients, whoever was sampled."""

    epochs_factor: ClassVar[int] = 1
    """Local epochs of the stage, in those that are usual; with 0 clients only measure."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Further fields of the clients' `FPFCInstruction`."""

    def asked(self, search: Search, connected: Sequence[int]) -> list[int]:
        """Return which clients are asked: by default those that have a place in the groupings."""
        return [client for client in connected if client in search.candidates.labels]

    def models(self, search: Search, client: int) -> list[NDArray[Any]]:
        """Return what a client is sent: by default its group's model under every grouping."""
        return search.candidates.models_of(client)

    def num_uploads(self, search: Search) -> int:
        """Return how many models a client uploads."""
        return len(search.candidates) if self.epochs_factor else 0

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Go back to the probes where all that had a place have left."""
        if search.candidates.labels:
            return None
        search.center = start.pairs.omega.mean(axis=0)
        return Probe

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask clients to train or measure their models, without a pull."""
        client_ids, tasks = self.asked(search, start.connected), {}
        held_out = search.hold_out.settings(client_ids)
        for client in client_ids:
            models = self.models(search, client)
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

    def refit(self, search: Search, replies: Replies) -> dict[int, NDArray[Any]]:
        """Set every group's model to the mean of its clients'; return what each of them made."""
        places = search.candidates.labels
        trained = {c: self.uploads(search, reply) for c, reply in replies.items() if c in places}
        search.candidates.refit(trained)
        return trained


class Probe(Everybody):
    """Every client goes from the mean on its own, for `PROBE_FACTOR` times its usual epochs.

    The directions in which they go give groupings that are worth a trial (`candidate_groups`).
    """

    epochs_factor = PROBE_FACTOR
    settings: ClassVar = {"folds": FOLDS}

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Form groups once all probes are in, or were asked for often enough.

        Not when replies come: of the last ones that are missing none may ever.
        """
        missing = self.asked(search, start.connected)
        if not search.probes or (missing and search.rounds < PROBE_ROUNDS):
            search.rounds += 1
            return None
        if missing:
            log(
                WARNING,
                "clients %s did not reply in %s rounds; they take no part in the search for "
                "groups, and join afterwards as new clients do",
                listing(missing),
                PROBE_ROUNDS,
            )
        client_ids = sorted(search.probes)
        probes = np.stack([search.probes[client] for client in client_ids])
        are_many = len(client_ids) > VOTERS
        groupings = candidate_groups(probes - search.center, CUTS, settle=are_many)
        search.candidates = Candidates(client_ids, groupings, probes)
        log(
            INFO,
            "%s groupings of the clients are tried, of %s groups",
            len(groupings),
            ", ".join(str(max(labels) + 1) for labels in groupings),
        )
        if are_many:
            return Score
        return Trial if search.candidates.open_to_change else Refit

    def asked(self, search: Search, connected: Sequence[int]) -> list[int]:
        """Return the clients whose probes are missing."""
        return [client for client in connected if client not in search.probes]

    def models(self, search: Search, client: int) -> list[NDArray[Any]]:
        """Return the mean that all set out from."""
        return [search.center]

    def num_uploads(self, search: Search) -> int:
        """Return 1."""
        return 1

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Keep where clients came to."""
        for client, reply in replies.items():
            search.probes[client] = self.uploads(search, reply)[0]
            if np.isfinite(optimism := reply.metrics.get(OPTIMISM, np.nan)):
                search.optimism[client] = np.array([optimism], np.float64)
        if all(NO_VOTE in reply.metrics for reply in replies.values()):
            raise RuntimeError(
                "No client has two training samples, so nobody can say which groups suit it. Give "
                "the clients more samples or a validation_loader, or FPFC a penalty instead of "
                "'auto'."
            )
        return None


class Trial(Everybody):
    """The groups' models of all groupings are trained for a round, each by its own clients."""

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Take in what clients made of their groups' models, and keep it for the choice."""
        search.candidates.uploads = self.refit(search, replies)
        return Join


class Refit(Everybody):
    """The groups' models are trained from the probes again, for `REFIT_ROUNDS`."""

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Take in what clients made of their groups' models."""
        self.refit(search, replies)
        search.rounds += 1
        return Score if search.rounds >= REFIT_ROUNDS else None


class Join(Everybody):
    """In every grouping each client joins the group whose model suits it best.

    That is the model, as the others made it, of the least loss on the samples that the client
    trains on. Then all groups' models begin anew from the probes.
    """

    epochs_factor = 0
    settings: ClassVar = {"choosing": True}

    def models(self, search: Search, client: int) -> list[NDArray[Any]]:
        """Return the models of the groups that a client chooses among."""
        return search.candidates.models_without(client)

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Let every client join the group whose model has the least loss."""
        candidates = search.candidates
        moved = candidates.join(
            {
                client: reported(reply, TRAINING_LOSS, len(candidates.options(client)))
                for client, reply in replies.items()
                if client in candidates.labels
            },
            search.probes,
        )
        log(
            INFO,
            "round %s: %s client%s joined another group in one grouping or more",
            server_round,
            moved,
            "" if moved == 1 else "s",
        )
        return Refit


class Score(Everybody):
    """Every client measures its groups' models, and one grouping is taken.

    On data that it has held out so far, or on its training data, with a correction (`corrected`).
    The grouping with the fewest groups is taken to which no finer one is clearly preferred; see
    `compare`.
    """

    epochs_factor = 0

    def asked(self, search: Search, connected: Sequence[int]) -> list[int]:
        """Return who is to vote, drawn by the clients' seeds where they are many."""
        clients = super().asked(search, connected)
        if len(clients) <= VOTERS:
            return clients
        seeds = search.hold_out.seeds(clients)
        return sorted(search.candidates.voters(sorted(clients, key=seeds.__getitem__), VOTERS))

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Choose by those who replied, set lambda, and let the pairs start from the groups."""
        self._record(search, replies)
        labels = np.stack(list(search.candidates.labels.values()))
        num_groups = np.array([len(np.unique(column)) for column in labels.T])
        count = len(search.candidates)
        unknown = np.full((2 + count, count), np.nan)
        scores = np.stack([search.scores.get(c, unknown) for c in search.candidates.labels])
        voted = ~np.isnan(scores[:, 0]).all(axis=1)
        found = compare(scores[voted, 0], scores[voted, 2:], labels[voted], STANDARD_ERRORS)
        groups = labels[:, found.chosen]
        b = smallest_distance(search.candidates.models[found.chosen][np.unique(groups)])
        needed = holding_lambda(numbered(groups), scores[:, 1, found.chosen])
        search.table = np.stack([num_groups, found.means, found.against])
        search.chosen, search.smallest_distance, search.lam_needed = found.chosen, b, needed
        search.lam = lambda_between(b, needed, state.pairs.rho)
        search.last_round = server_round
        search.groups = {c: int(of[found.chosen]) for c, of in search.candidates.labels.items()}
        log(
            INFO,
            "round %s: %s group%s found",
            server_round,
            num_groups[found.chosen],
            "" if num_groups[found.chosen] == 1 else "s",
        )
        # theta_ij = omega_i - omega_j, v_ij = 0: every pair is plain.
        start = self._start_of(search, state.clients.ids)
        state.pairs = PairwiseStore(start, scad(search.lam), state.pairs.rho)
        return Together

    def _record(self, search: Search, replies: Mapping[int, Reply]) -> None:
        """Keep the losses and gradient norms that clients report."""
        labels = search.candidates.labels
        columns = np.stack(list(labels.values())).T
        sizes = np.stack([np.bincount(column)[column] for column in columns], axis=1)
        for place, client in enumerate(labels):
            if (reply := replies.get(client)) is None:
                continue
            held_out, training, norms = (
                reported(reply, name, len(columns))
                for name in (HELD_OUT_LOSS, TRAINING_LOSS, GRADIENT_NORM)
            )
            errors = loss_errors(reply, HELD_OUT_LOSS, len(columns))
            if client in search.optimism:
                optimism = float(search.optimism[client][0])
                held_out = corrected(training, optimism, sizes[place], reply.num_examples)
            search.scores[client] = np.vstack([held_out, norms, errors])

    def _start_of(self, search: Search, client_ids: Sequence[int]) -> NDArray[Any]:
        """Return the omega_i that FPFC starts from: alpha_l, or the mean of the consensus."""
        candidates = search.candidates
        search.unplaced = {client for client in client_ids if client not in candidates.labels}
        return np.stack(
            [
                search.center if c in search.unplaced else candidates.models_of(c)[search.chosen]
                for c in client_ids
            ]
        )


class Together(Stage):
    """Every settled group trains one model, by FedAvg: until FPFC's own rounds, the last ones.

    All pairs are plain meanwhile, theta_ij = omega_i - omega_j and v_ij = 0.
    """

    is_search = False

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Go on with FPFC's own rounds where few are left, or the user has set a penalty."""
        if start.rounds_left > FUSION_ROUNDS and start.source.replacement is None:
            return None
        search.fused_from = start.round - 1
        log(INFO, "round %s: the groups' models are trained; FPFC's own rounds begin", start.round)
        return Fusion

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients to train their group's model."""
        tasks = newcomer_tasks(search, start)
        for client in start.sampled:
            if client in search.groups:
                tasks[client] = Task(start.pairs.omega[start.members.row(client)], None, 0.0)
        return tasks

    def take_models(self, search: Search, state: FPFCState, rows: Rows, omega: Matrix) -> None:
        """Set every group's model to the mean of its members', weighted by their examples."""
        groups, weights = search.groups_of(state.clients.ids), search.weights(state.clients)[rows]
        state.pairs.place(rows, omega)
        trained, labels = np.unique(groups[rows], return_inverse=True)
        for group, alpha in zip(trained, cluster_models(omega, weights, labels), strict=True):
            if group >= 0:
                state.pairs.place(np.flatnonzero(groups == group), alpha)

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Place clients that trained for the first time."""
        place_newcomers(search, state, replies)
        return None


class Fusion(Stage):
    """FPFC's own rounds, from the groups' models: the groups are held, and move together.

    Clients count by their examples, as in the rounds before: the pull of client i is rho over its
    weight w_i in its group, which is (5) of w_i f_i. Where all have as many this is (1) itself.
    With a penalty that the user has set the rounds are the paper's.

    Parameters
    ----------
    move : bool
        Whether members that sat out move with the others of their group.
    """

    is_search = False

    def __init__(self, move: bool) -> None:
        self.move = move

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients for (5)."""
        old = [client for client in start.sampled if client in search.groups]
        tasks, weights = fusion_tasks(start._replace(sampled=old)), search.weights(start.clients)
        most = max(start.pairs.rho, 0.5 / start.lr)  # descent by a larger pull may diverge
        for client, task in tasks.items() if start.source.replacement is None else ():
            task.rho = min(task.rho / weights[start.members.row(client)], most)
        return newcomer_tasks(search, start) | tasks

    def take_models(self, search: Search, state: FPFCState, rows: Rows, omega: Matrix) -> None:
        """Update the pairs of all clients that have a group; see `Groups`."""
        ids, replaced = state.clients.ids, state.source.replacement
        if search.groups and not search.lam_inside:
            search.renew_lambda(state)
        state.pairs.groups = Groups(
            search.groups_of(ids),
            scad(search.lam_inside) if replaced is None else replaced,
            self.move and replaced is None,
        )
        state.pairs.penalty = state.source.penalty
        moved = {ids[row] for row in state.pairs.update(rows, omega)}
        search.moved = (search.moved | moved) - {ids[row] for row in rows}

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Place clients that trained for the first time; renew lambda every `RENEWAL` rounds."""
        place_newcomers(search, state, replies)
        if (server_round - search.fused_from) % RENEWAL == 0:
            search.renew_lambda(state)
        return None


def counted_examples(clients: ClientTable) -> NDArray[np.float64]:
    """Return n_i, the largest winsorised, since the clients report them; 0 if never heard of."""
    examples = clients.column("num_examples").astype(np.float64)
    known = np.where(examples > 0, examples, np.nan)
    return np.fmin(examples, winsorised(known))


def newcomer_tasks(search: Search, start: RoundStart) -> dict[int, Task]:
    """Let sampled clients without a group probe on their own, and say which group suits them.

    Each measures what it comes to, and the models of the `OPTIONS` largest groups, on samples that
    it holds out.
    """
    new = [client for client in start.sampled if client not in search.groups]
    if not new:
        return {}
    groups, omega = search.groups_of(start.members.ids), start.pairs.omega
    more: Arrays = {}
    for label, count in Counter(search.groups.values()).most_common(OPTIONS):
        if count > 1:
            more |= prefixed(f"{label}/", search.block.arrays(omega[groups == label].mean(axis=0)))
    known = groups >= 0
    mean = omega[known if known.any() else slice(None)].mean(axis=0)
    held_out = search.hold_out.settings(new)
    return {
        client: Task(mean, mean, 0.0, PROBE_FACTOR, {**held_out[client], "more": more or None})
        for client in new
    }


def place_newcomers(search: Search, state: FPFCState, replies: Replies) -> None:
    """Place clients that trained for the first time in the group that suits them, or alone."""
    search.unplaced -= replies.keys()
    ids = state.clients.ids
    for client in sorted(replies.keys() - search.groups.keys()):
        labels = set(search.groups.values())
        best = max(labels, default=-1) + 1  # of its own
        losses = reported(replies[client], HELD_OUT_LOSS, best)
        losses[[label not in labels for label in range(best)]] = np.nan
        alone = replies[client].metrics.get(HELD_OUT_LOSS, -np.inf)
        if (losses < alone).any():
            best = int(np.nanargmin(losses))
            model = state.pairs.omega[search.groups_of(ids) == best].mean(axis=0)
            state.pairs.place([ids.index(client)], model)
            search.moved.add(client)
        search.groups[client] = best


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
