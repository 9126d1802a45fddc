"""Whether a run makes progress: rounds without a usable reply, losses that rise or stand still."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from logging import WARNING
from statistics import median, median_low
from typing import Any

from flwr.common import log

from ..messages.records import Reply
from ..saving.state import is_finite

INITIAL_LOSS, LOSS = "initial-loss", "loss"
"""What a client reports: its training loss before its first step, once, and that of a round."""

CONSTANT_LOSS = "constant-loss"
"""Reported beside the first: the loss of a constant prediction of the same samples."""

PATIENCE = 3
"""Rounds in a row without any usable reply after which a run has failed."""

# Relative rises above the loss at the start. Mini-batches alone move a mean loss by some percent.
_MARGIN = 0.1
_FAR = 9.0  # ten times the start: one such round is enough
_HIGH = 1.0  # twice the start: where the loss stays there for a window, nothing is learned
_WINDOW = 8  # the rounds of which losses are compared; the test below is exact to 1 % up to here

# Relative changes of the loss in a run that learns, and in one that stands still.
_FALLS = 0.003  # below the first round's: a plateau that is left later has .4 % in 9 rounds
_LEARNS = 0.05  # below the start or the first round's: more than the noise of small batches
_ABOVE = 0.01  # above the start, for larger steps than the model bears
_KNOWS = 0.05  # by which a constant is worse, at one client at least, of a trained model
_ROUNDS = 8  # rounds that are compared with their clients' first ones
_PULLED = 0.3  # a pull times the step sizes of a round, as in the defaults; stronger ones hold


def _rising(values: Sequence[float]) -> bool:
    """Return whether there is a rising trend: Mann and Kendall's test, one-sided, at 1 %.

    S is the number of pairs in rising order less that in falling order. Where the order is chance,
    its mean is 0 and its variance n (n - 1) (2 n + 5) / 18. Counted over all orders, 5 values must
    all rise (1 order of 120), 6, 7 and 8 must have S of 13, 17 and 20 at least: .8, .5 and .7 %.
    Fewer than 5 are never enough.
    """
    n = len(values)
    score = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    return score > 2.33 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def _rise(first: float, now: float) -> float:
    """Return a loss's rise above its start, relative to it; infinite where it is not finite."""
    return (now - first) / max(abs(first), 1e-12) if math.isfinite(now) else math.inf


class DivergenceMonitor:
    """Counts rounds with and without usable replies, and ends a run that cannot succeed.

    Parameters
    ----------
    algorithm : Algorithm
        Named, with its settings, in what is said.

    Attributes
    ----------
    ever_usable : bool
        Whether any reply of the run was usable.
    empty_rounds : int
        How many of the last rounds had none.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm, self._method = algorithm, type(algorithm).__name__
        steps = f"Give {self._method} smaller steps (lr)"
        self.advice = f"{steps}, or a stronger pull to the common model"
        self.reset()

    def reset(self) -> None:
        """Start a run."""
        self.ever_usable = False
        self.empty_rounds = 0
        self._starts: dict[int, float] = {}
        self._started_late: set[int] = set()
        self._least = -math.inf  # the median start in round 1
        self._version = 0
        self._rises = deque([0.0], _WINDOW)  # by round; the start is 0
        self._warned = False
        self._first_losses: dict[int, float] = {}  # of a client's first round
        self._knowledge = -math.inf  # by how much a constant prediction is worse initially, at most
        self._compared = 0  # rounds
        self._learns = False

    def watch(
        self, server_round: int, replies: Mapping[int, Reply], version: int, num_rounds: int = 0
    ) -> None:
        """Count a round with usable replies, and watch the losses of their clients.

        It warns, once, where the training loss keeps rising above that of the clients' start.

        A round's rise is the median, over its clients, of the loss's rise above the one that the
        client started from, relative to it: who takes part changes by round, and a single client
        decides nothing. It warns where a rise is above a tenth and the last rounds have a rising
        trend, or at once where the loss is ten times the start or not finite. A level is a sign
        only where it lasts: after large first steps, and where few clients take part, a loss may be
        above its start for rounds while the models learn. So it warns as well where the last eight
        rounds are all above the start, their median above twice the start, and have no falling
        trend: a loss that swings has no rising one.

        A client's start is its loss before its first step, not the result of its first round: with
        few labels a client is soon near 0 on its own, and its loss rises again when it has to agree
        with others. Who first takes part later starts from a model that others have trained, so its
        start counts as no less than the median of those in round 1. A resumed run knows only the
        starts of clients that are new to it.

        When clients join or leave, f is another function, and the watch starts anew. A start in
        round 1, at the run's initial model, still counts; a later one, at a model that suited other
        clients, does not.

        It also warns, once, of a run that stands still: in the first tenth of its rounds, and in
        eight at least, the loss was never lower than in the clients' first rounds, though the
        initial model predicts no better than a constant, and so is not the minimiser already.

        Parameters
        ----------
        server_round : int
        replies : mapping of int to Reply
            Their metrics ``initial-loss`` and ``constant-loss`` are taken out.
        version : int
            That of the membership.
        num_rounds : int
            Of the run; 0 where that is not known.

        """
        self.ever_usable, self.empty_rounds = True, 0
        if version != self._version:
            self._version = version
            self._rises.clear()
            for client in self._started_late:
                self._starts.pop(client, None)
        for client, reply in replies.items():
            first = reply.metrics.pop(INITIAL_LOSS, math.nan)
            constant = reply.metrics.pop(CONSTANT_LOSS, math.nan)
            if math.isfinite(first) and client not in self._starts:
                if math.isfinite(constant):
                    self._knowledge = max(self._knowledge, _rise(first, constant))
                self._starts[client] = max(first, self._least) if server_round > 1 else first
                self._started_late |= {client} if server_round > 1 else set()
        if server_round == 1 and self._starts:
            self._least = median_low(self._starts.values())
        losses = {c: reply.metrics[LOSS] for c, reply in replies.items() if LOSS in reply.metrics}
        known = [
            (_rise(first, losses[c]), losses[c], first)
            for c, first in self._starts.items()
            if c in losses
        ]
        if known and not self._warned:
            rise, now, first = median_low(known)
            self._rises.append(rise)
            text = f"the training loss is {now:.3g} at the median client"
            if not rise < _FAR or (rise > _MARGIN and _rising(self._rises)) or self._stays_high():
                text = f"{text}, which started from {first:.3g}: the run may diverge. {self.advice}"
            elif self._stands_still(losses, rise) and 10 * server_round >= num_rounds:
                text = f"{text}, as in the first rounds: nothing is learned. {self._way_out(rise)}"
            else:
                return
            self._warned = True
            log(WARNING, f"round {server_round}: {text}.")

    def _stands_still(self, losses: Mapping[int, float], rise: float) -> bool:
        """Return whether no round's loss was below its clients' first, of an untrained model."""
        firsts = self._first_losses
        changes = [_rise(firsts[c], loss) for c, loss in losses.items() if c in firsts]
        self._first_losses = {c: x for c, x in losses.items() if math.isfinite(x)} | firsts
        if changes:
            change, self._compared = median_low(changes), self._compared + 1
            if min(change, rise) < -_LEARNS or (change < -_FALLS and rise < _ABOVE):
                self._learns = True
        still = self._compared >= _ROUNDS and not self._learns
        return still and -math.inf < self._knowledge < _KNOWS

    def _way_out(self, rise: float) -> str:
        """Return which setting likely keeps a run from learning, and what to make of it."""
        numbers = {n: v for n, v in vars(self._algorithm).items() if isinstance(v, int | float)}
        steps = numbers.get("lr", 0.0) * numbers.get("local_epochs", 1)  # at least one an epoch
        strong = [n for n in ("rho", "lam", "mu") if numbers.get(n, 0.0) * steps >= _PULLED]
        way = "larger steps (lr) or more local epochs"
        if rise > _ABOVE:
            way = "smaller steps (lr)"
        elif strong:
            way = f"a weaker pull to the common model (a smaller {strong[0]})"
        return f"Give {self._method} {way}"

    def _stays_high(self) -> bool:
        rises = self._rises
        high = len(rises) == _WINDOW and min(rises) > _MARGIN and median(rises) > _HIGH
        return high and not _rising([-rise for rise in rises])

    def count_empty_round(self, last_refusal: str, *, hopeless: bool = False) -> None:
        """Count a round without a usable reply.

        Raise RuntimeError if no reply was ever usable, after `PATIENCE` such rounds, or at once
        where it is `hopeless` to wait.
        """
        self.empty_rounds += 1
        if not self.ever_usable and (hopeless or self.empty_rounds >= PATIENCE):
            first = "round" if self.empty_rounds == 1 else f"{self.empty_rounds} rounds"
            raise RuntimeError(
                f"No client could train in the first {first}, so the run ends. The last refusal: "
                f"{last_refusal}"
            )

    def check_end(self, server_round: int, last_refusal: str) -> None:
        """Raise RuntimeError if a run that comes to its end has no usable result."""
        if not self.ever_usable:
            raise RuntimeError(
                "The run ended without a single usable reply, so the model is still the initial "
                f"one. The last refusal: {last_refusal}"
            )
        if self.empty_rounds >= PATIENCE:
            raise RuntimeError(
                f"No reply was usable in the last {self.empty_rounds} rounds, so the model is that "
                f"of round {server_round - self.empty_rounds}. The last refusal: {last_refusal}"
            )

    def check_finite(self, state: Any, server_round: int) -> None:
        """Raise RuntimeError if the state of a round is not finite."""
        if not is_finite(state):
            raise RuntimeError(
                f"The model is not finite after round {server_round}: the run diverged. "
                f"{self.advice}, or look for clients with large uploads. Checkpoints of "
                "earlier rounds are whole."
            )
