"""The stages in which the groups are found: consensus, probe, refit, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.candidates import Candidates
from ...maths.checks import listing
from ...maths.grouping import (
    candidate_groups,
    compare,
    corrected,
    holding_lambda,
    numbered,
    smallest_distance,
)
from ...maths.pairs import PairwiseStore
from ...runtime.messages.records import Reply
from .source import FPFCState, Replies, RoundStart, Task, fusion_tasks, scad
from .stages import (
    FUSION_ROUNDS,
    PROBE_FACTOR,
    REFIT_ROUNDS,
    Everybody,
    Next,
    Search,
    Stage,
    lambda_between,
    loss_errors,
    reported,
)
from .together import Together
from .types import GRADIENT_NORM, HELD_OUT_LOSS, NO_VOTE, OPTIMISM, TRAINING_LOSS

PROBE_ROUNDS = 3  # at most: who did not reply is asked again
LONGER, MOST_REFITS = 15, 50  # where everybody was better alone: from choice to choice; in all
VOTERS = 40  # of more clients these choose a grouping, by models that are not refitted
FOLDS = 4
CUTS = 3
STANDARD_ERRORS = 1.5


class Consensus(Stage):
    """All clients train one model: every anchor is the mean of the omega_i, without pairs."""

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients for (5) with the mean for zeta_i.

        Of many clients most have not seen omega^0, so a new one starts at the mean, without a pull.
        """
        held_out = search.hold_out.settings(start.sampled)
        mean, members = start.state.pairs.omega.mean(axis=0), start.members
        new = {c for c in start.sampled if len(members) > VOTERS and members.is_new(c)}
        others = start._replace(sampled=[c for c in start.sampled if c not in new])
        tasks = fusion_tasks(others) | {client: Task(mean, None, 0.0) for client in new}
        return {
            client: replace(task, anchor=mean, settings=held_out[client])
            for client, task in tasks.items()
        }

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Count the rounds; after the last, the mean of the omega_i is where all set out."""
        search.rounds += 1
        if search.rounds < search.consensus_rounds:
            return None
        search.center = state.pairs.omega.mean(axis=0)
        return Probe


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
        missing = self.asked(search, start)
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
        groupings = candidate_groups(probes - search.center, CUTS)
        search.candidates, search.refits = Candidates(client_ids, groupings, probes), 0
        log(
            INFO,
            "%s groupings of the clients are tried, of %s groups",
            len(groupings),
            ", ".join(str(max(labels) + 1) for labels in groupings),
        )
        return Score if len(client_ids) > VOTERS else Refit

    def asked(self, search: Search, start: RoundStart) -> list[int]:
        """Return the clients whose probes are missing."""
        return [client for client in start.connected if client not in search.probes]

    def models(self, search: Search, start: RoundStart, client: int) -> list[NDArray[Any]]:
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
                search.optimism[client] = float(optimism)
        if all(NO_VOTE in reply.metrics for reply in replies.values()):
            raise RuntimeError(
                "No client has two training samples, so nobody can say which groups suit it. Give "
                "the clients more samples or a validation_loader, or FPFC a penalty instead of "
                "'auto'."
            )
        return None


class Trying(Everybody):
    """A stage on the groupings that are tried."""

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Go back to the probes where all that had a place have left."""
        if search.candidates.labels:
            return None
        search.center = start.state.pairs.omega.mean(axis=0)
        return Probe


class Refit(Trying):
    """The groups' models are trained for `REFIT_ROUNDS`, each by its own clients.

    With few labels a client soon does well alone, and its group's model comes later. So where
    "everybody alone" was taken then, that and the best other grouping are trained on, by the
    clients that are sampled, and compared every `LONGER` rounds.
    """

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Let the next choice be the last one where the run is about to end."""
        if search.refits >= REFIT_ROUNDS and start.rounds_left <= FUSION_ROUNDS:
            search.refits = MOST_REFITS
            return Score
        return super().begin_round(search, start)

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask everybody at first; later who is sampled, if one of them has a place."""
        sampled = start._replace(connected=start.sampled)
        are_enough = search.refits >= REFIT_ROUNDS and self.asked(search, sampled)
        return super().tasks(search, sampled if are_enough else start)

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Set every group's model to the mean of what its clients made of it."""
        places = search.candidates.labels
        search.candidates.refit(
            {c: self.uploads(search, reply) for c, reply in replies.items() if c in places}
        )
        search.refits += 1
        is_over = search.refits >= REFIT_ROUNDS and (search.refits - REFIT_ROUNDS) % LONGER == 0
        return Score if is_over else None


class Score(Trying):
    """Every client measures its groups' models, and one grouping is taken.

    On data that it has held out so far, or on its training data, with a correction (`corrected`).
    The grouping with the fewest groups is taken to which no finer one is clearly preferred; see
    `compare`.
    """

    epochs_factor = 0

    def asked(self, search: Search, start: RoundStart) -> list[int]:
        """Return who is to vote, drawn by the clients' seeds where they are many."""
        clients = super().asked(search, start)
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
        unknown = np.full((3 + count, count), np.nan)
        scores = np.stack([search.scores.get(c, unknown) for c in search.candidates.labels])
        voted = ~np.isnan(scores[:, 0]).all(axis=1)
        losses, training, errors = scores[voted, 0], scores[voted, 2], scores[voted, 3:]
        found = compare(losses, errors, labels[voted], STANDARD_ERRORS, training)
        is_alone = 0 < found.chosen == count - 1
        if is_alone and 0 < search.refits < MOST_REFITS:
            coarser = losses[:, :-1], errors[:, :-1, :-1], labels[voted, :-1]
            best = compare(*coarser, STANDARD_ERRORS, training[:, :-1])
            search.candidates.keep([best.chosen, count - 1])
            search.scores = {}
            return Refit
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
                optimism, count = search.optimism[client], reply.num_examples
                held_out = corrected(training, optimism, sizes[place], count)
            search.scores[client] = np.vstack([held_out, norms, training, errors])

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
