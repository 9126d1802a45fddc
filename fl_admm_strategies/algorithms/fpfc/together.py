"""The stages after the groups were found: each trains one model, and then FPFC's own rounds.

Clients that come meanwhile say which group suits them.
"""

from __future__ import annotations

from collections import Counter
from logging import INFO

import numpy as np
from flwr.common import log

from ...maths.blocks import Arrays, prefixed
from ...maths.clustering import cluster_models
from ...maths.pairs import Groups, PairwiseStore
from .source import FPFCState, Matrix, Replies, RoundStart, Rows, Task, fusion_tasks, scad
from .stages import FUSION_ROUNDS, PROBE_FACTOR, Next, Search, Stage, reported
from .types import HELD_OUT_LOSS

TRIAL, WORSE = 5, 1.4  # of own rounds; how many times as large losses may become in them
RENEWAL = 20  # rounds from one lambda to the next
OPTIONS = 8  # groups that a client chooses among which comes after the search


class Together(Stage):
    """Every settled group trains one model, by FedAvg: until FPFC's own rounds, the last ones.

    To the end where those were given up. All pairs are plain meanwhile,
    theta_ij = omega_i - omega_j and v_ij = 0.
    """

    is_search = False

    def begin_round(self, search: Search, start: RoundStart) -> Next:
        """Go on with FPFC's own rounds where few are left, or the user has set a penalty.

        Few are `FUSION_ROUNDS`, in a short run as many as there were since the search.
        """
        rounds_since = start.round - search.last_round
        is_early = start.rounds_left > min(FUSION_ROUNDS, rounds_since) or search.fused_until > 0
        if is_early and start.state.source.replacement is None:
            return None
        search.fused_from = start.round - 1
        log(INFO, "round %s: the groups' models are trained; FPFC's own rounds begin", start.round)
        return Fusion

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients to train their group's model."""
        tasks = newcomer_tasks(search, start)
        for client in start.sampled:
            if client in search.groups:
                tasks[client] = Task(start.state.pairs.omega[start.members.row(client)], None, 0.0)
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
    With a penalty that the user has set the rounds are the paper's. Otherwise they are given up
    where from the round `TRIAL` on the clients' training losses are more than `WORSE` times those
    of their first of these rounds, in the median: where clients take few steps, of a network, the
    duals may swing so far that the models part.
    """

    is_search = False

    def tasks(self, search: Search, start: RoundStart) -> dict[int, Task]:
        """Ask the sampled clients for (5)."""
        state, old = start.state, [c for c in start.sampled if c in search.groups]
        tasks, weights = fusion_tasks(start._replace(sampled=old)), search.weights(state.clients)
        most = max(state.pairs.rho, 0.5 / start.lr)  # descent by a larger pull may diverge
        for client, task in tasks.items() if state.source.replacement is None else ():
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
            search.in_rounds and replaced is None,
        )
        state.pairs.penalty = state.source.penalty
        moved = {ids[row] for row in state.pairs.update(rows, omega)}
        search.moved = (search.moved | moved) - {ids[row] for row in rows}

    def take(self, search: Search, server_round: int, state: FPFCState, replies: Replies) -> Next:
        """Place clients that trained for the first time; renew lambda every `RENEWAL` rounds."""
        place_newcomers(search, state, replies)
        for client, reply in replies.items():
            loss = reply.metrics.get("loss", np.nan)
            search.losses.setdefault(client, np.array([loss, np.nan]))[1] = loss
        num_rounds = server_round - search.fused_from
        can_end = search.in_rounds and state.source.replacement is None and num_rounds >= TRIAL
        ratios = [last / first for first, last in search.losses.values() if abs(last - first) > 0]
        if can_end and np.median(ratios or [0.0]) > WORSE:
            _give_up(search, server_round, state)
            return Together
        if num_rounds % RENEWAL == 0:
            search.renew_lambda(state)
        return None


def _give_up(search: Search, server_round: int, state: FPFCState) -> None:
    """Let every group have one model again, the mean of its members', and no pairs."""
    log(INFO, "round %s: FPFC's own rounds raise the losses; the groups train on", server_round)
    search.fused_until = server_round
    rows, labels, models = search.group_models(state, search.weights(state.clients))
    omega = state.pairs.omega.copy()
    omega[rows] = models[list(labels)]
    state.pairs = PairwiseStore(omega, state.source.penalty, state.pairs.rho)


def newcomer_tasks(search: Search, start: RoundStart) -> dict[int, Task]:
    """Let sampled clients without a group probe on their own, and say which group suits them.

    Each measures what it comes to, and the models of the `OPTIONS` largest groups, on samples that
    it holds out.
    """
    new = [client for client in start.sampled if client not in search.groups]
    if not new:
        return {}
    groups, omega = search.groups_of(start.members.ids), start.state.pairs.omega
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
