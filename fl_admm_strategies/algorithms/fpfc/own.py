"""The stages in which clients say whether a model of their own is better than their group's.

Two rounds, of all clients, in the middle of what the search has left of a run;
docs/methods/fpfc-notes.md, "The question", has the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import INFO

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.grouping import winsorised
from ...maths.pairs import PairwiseStore
from ...maths.recheck import score
from .messages import HELD_OUT_LOSS
from .recheck import Judge, Reprobe
from .search import Next, loss_errors, reported
from .source import Replies, Round, Vector

CLEARLY = 1.0
"""Standard errors that a group has to gain; any gain will do where all clients together do."""


class Own(Reprobe):
    """Every client goes from its group's model on its own, as far as in a probe."""

    def begin_round(self, now: Round) -> Next:
        """Take the present groups; they are not re-checked any more."""
        self.found.asked = now.number
        self.end()
        self.take_groups(list(self.found.groups))
        return None


class Ask(Judge):
    """Every client measures its own model and its group's on samples that neither has trained on.

    The group's model is both the one that they set out from, and the mean of what its members made
    of it, which is trained for as long as theirs. Where a group's members are better with their own
    models than with both, by the sum of what they report, each goes on alone from its own.
    """

    def recipients(self, connected: Sequence[int]) -> list[int]:
        """Return the clients that have a model of their own."""
        return [client for client in connected if client in self.found.local]

    def models(self, client: int) -> Sequence[Vector]:
        """Return the group's model before and after, and the client's own."""
        local, groups = self.found.local, self.found.groups
        after = np.mean([local[c] for c in local if groups[c] == groups[client]], axis=0)
        before = self.fpfc.state.pairs.omega[self.fpfc.membership.row(client)]
        return [before, after.astype(before.dtype), local[client]]

    def take(self, server_round: int, replies: Replies) -> Next:
        """Set clients apart whose own models are better."""
        groups, local, pairs = self.found.groups, self.found.local, self.fpfc.state.pairs
        losses = np.array([reported(reply, HELD_OUT_LOSS, 3) for reply in replies.values()])
        errors = np.array([loss_errors(reply, HELD_OUT_LOSS, 3) for reply in replies.values()])
        gains = [winsorised(losses[:, k] - losses[:, 2]) for k in (0, 1)]
        answers = np.stack([np.stack(gains, axis=1), errors[:, :2, 2]])
        labels, omega = self.search.groups_of(list(replies)), pairs.omega.copy()
        least = 0.0 if _gained(answers, labels >= 0) > CLEARLY else CLEARLY
        for group in np.unique(labels):
            if _gained(answers, labels == group) > least:
                for client in [client for client in local if groups[client] == group]:
                    omega[self.fpfc.membership.row(client)] = local[client]
                    groups[client] = max(groups.values()) + 1
        self.found.local = {}
        log(INFO, "round %s: clients that go on alone: %s", server_round, len(self.search.lone()))
        self.fpfc.state.pairs = PairwiseStore(omega, self.search.penalty, pairs.rho)
        return "Together"


def _gained(answers: NDArray[np.float64], rows: NDArray[np.bool_]) -> float:
    """Return what clients gain, in standard errors, in place of the better model of their group."""
    return min(score(answers, rows, k) for k in (0, 1))
