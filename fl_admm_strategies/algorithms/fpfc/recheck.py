"""The stages of the re-check: whether the settled groups are right, and what takes their place.

Two rounds, of all clients. What is compared and how it is decided is in `maths.recheck`;
docs/methods/fpfc-notes.md, "The re-check", has the evidence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from logging import INFO

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.grouping import numbered
from ...maths.pairs import PairwiseStore
from ...maths.recheck import HALF, HELD_OUT, JOIN, STAY, Recheck
from .messages import HELD_OUT_LOSS, TRAINING_LOSS, RecheckInstruction
from .search import FUSION_ROUNDS, PROBE_FACTOR, AllClients, Next, loss_errors, reported
from .source import Replies, Round, Vector
from .together import RECHECKS


class Reprobe(AllClients):
    """Every client goes from its group's model on its own, as far as in the first probe."""

    epochs_factor = PROBE_FACTOR
    is_search = False

    def begin_round(self, now: Round) -> Next:
        """Take the present groups; skip the re-check without any, or where fusion is near."""
        found, members = self.found, self.fpfc.membership
        ids = [c for c in members.ids if c in found.groups and c in found.probes]
        if not ids or (found.rechecks and now.rounds_left <= FUSION_ROUNDS):
            self.end()
            return "Together"
        labels = numbered([found.groups[client] for client in ids])
        omega = self.fpfc.state.pairs.omega[[members.row(client) for client in ids]]
        found.try_groupings(ids, [labels], omega)
        return None

    def take(self, server_round: int, replies: Replies) -> Next:
        """Keep where clients came to; the others do not vote."""
        self.found.local = {client: self.uploads(reply)[0] for client, reply in replies.items()}
        return "Judge"

    def end(self) -> None:
        """Let this be the last re-check, and forget the probes, which no later stage needs."""
        self.found.rechecks, self.found.probes = RECHECKS, {}


class Judge(Reprobe):
    """Every client compares models of which it made none, and the groups are set anew."""

    kind = RecheckInstruction
    epochs_factor = 0

    def begin_round(self, now: Round) -> Next:
        """Go on with the groups as they are where no client has anything to compare."""
        if self.recipients(now.connected):
            return None
        self.end()
        return "Together"

    def recipients(self, connected: Sequence[int]) -> list[int]:
        """Return the clients that have something to compare."""
        ballot = self._comparison().ballot
        return [client for client in connected if client in self.found.local and ballot(client)]

    def models(self, client: int) -> Sequence[Vector]:
        """Return the models that a client compares."""
        dtype = self.fpfc.block.dtype
        return [model.astype(dtype) for _, model in self._comparison().ballot(client)]

    def take(self, server_round: int, replies: Replies) -> Next:
        """Set groups by the replies; a new one sets out from the mean of its probes."""
        recheck, found = self._comparison(), self.found
        answers, now = _answers(recheck, list(found.local), replies)
        # Each comparison on the same samples is another chance to be wrong.
        answers[1] *= np.sqrt(1 + found.rechecks)
        new = recheck.decide(answers, now)
        found.rechecks, found.rechecked = found.rechecks + 1, server_round
        if np.array_equal(new, recheck.labels):
            self.end()
        else:
            self._regroup(recheck.labels, new)
            count = len(set(found.groups.values()))
            log(INFO, "round %s: groups after the re-check: %s", server_round, count)
        found.local, self.search.comparison = {}, None
        return "Together"

    def _comparison(self) -> Recheck:
        """Return the comparison, which is made once for all clients."""
        search, local = self.search, self.found.local
        if search.comparison is None:
            present = [self.found.labels[client][0] for client in local]
            known, labels = np.unique(present, return_inverse=True)
            models = self.found.models[known]
            examples = dict(zip(self.fpfc.state.clients.ids, search.examples(), strict=True))
            counts = np.array([examples[client] for client in local])
            found = self.found
            search.comparison = Recheck(labels, models, local, found.center, found.probes, counts)
        return search.comparison

    def _regroup(self, before: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        """Set groups and omega_i; a client that did not vote goes where most of its group go."""
        state, groups, local = self.fpfc.state, self.found.groups, self.found.local
        omega = state.pairs.omega.copy()
        rows = {client: row for row, client in enumerate(state.clients.ids)}
        names = {label: groups[c] for c, label in zip(local, before.tolist(), strict=True)}
        models = {groups[client]: state.pairs.omega[rows[client]] for client in local}
        first = max(groups.values()) + 1
        for label in set(new.tolist()) - names.keys():
            members = [local[c] for c, to in zip(local, new, strict=True) if to == label]
            names[label] = first + label
            models[first + label] = np.mean(members, axis=0)
        moved = {client: names[label] for client, label in zip(local, new.tolist(), strict=True)}
        follow: dict[int, Counter[int]] = defaultdict(Counter)
        for client, group in moved.items():
            follow[groups[client]][group] += 1
        for client, group in groups.items():
            if group in follow:
                to = moved.get(client, follow[group].most_common(1)[0][0])
                if to != group:
                    omega[rows[client]], groups[client] = models[to], to
        state.pairs = PairwiseStore(omega, self.search.penalty, state.pairs.rho)


def _answers(
    recheck: Recheck, clients: Sequence[int], replies: Replies
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the arguments of `Recheck.decide` by the clients' metrics of their ballots' models."""
    answers = np.full((2, len(clients), JOIN + recheck.labels.max() + 1), np.nan)
    now = np.full(len(clients), np.nan)
    for row, client in enumerate(clients):
        ballot, base = recheck.ballot(client), 0
        if (reply := replies.get(client)) is None or not ballot:
            continue
        reports = {
            name: (reported(reply, name, len(ballot)), loss_errors(reply, name, len(ballot)))
            for name in (HELD_OUT_LOSS, TRAINING_LOSS)
        }
        now[row] = reports[TRAINING_LOSS][0][0]
        for k, (choice, _) in enumerate(ballot):
            if choice == STAY:
                base = k
                continue
            own_is_among = recheck.is_lone[row] if choice == HALF else recheck.is_alone[row]
            which = {choice: HELD_OUT_LOSS if own_is_among else TRAINING_LOSS}
            if choice == HALF:
                which[HELD_OUT] = HELD_OUT_LOSS
            for column, name in which.items():
                losses, errors = reports[name]
                answers[:, row, column] = losses[base] - losses[k], errors[base, k]
    return answers, now
