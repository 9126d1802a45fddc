"""What pFedMe and Lp-Proj share: clients that move a copy w_i of w along their envelopes.

A client alternates R times between K steps of its personal model theta_i, which w_i pulls, and one
step of w_i towards it; w becomes the mean of the participants' w_i. In the papers' code all clients
train in every round, and the sampled ones are averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ...maths.blocks import Arrays, average
from ...maths.checks import Count, Positive
from ...maths.schedules import StepSize, rate_in
from ...runtime.messages.records import Reply
from .everyone import EveryoneTrains


class EnvelopeStrategy(EveryoneTrains):
    """Base of pFedMe and Lp-Proj.

    Parameters
    ----------
    lr : float or callable
        eta_in, the step size of theta_i.
    outer_lr : float or callable
        eta, the step size of w_i. ``outer_lr * lam`` below 2, or w_i diverges.
    local_rounds : int
        R, steps of w_i in a round.
    inner_steps : int
        K, steps of theta_i before each of these.
    lam : float (default: 15.0)
        lambda, how strongly theta_i is held near w_i.
    beta : float (default: 1.0)
        beta: w <- (1 - beta) w + beta mean w_i. It may exceed 1.
    everyone_trains : bool (default: True)
        All clients train in every round, as in the paper, and those of `fraction_train` are
        averaged: the others receive w, train theta_i and upload nothing. False: only those of
        `fraction_train` train, for less computation and older theta_i; w is the same.
    **base
        The parameters of `StatefulStrategy`.
    """

    lr: StepSize
    outer_lr: StepSize | None
    local_rounds: Count
    inner_steps: Count
    lam: Positive = 15.0
    beta: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer_step(self.lam, self.outer_lr, 1)

    def moved(self, before: Arrays, replies: Mapping[int, Reply], mixed: Collection[str]) -> Arrays:
        """Return the uploads' mean, and of the `mixed` arrays (1 - beta) w + beta mean."""
        uploads = {client: reply for client, reply in replies.items() if reply.arrays}
        if not uploads:
            return before
        mean, beta = average(before, uploads, np.ones(len(uploads))), self.beta
        for name in mixed:
            w = before[name]
            mean[name] = np.asarray((1 - beta) * w + beta * mean[name], dtype=w.dtype)
        return mean


def check_outer_step(lam: float, outer_lr: StepSize | None, server_round: int) -> None:
    """Raise ValueError if w_i would overshoot theta_i by more than it was away from it."""
    if outer_lr is None:  # it follows from lam
        return
    step = rate_in(server_round, outer_lr, "outer_lr") * lam
    if step >= 2:
        raise ValueError(
            f"outer_lr * lam is {step:g}, expected less than 2: w_i would end further from theta_i "
            "than it began. Give a smaller outer_lr."
        )
