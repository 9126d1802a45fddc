"""The stages in which the groups are found: one model for all, probe, refit, choice."""

from __future__ import annotations

from collections.abc import Sequence
from logging import INFO, WARNING

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths import grouping
from ...maths.candidates import voters
from ...maths.checks import listing
from ...maths.pairs import PairwiseStore
from .messages import (
    GRADIENT_NORM,
    HELD_OUT_LOSS,
    TRAINING_LOSS,
    HoldOutInstruction,
    ScoreInstruction,
)
from .search import (
    FUSION_ROUNDS,
    PROBE_FACTOR,
    REFIT_ROUNDS,
    AllClients,
    Next,
    Stage,
    lambda_between,
    loss_errors,
    reported,
)
from .source import Messages, Replies, Round, Vector, scad

PROBE_ROUNDS = 3  # at most: a client without a reply gets the message again
LONGER, MOST_REFITS = 15, 50  # where clients were better alone: from choice to choice; in all
VOTERS = 40  # of more clients these choose a grouping, by models that are not refitted
CUTS = 3
STANDARD_ERRORS = 1.5


class OneModel(Stage):
    """FedAvg: every anchor is the mean of the omega_i, and there are no pairs."""

    def messages(self, now: Round) -> Messages:
        """Ask the sampled clients for (5) with the mean for zeta_i.

        Of many clients most have not seen omega^0, so a new one starts at the mean, without a pull.
        """
        pairs, members = self.fpfc.state.pairs, self.fpfc.membership
        mean, are_many = pairs.omega.mean(axis=0), len(members) > VOTERS
        zeta = {
            client: mean
            for client in now.sampled
            if client in members and not (are_many and members.is_new(client))
        }
        return now.fusion(now.sampled, zeta, HoldOutInstruction, self.fpfc.hold_out(now.sampled))

    def take(self, server_round: int, replies: Replies) -> Next:
        """Count the rounds; after the last, the mean of the omega_i is where all set out."""
        self.found.rounds += 1
        if self.found.rounds < self.fpfc.consensus_rounds:
            return None
        self.found.center = self.fpfc.state.pairs.omega.mean(axis=0)
        return "Probe"


class Probe(AllClients):
    """Every client goes from the mean on its own, for `PROBE_FACTOR` times its usual epochs.

    The directions in which they go give groupings that are worth a trial (`candidate_groups`).
    """

    epochs_factor = PROBE_FACTOR

    def begin_round(self, now: Round) -> Next:
        """Form groups once all probes are in, or were asked for often enough.

        Not when replies come: of the last ones that are missing none may ever.
        """
        found, missing = self.found, self.recipients(now.connected)
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
        found.try_groupings(client_ids, groupings, probes)
        found.refits = 0
        log(
            INFO,
            "%s groupings of the clients are tried, of %s groups",
            len(groupings),
            ", ".join(str(max(labels) + 1) for labels in groupings),
        )
        return "Choice" if len(client_ids) > VOTERS else "Refit"

    def recipients(self, connected: Sequence[int]) -> list[int]:
        """Return the clients whose probes are missing."""
        return [client for client in connected if client not in self.found.probes]

    def models(self, client: int) -> Sequence[Vector]:
        """Return the mean that all set out from."""
        return [self.found.center]

    def take(self, server_round: int, replies: Replies) -> Next:
        """Keep where clients came to."""
        for client, reply in replies.items():
            (self.found.probes[client],) = self.uploads(reply)
        return None


class Trying(AllClients):
    """A stage on the groupings that are tried."""

    def begin_round(self, now: Round) -> Next:
        """Go back to the probes where all clients that had a place have left."""
        if self.found.labels:
            return None
        self.found.center = self.fpfc.state.pairs.omega.mean(axis=0)
        return "Probe"


class Refit(Trying):
    """The groups' models are trained for `REFIT_ROUNDS`, each by its own clients.

    With few labels a client soon does well alone, and its group's model comes later. So where
    "every client alone" was taken then, that and the best other grouping are trained on, by the
    clients that are sampled, and compared every `LONGER` rounds.
    """

    def begin_round(self, now: Round) -> Next:
        """Let the next choice be the last one where the run is about to end."""
        if self.found.refits >= REFIT_ROUNDS and now.rounds_left <= FUSION_ROUNDS:
            self.found.refits = MOST_REFITS
            return "Choice"
        return super().begin_round(now)

    def messages(self, now: Round) -> Messages:
        """Ask all clients at first; later the sampled ones, if one of them has a place."""
        if self.found.refits >= REFIT_ROUNDS and self.recipients(now.sampled):
            now.connected = list(now.sampled)
        return super().messages(now)

    def take(self, server_round: int, replies: Replies) -> Next:
        """Refit the groups' models; compare them after some rounds."""
        found = self.found
        placed = {client: reply for client, reply in replies.items() if client in found.labels}
        found.refit({client: self.uploads(reply) for client, reply in placed.items()})
        found.refits += 1
        longer = found.refits - REFIT_ROUNDS
        return "Choice" if longer >= 0 and longer % LONGER == 0 else None


class Choice(Trying):
    """Every client measures its groups' models on held-out samples, and one grouping is taken.

    The grouping with the fewest groups is taken to which no finer one is clearly preferred; see
    `compare`.
    """

    kind = ScoreInstruction
    epochs_factor = 0

    def recipients(self, connected: Sequence[int]) -> list[int]:
        """Return the clients that vote, drawn by the clients' seeds where there are many."""
        clients = super().recipients(connected)
        if len(clients) <= VOTERS:
            return clients
        seeds = self.fpfc.run.sampling.client_seeds(clients, 0)
        in_turn = sorted(clients, key=seeds.__getitem__)
        return sorted(voters(self.found.labels, in_turn, VOTERS))

    def take(self, server_round: int, replies: Replies) -> Next:
        """Choose by the replies, set lambda, and let the pairs start from the groups."""
        found, labels = self.found, np.stack(list(self.found.labels.values()))
        count = labels.shape[1]
        num_groups = np.array([len(np.unique(column)) for column in labels.T])
        scores = self._scores(count, replies)
        voted = ~np.isnan(scores[:, 0]).all(axis=1)
        if not voted.any():
            raise RuntimeError(
                "No client has two training samples, so groups cannot be compared. Give the "
                "clients more samples or a validation_loader, or FPFC a penalty instead of 'auto'."
            )
        losses, training, errors = scores[voted, 0], scores[voted, 2], scores[voted, 3:]
        best = grouping.compare(losses, errors, labels[voted], STANDARD_ERRORS, training)
        is_alone = 0 < best.chosen == count - 1
        if is_alone and 0 < found.refits < MOST_REFITS:
            coarser = losses[:, :-1], errors[:, :-1, :-1], labels[voted, :-1]
            other = grouping.compare(*coarser, STANDARD_ERRORS, training[:, :-1])
            found.keep([other.chosen, count - 1])
            return "Refit"
        groups = labels[:, best.chosen]
        b = grouping.smallest_distance(found.models[np.unique(groups)])
        norms = scores[:, 1, best.chosen]
        needed = grouping.holding_lambda(grouping.numbered(groups), norms)
        pairs, clients = self.fpfc.state.pairs, self.fpfc.state.clients
        found.num_groups, found.losses, found.against = num_groups, best.means, best.against
        found.chosen, found.smallest_distance, found.lam_needed = best.chosen, b, needed
        found.lam = lambda_between(b, needed, pairs.rho)
        found.last_round = server_round
        found.groups = dict(zip(found.labels, groups.tolist(), strict=True))
        found.norms = dict(zip(found.labels, norms.tolist(), strict=True))
        log(INFO, "round %s: groups found: %s", server_round, num_groups[best.chosen])
        # theta_ij = omega_i - omega_j, v_ij = 0: every pair is plain.
        omega = [
            found.models[found.groups[c]] if c in found.groups else found.center
            for c in clients.ids
        ]
        self.fpfc.state.pairs = PairwiseStore(np.stack(omega), scad(found.lam), pairs.rho)
        return "Reprobe"

    def _scores(self, count: int, replies: Replies) -> NDArray[np.float64]:
        """Return what clients report of K groupings, shape (clients, 3 + K, K).

        Losses, gradient norms, training losses, the standard errors of the losses' differences; NaN
        of a client that did not reply.
        """
        scores = np.full((len(self.found.labels), 3 + count, count), np.nan)
        for place, client in enumerate(self.found.labels):
            if (reply := replies.get(client)) is not None:
                names = (HELD_OUT_LOSS, GRADIENT_NORM, TRAINING_LOSS)
                values = [reported(reply, name, count) for name in names]
                scores[place] = np.vstack([*values, loss_errors(reply, HELD_OUT_LOSS, count)])
        return scores
