"""The stages of the re-check: whether the settled groups are right, and what takes their place.

Two rounds, of everybody. What is compared and how it is decided is in `maths.recheck`;
docs/methods/fpfc-notes.md, "The re-check", has the evidence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from logging import INFO
from typing import Any, ClassVar

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.candidates import Candidates
from ...maths.clienttable import ClientTable
from ...maths.grouping import numbered
from ...maths.pairs import PairwiseStore
from ...maths.recheck import HALF, HELD_OUT, JOIN, STAY, Recheck
from .source import FPFCState, Replies, RoundStart
from .stages import (
    FUSION_ROUNDS,
    PROBE_FACTOR,
    Everybody,
    Next,
    Search,
    counted_examples,
    loss_errors,
    reported,
)
from .together import Together
from .types import HELD_OUT_LOSS, TRAINING_LOSS

RECHECKS = 3  # at most
RECHECK_AFTER = 10  # rounds of training together


def is_due(search: Search, server_round: int) -> bool:
    """Return whether the groups are to be looked at again; only once where there are no rounds."""
    again = search.in_rounds and server_round - search.rechecked >= RECHECK_AFTER
    return search.rechecks == 0 or (search.rechecks < RECHECKS and again)


class Reprobe(Everybody):
    """Every client goes from its group's model on its own, as far as in the first probe."""

    epochs_factor = PROBE_FACTOR
    is_search = False

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Take the present groups; nothing is done where they are about to be fused, or none is."""
        ids = [c for c in start.members.ids if c in search.groups and c in search.probes]
        if not ids or (search.rechecks and start.rounds_left <= FUSION_ROUNDS):
            _end(search)
            return Together
        labels = numbered([search.groups[client] for client in ids])
        omega = start.state.pairs.omega[[start.members.row(client) for client in ids]]
        search.candidates = Candidates(ids, [labels], omega)
        return None

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Keep where clients came to; the others have no say."""
        search.local = {client: self.uploads(search, reply)[0] for client, reply in replies.items()}
        search.comparison = None
        return Judge


class Judge(Everybody):
    """Every client compares models of which it made none, and the groups are set anew."""

    epochs_factor = 0
    is_search = False
    settings: ClassVar = {"in_full": True}

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Go on with the groups as they are where nobody has anything to compare."""
        if self.asked(search, start):
            return None
        _end(search)
        return Together

    def asked(self, search: Search, start: RoundStart) -> list[int]:
        """Return the clients that have something to compare."""
        ballot = _comparison(search, start.state.clients).ballot
        return [client for client in start.connected if client in search.local and ballot(client)]

    def models(self, search: Search, start: RoundStart, client: int) -> list[NDArray[Any]]:
        """Return what a client compares."""
        ballot = _comparison(search, start.state.clients).ballot(client)
        return [model.astype(search.block.dtype) for _, model in ballot]

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Set groups by those who replied; a new one sets out from the mean of its probes."""
        recheck = _comparison(search, state.clients)
        answers, now = _answers(recheck, list(search.local), replies)
        # Every look at the same samples is another chance to be wrong.
        answers[1] *= np.sqrt(1 + search.rechecks)
        new = recheck.decide(answers, now)
        search.rechecks, search.rechecked = search.rechecks + 1, server_round
        if np.array_equal(new, recheck.labels):
            _end(search)
        else:
            _regroup(search, state, recheck.labels, new)
            log(
                INFO,
                "round %s: the groups were looked at again, and are %s now",
                server_round,
                len(set(search.groups.values())),
            )
        search.local, search.comparison = {}, None
        return Together


def _end(search: Search) -> None:
    """Let this be the last re-check; what it went by is not needed any more."""
    search.rechecks, search.probes = RECHECKS, {}


def _comparison(search: Search, clients: ClientTable) -> Recheck:
    """Return what clients compare, which is made once for all of them."""
    if search.comparison is None:
        present = [search.candidates.labels[client][0] for client in search.local]
        known, labels = np.unique(present, return_inverse=True)
        models = search.candidates.models[0][known]
        examples = dict(zip(clients.ids, counted_examples(clients), strict=True))
        counts = np.array([examples[client] for client in search.local])
        search.comparison = Recheck(
            labels, models, search.local, search.center, search.probes, counts
        )
    return search.comparison


def _answers(
    recheck: Recheck, clients: Sequence[int], replies: Replies
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what `Recheck.decide` goes by, of what clients say of the models on their ballots."""
    answers = np.full((2, len(clients), JOIN + recheck.labels.max() + 1), np.nan)
    now = np.full(len(clients), np.nan)
    for row, client in enumerate(clients):
        ballot, base = recheck.ballot(client), 0
        if (reply := replies.get(client)) is None or not ballot:
            continue
        said = {
            name: (reported(reply, name, len(ballot)), loss_errors(reply, name, len(ballot)))
            for name in (HELD_OUT_LOSS, TRAINING_LOSS)
        }
        now[row] = said[TRAINING_LOSS][0][0]
        for k, (choice, _) in enumerate(ballot):
            base = k if choice == STAY else base
            own_is_among = recheck.is_lone[row] if choice == HALF else recheck.is_alone[row]
            which = {choice: HELD_OUT_LOSS if own_is_among else TRAINING_LOSS}
            which |= {HELD_OUT: HELD_OUT_LOSS} if choice == HALF else {}
            for column, name in which.items() if choice != STAY else ():
                losses, errors = said[name]
                answers[:, row, column] = losses[base] - losses[k], errors[base, k]
    return answers, now


def _regroup(search: Search, state: FPFCState, before: NDArray[Any], new: NDArray[Any]) -> None:
    """Set groups and omega_i; who had no say goes where most of its group go."""
    ids, old_omega = list(search.local), state.pairs.omega
    rows = {client: row for row, client in enumerate(state.clients.ids)}
    names = {label: search.groups[c] for c, label in zip(ids, before.tolist(), strict=True)}
    models = {search.groups[client]: old_omega[rows[client]] for client in ids}
    first = max(search.groups.values()) + 1
    for label in set(new.tolist()) - names.keys():
        members = [search.local[c] for c, to in zip(ids, new, strict=True) if to == label]
        names[label] = first + label
        models[first + label] = np.mean(members, axis=0)
    moved = {client: names[label] for client, label in zip(ids, new.tolist(), strict=True)}
    follow: dict[int, Counter[int]] = defaultdict(Counter)
    for client, group in moved.items():
        follow[search.groups[client]][group] += 1
    omega = old_omega.copy()
    for client, group in search.groups.items():
        if group in follow:
            to = moved.get(client, follow[group].most_common(1)[0][0])
            if to != group:
                omega[rows[client]], search.groups[client] = models[to], to
    state.pairs = PairwiseStore(omega, state.source.penalty, state.pairs.rho)
