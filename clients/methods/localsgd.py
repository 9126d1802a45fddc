"""The client of LocalSGD; the strategy and the papers are in `fl_admm_strategies.LocalSGD`."""

from __future__ import annotations

import math
from typing import Any

from fl_admm_strategies import LocalSGD
from fl_admm_strategies.algorithms.localsgd import LocalSGDInstruction

from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class LocalSGDClient(TorchClient[LocalSGDInstruction]):
    """Client of `LocalSGD`: k0 steps from x, each smaller than the one before. It keeps nothing.

    Parameters are those of `TorchClient`, but for `scheduler_fn`: the strategy says how the step
    size falls. Every step has an optimizer of its own, so that momentum would do nothing.
    """

    strategy = LocalSGD
    instruction = LocalSGDInstruction
    closed_form = "the strategy says the size of every step"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse_own_steps(
            "LocalSGD says the size of every step", "use a method of epochs, such as FedProx"
        )

    def steps(self, asked: LocalSGDInstruction, config: Scalars) -> MethodSteps:
        """Run x <- x - a/log2(k + 1) grad f_i(x) for the k of this round; upload x."""
        self.load(asked.model)
        batches = self.draws()
        for k in range(asked.first_step, asked.first_step + asked.local_steps):
            lr = asked.lr / math.log2(k + 1)
            metrics = yield Minimisation(LocalObjective(), lr, 1, next(batches))
        return self.arrays(), metrics
