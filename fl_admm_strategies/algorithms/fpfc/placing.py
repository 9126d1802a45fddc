"""Clients that come when the groups are found: which group suits them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...maths.blocks import Arrays, prefixed
from ...maths.candidates import OPTIONS
from .source import (
    FPFCState,
    Replies,
    RoundStart,
    Task,
)
from .stages import (
    HELD_OUT_LOSS,
    PROBE_FACTOR,
    Search,
    reported,
)


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
