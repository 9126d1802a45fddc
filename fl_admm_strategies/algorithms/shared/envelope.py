"""What pFedMe and Lp-Proj share: clients that move a copy w_i of w along their envelopes.

A client alternates R times between K steps of its personal model theta_i, which w_i pulls, and one
step of w_i towards it; w becomes the mean of the participants' w_i. In the papers' code all clients
train in every round, and the sampled ones are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ...maths.checks import check_count, check_positive
from ...runtime.messages.records import Reply
from ...runtime.sampled import SampledSettings
from .everyone import EveryoneTrains


class EnvelopeSettings(SampledSettings, total=False):
    """The parameters of `EnvelopeStrategy` that have one default."""

    lam: float
    beta: float
    everyone_trains: bool


class EnvelopeStrategy(EveryoneTrains):
    """Base of pFedMe and Lp-Proj.

    Parameters
    ----------
    lr : float
        eta_in, the step size of theta_i.
    outer_lr : float
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
        The parameters of `SampledStrategy`.
    """

    def __init__(
        self,
        *,
        lr: float,
        outer_lr: float,
        local_rounds: int,
        inner_steps: int,
        lam: float = 15.0,
        beta: float = 1.0,
        everyone_trains: bool = True,
        **base: Unpack[SampledSettings],
    ) -> None:
        super().__init__(**base)
        check_positive("lam", lam)
        check_positive("lr", lr)
        check_positive("outer_lr", outer_lr)
        check_outer_step(lam, outer_lr)
        check_count("local_rounds", local_rounds, least=1)
        check_count("inner_steps", inner_steps, least=1)
        check_positive("beta", beta)
        self.lam = lam
        self.lr = lr
        self.outer_lr = outer_lr
        self.local_rounds = local_rounds
        self.inner_steps = inner_steps
        self.beta = beta
        self.everyone_trains = everyone_trains

    def mixed(self, w: NDArray[Any], mean: NDArray[Any]) -> NDArray[Any]:
        """Return (1 - beta) w + beta mean."""
        return np.asarray((1 - self.beta) * w + self.beta * mean, dtype=w.dtype)


def check_outer_step(lam: float, outer_lr: float) -> None:
    """Raise ValueError if w_i would overshoot theta_i by more than it was away from it."""
    if outer_lr * lam >= 2:
        raise ValueError(
            f"outer_lr * lam is {outer_lr * lam:g}, expected less than 2: w_i would end further "
            "from theta_i than it began. Give a smaller outer_lr."
        )


def averaged(replies: Mapping[int, Reply]) -> dict[int, Reply]:
    """Return the replies with an upload."""
    return {client: reply for client, reply in replies.items() if reply.arrays}
