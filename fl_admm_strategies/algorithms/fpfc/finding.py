"""The stages in which the groups are found: one model for all, probe, refit, choice."""

from __future__ import annotations

from collections.abc import Sequence
from logging import INFO, WARNING
from typing import ClassVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths import grouping
from ...maths.candidates import Candidates
from ...maths.checks import listing
from ...maths.pairs import PairwiseStore
from .messages import (
    GRADIENT_NORM,
    HELD_OUT_LOSS,
    NO_VOTE,
    OPTIMISM,
    TRAINING_LOSS,
    HoldOutInstruction,
    ProbeInstruction,
    ScoreInstruction,
)
from .search import (
    FUSION_ROUNDS,
    PROBE_FACTOR,
    REFIT_ROUNDS,
    Everybody,
    Next,
    Stage,
    lambda_between,
    loss_errors,
    reported,
)
from .source import Messages, Replies, Round, Vector, scad

PROBE_ROUNDS = 3  # at most: a client that did not reply is asked again
LONGER, MOST_REFITS = 15, 50  # where everybody was better alone: from choice to choice; in all
VOTERS = 40  # of more clients these choose a grouping, by models that are not refitted
FOLDS = 4
CUTS = 3
STANDARD_ERRORS = 1.5


class OneModel(Stage):
    """FedAvg: every anchor is the mean of the omega_i, and there are no pairs."""

    def messages(self, now: Round) -> Messages:
        """Ask the sampled clients for (5) with the mean for zeta_i.

        Of many clients most have not seen omega^0, so a new one starts at the mean, without a pull.
        """
        held_out, messages = self.fpfc.hold_out(now.sampled), {}
        pairs, members = self.fpfc.state.pairs, self.fpfc.membership
        mean, are_many = pairs.omega.mean(axis=0), len(members) > VOTERS
        for client in now.sampled:
            fields = held_out[client]
            if client not in members or (are_many and members.is_new(client)):
                messages[client] = now.alone(client, mean, HoldOutInstruction, **fields)
            else:
                messages[client] = now.pulled(client, mean, pairs.rho, HoldOutInstruction, **fields)
        return messages

    def take(self, server_round: int, replies: Replies) -> Next:
        """Count the rounds; after the last, the mean of the omega_i is where all set out."""
        self.found.rounds += 1
        if self.found.rounds < self.fpfc.consensus_rounds:
            return None
        self.found.center = self.fpfc.state.pairs.omega.mean(axis=0)
        return "Probe"


class Probe(Everybody):
    """Every client goes from the mean on its own, for `PROBE_FACTOR` times its usual epochs.

    The directions in which they go give groupings that are worth a trial (`candidate_groups`).
    """

    kind = ProbeInstruction
    epochs_factor = PROBE_FACTOR
    fields: ClassVar = {"folds": FOLDS}

    def begin_round(self, now: Round) -> Next:
        """Form groups once all probes are in, or were asked for often enough.

        Not when replies come: of the last ones that are missing none may ever.
        """
        found, missing = self.found, self.asked(now.connected)
        if not found.probes or (missing and found.rounds < PROBE_ROUNDS):
            found.rounds += 1
            return None
        if missing:
            log(
                WARNING,
                "clients %s did not reply in %s rounds; they take no part in the search for "
                "groups, and join afterwards as new clients do",
                listing(missing),
                PROBE_ROUNDS,
            )
        client_ids = sorted(found.probes)
        probes = np.stack([found.probes[client] for client in client_ids])
        groupings = grouping.candidate_groups(probes - found.center, CUTS)
        self.search.candidates, found.refits = Candidates(client_ids, groupings, probes), 0
        log(
            INFO,
            "%s groupings of the clients are tried, of %s groups",
            len(groupings),
            ", ".join(str(max(labels) + 1) for labels in groupings),
        )
        return "Choice" if len(client_ids) > VOTERS else "Refit"

    def asked(self, connected: Sequence[int]) -> list[int]:
        """Return the clients whose probes are missing."""
        return [client for client in connected if client not in self.found.probes]

    def models(self, client: int) -> list[Vector]:
        """Return the mean that all set out from."""
        return [self.found.center]

    def num_uploads(self) -> int:
        """Return 1."""
        return 1

    def take(self, server_round: int, replies: Replies) -> Next:
        """Keep where clients came to."""
        for client, reply in replies.items():
            (self.found.probes[client],) = self.uploads(reply)
            if np.isfinite(optimism := reply.metrics.get(OPTIMISM, np.nan)):
                self.found.optimism[client] = float(optimism)
        if all(NO_VOTE in reply.metrics for reply in replies.values()):
            raise RuntimeError(
                "No client has two training samples, so nobody can say which groups suit it. Give "
                "the clients more samples or a validation_loader, or FPFC a penalty instead of "
                "'auto'."
            )
        return None


class Trying(Everybody):
    """A stage on the groupings that are tried."""

    def begin_round(self, now: Round) -> Next:
        """Go back to the probes where all that had a place have left."""
        if self.search.candidates.labels:
            return None
        self.found.center = self.fpfc.state.pairs.omega.mean(axis=0)
        return "Probe"


class Refit(Trying):
    """The groups' models are trained for `REFIT_ROUNDS`, each by its own clients.

    With few labels a client soon does well alone, and its group's model comes later. So where
    "everybody alone" was taken then, that and the best other grouping are trained on, by the
    clients that are sampled, and compared every `LONGER` rounds.
    """

    def begin_round(self, now: Round) -> Next:
        """Let the next choice be the last one where the run is about to end."""
        if self.found.refits >= REFIT_ROUNDS and now.rounds_left <= FUSION_ROUNDS:
            self.found.refits = MOST_REFITS
            return "Choice"
        return super().begin_round(now)

    def messages(self, now: Round) -> Messages:
        """Ask everybody at first; later who is sampled, if one of them has a place."""
        if self.found.refits >= REFIT_ROUNDS and self.asked(now.sampled):
            now.connected = list(now.sampled)
        return super().messages(now)

    def take(self, server_round: int, replies: Replies) -> Next:
        """Set every group's model to the mean of what its clients made of it."""
        candidates = self.search.candidates
        placed = {c: reply for c, reply in replies.items() if c in candidates.labels}
        candidates.refit({c: np.stack(self.uploads(reply)) for c, reply in placed.items()})
        self.found.refits += 1
        longer = self.found.refits - REFIT_ROUNDS
        return "Choice" if longer >= 0 and longer % LONGER == 0 else None


class Choice(Trying):
    """Every client measures its groups' models, and one grouping is taken.

    On data that it has held out so far, or on its training data, with a correction (`corrected`).
    The grouping with the fewest groups is taken to which no finer one is clearly preferred; see
    `compare`.
    """

    kind = ScoreInstruction
    epochs_factor = 0

    def asked(self, connected: Sequence[int]) -> list[int]:
        """Return who is to vote, drawn by the clients' seeds where they are many."""
        clients = super().asked(connected)
        if len(clients) <= VOTERS:
            return clients
        seeds = self.fpfc.run.sampling.client_seeds(clients, 0)
        in_turn = sorted(clients, key=seeds.__getitem__)
        return sorted(self.search.candidates.voters(in_turn, VOTERS))

    def take(self, server_round: int, replies: Replies) -> Next:
        """Choose by those who replied, set lambda, and let the pairs start from the groups."""
        found, candidates, count = self.found, self.search.candidates, len(self.search.candidates)
        labels = np.stack(list(candidates.labels.values()))
        num_groups = np.array([len(np.unique(column)) for column in labels.T])
        scores = self._scores(labels, replies)
        voted = ~np.isnan(scores[:, 0]).all(axis=1)
        losses, training, errors = scores[voted, 0], scores[voted, 2], scores[voted, 3:]
        best = grouping.compare(losses, errors, labels[voted], STANDARD_ERRORS, training)
        is_alone = 0 < best.chosen == count - 1
        if is_alone and 0 < found.refits < MOST_REFITS:
            coarser = losses[:, :-1], errors[:, :-1, :-1], labels[voted, :-1]
            other = grouping.compare(*coarser, STANDARD_ERRORS, training[:, :-1])
            candidates.keep([other.chosen, count - 1])
            return "Refit"
        groups = labels[:, best.chosen]
        b = grouping.smallest_distance(candidates.models[best.chosen][np.unique(groups)])
        norms = scores[:, 1, best.chosen]
        needed = grouping.holding_lambda(grouping.numbered(groups), norms)
        rho = self.fpfc.state.pairs.rho
        found.table = np.stack([num_groups, best.means, best.against])
        found.chosen, found.smallest_distance, found.lam_needed = best.chosen, b, needed
        found.lam = lambda_between(b, needed, rho)
        found.last_round = server_round
        found.groups = dict(zip(candidates.labels, groups.tolist(), strict=True))
        found.norms = dict(zip(candidates.labels, norms.tolist(), strict=True))
        log(INFO, "round %s: groups found: %s", server_round, num_groups[best.chosen])
        # theta_ij = omega_i - omega_j, v_ij = 0: every pair is plain.
        self.fpfc.state.pairs = PairwiseStore(self._start(), scad(found.lam), rho)
        return "Reprobe"

    def _scores(self, labels: NDArray[np.int64], replies: Replies) -> NDArray[np.float64]:
        """Return what clients report, shape (clients, 3 + K, K).

        Losses, gradient norms, training losses, the standard errors of the losses' differences; NaN
        of a client that did not reply.
        """
        count = labels.shape[1]
        sizes = np.stack([np.bincount(column)[column] for column in labels.T], axis=1)
        scores = np.full((len(labels), 3 + count, count), np.nan)
        for place, client in enumerate(self.search.candidates.labels):
            if (reply := replies.get(client)) is None:
                continue
            held_out, training, norms = (
                reported(reply, name, count)
                for name in (HELD_OUT_LOSS, TRAINING_LOSS, GRADIENT_NORM)
            )
            errors = loss_errors(reply, HELD_OUT_LOSS, count)
            if client in self.found.optimism:
                optimism = self.found.optimism[client]
                held_out = grouping.corrected(training, optimism, sizes[place], reply.num_examples)
            scores[place] = np.vstack([held_out, norms, training, errors])
        return scores

    def _start(self) -> Vector:
        """Return the omega_i that groups start from: alpha_l, or the mean that all set out from."""
        candidates, chosen = self.search.candidates, self.found.chosen
        omega = np.tile(self.found.center, (len(self.fpfc.state.clients), 1))
        for row, client in enumerate(self.fpfc.state.clients.ids):
            if client in candidates.labels:
                omega[row] = candidates.models_of(client)[chosen]
        return omega
