"""The stages after the groups were found: each trains one model, and then FPFC's own rounds.

Clients that come meanwhile join the group that suits them.
"""

from __future__ import annotations

from collections import Counter
from logging import INFO

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from ...maths.blocks import Arrays, prefixed
from ...maths.clustering import cluster_models
from ...maths.pairs import Groups, PairwiseStore
from .messages import HELD_OUT_LOSS, LateInstruction
from .search import FUSION_ROUNDS, PROBE_FACTOR, Next, Stage, reported
from .source import Messages, Replies, Round, Vector, scad

TRIAL, WORSE = 5, 1.4  # of own rounds; how many times as large losses may become in them
RENEWAL = 20  # rounds from one lambda to the next
OPTIONS = 8  # groups that a client chooses among which comes after the search
RECHECKS = 3  # at most
RECHECK_AFTER = 10  # rounds of training together


class Settled(Stage):
    """A stage with settled groups, to which clients may still come."""

    is_search = False

    def late_messages(self, now: Round) -> Messages:
        """Let sampled clients without a group train alone, and compare groups.

        Each measures what it comes to, and the models of the `OPTIONS` largest groups, on samples
        that it holds out.
        """
        late = [client for client in now.sampled if client not in self.found.groups]
        if not late:
            return {}
        groups = self.search.groups_of(self.fpfc.membership.ids)
        omega, models = self.fpfc.state.pairs.omega, Arrays()
        for label, count in Counter(self.found.groups.values()).most_common(OPTIONS):
            if count > 1:
                model = self.fpfc.block.arrays(omega[groups == label].mean(axis=0))
                models |= prefixed(f"{label}/", model)
        mean, held_out = self.fpfc.state.mean, self.fpfc.hold_out(late)
        return {
            client: now.alone(
                *(client, mean, LateInstruction, PROBE_FACTOR),
                groups=models or None,
                **held_out[client],
            )
            for client in late
        }

    def place_late(self, server_round: int, replies: Replies) -> None:
        """Place clients that trained for the first time in the group that suits them, or alone."""
        groups, pairs = self.found.groups, self.fpfc.state.pairs
        clients = self.fpfc.state.clients
        for client in sorted(replies.keys() - groups.keys()):
            labels = set(groups.values())
            best = max(labels, default=-1) + 1  # of its own
            losses = reported(replies[client], HELD_OUT_LOSS, best)
            losses[[label not in labels for label in range(best)]] = np.nan
            alone = replies[client].metrics.get(HELD_OUT_LOSS, -np.inf)
            if (losses < alone).any():
                best = int(np.nanargmin(losses))
                model = pairs.omega[self.search.groups_of(clients.ids) == best].mean(axis=0)
                pairs.place([clients.ids.index(client)], model)
                clients[client].moved_in = server_round
            groups[client] = best


class Together(Settled):
    """FedAvg in every settled group, until FPFC's own rounds, the last ones.

    To the end where those were given up. All pairs are plain meanwhile,
    theta_ij = omega_i - omega_j and v_ij = 0.
    """

    def begin_round(self, now: Round) -> Next:
        """Go on with FPFC's own rounds where few are left.

        Few are `FUSION_ROUNDS`, in a short run as many as there were since the search.
        """
        rounds_since = now.number - self.found.last_round
        if now.rounds_left > min(FUSION_ROUNDS, rounds_since) or self.found.fused_until > 0:
            return None
        self.found.fused_from = now.number - 1
        log(INFO, "round %s: the groups' models are trained; FPFC's own rounds begin", now.number)
        return "Fusion"

    def messages(self, now: Round) -> Messages:
        """Let the sampled clients train their group's model."""
        messages, omega = dict(self.late_messages(now)), self.fpfc.state.pairs.omega
        for client in now.sampled:
            if client in self.found.groups:
                messages[client] = now.alone(client, omega[self.fpfc.membership.row(client)])
        return messages

    def take_models(self, rows: list[int], omega: Vector) -> NDArray[np.intp]:
        """Set every group's model to the mean of its members', weighted by their examples."""
        pairs, weights = self.fpfc.state.pairs, self.search.weights()[rows]
        groups = self.search.groups_of(self.fpfc.state.clients.ids)
        pairs.place(rows, omega)
        trained, labels = np.unique(groups[rows], return_inverse=True)
        for group, alpha in zip(trained, cluster_models(omega, weights, labels), strict=True):
            if group >= 0:
                pairs.place(np.flatnonzero(groups == group), alpha)
        return np.flatnonzero(np.isin(groups, trained[trained >= 0]))

    def take(self, server_round: int, replies: Replies) -> Next:
        """Place clients that came late; compare the groups again after some rounds."""
        self.place_late(server_round, replies)
        is_due = self.fpfc.in_rounds and server_round - self.found.rechecked >= RECHECK_AFTER
        return "Reprobe" if is_due and self.found.rechecks < RECHECKS else None


class Fusion(Settled):
    """FPFC's own rounds, from the groups' models: the groups are held, and move together.

    Clients count by their examples, as in the rounds before: the pull of client i is rho over its
    weight w_i in its group, which is (5) of w_i f_i. Where all have as many this is (1) itself.
    The rounds are given up where from the round `TRIAL` on the clients' training losses are more
    than `WORSE` times those of their first of these rounds, in the median: where clients take few
    steps, of a network, the duals may swing so far that the models part.
    """

    def messages(self, now: Round) -> Messages:
        """Ask the sampled clients for (5)."""
        rho, members = self.fpfc.state.pairs.rho, self.fpfc.membership
        old = [client for client in now.sampled if client in self.found.groups]
        weights = self.search.weights()
        most = max(rho, 0.5 / now.lr)  # descent by a larger pull may diverge
        pulls = {client: min(rho / weights[members.row(client)], most) for client in old}
        return {**self.late_messages(now), **now.fusion(old, now.zeta(old), rho=pulls)}

    def take_models(self, rows: list[int], omega: Vector) -> NDArray[np.intp]:
        """Update the pairs of all clients that have a group; see `Groups`."""
        found, pairs, ids = self.found, self.fpfc.state.pairs, self.fpfc.state.clients.ids
        if found.groups and not found.lam_inside:
            self.search.renew_lambda()
        inside = scad(found.lam_inside)
        pairs.groups = Groups(self.search.groups_of(ids), inside, self.fpfc.in_rounds)
        pairs.penalty = self.search.penalty
        return pairs.update(rows, omega)

    def take(self, server_round: int, replies: Replies) -> Next:
        """Place clients that came late; renew lambda every `RENEWAL` rounds."""
        self.place_late(server_round, replies)
        losses, num_rounds = self.found.training_losses, server_round - self.found.fused_from
        for client, reply in replies.items():
            loss = reply.metrics.get("loss", np.nan)
            losses.setdefault(client, np.array([loss, np.nan]))[1] = loss
        ratios = [last / first for first, last in losses.values() if abs(last - first) > 0]
        is_tried = self.fpfc.in_rounds and num_rounds >= TRIAL
        if is_tried and np.median(ratios or [0.0]) > WORSE:
            self._give_up(server_round)
            return "Together"
        if num_rounds % RENEWAL == 0:
            self.search.renew_lambda()
        return None

    def _give_up(self, server_round: int) -> None:
        """Let every group have one model again, the mean of its members', and no pairs."""
        log(INFO, "round %s: FPFC's own rounds raise the losses; the groups train on", server_round)
        self.found.fused_until = server_round
        rows, labels, models = self.search.group_models(self.search.weights())
        state = self.fpfc.state
        omega = state.pairs.omega.copy()
        omega[rows] = models[list(labels)]
        state.pairs = PairwiseStore(omega, self.search.penalty, state.pairs.rho)
