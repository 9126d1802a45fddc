"""The client of SCAFFOLD; the strategy and the paper are in `fl_admm_strategies.SCAFFOLD`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_admm_strategies import SCAFFOLD
from fl_admm_strategies.algorithms.scaffold import CONTROL, SCAFFOLDInstruction
from fl_admm_strategies.maths.blocks import under

from ..toolkit.round.torch_client import TorchClient, to_numpy, to_tensors
from ..toolkit.solving.objective import LinearTerm, LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class SCAFFOLDClient(TorchClient[SCAFFOLDInstruction]):
    """Client of `SCAFFOLD`: E epochs from x with corrected gradients. It keeps c_i.

    Parameters are those of `TorchClient`, but for what makes steps other than plain SGD's: c_i is
    read off how far the steps went.
    """

    strategy = SCAFFOLD
    instruction = SCAFFOLDInstruction
    closed_form = "its control variate is the mean of plain SGD's gradients"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuse_own_steps(
            "SCAFFOLD reads the mean gradient off plain SGD's steps", "use FedDyn or FedADMM"
        )

    def steps(self, asked: SCAFFOLDInstruction, config: Scalars) -> MethodSteps:
        """Run y <- y - lr [grad f_i(y) - c_i + c] from x; upload y, and the change of c_i."""
        self.load(asked.model)
        x, c = self.block(list(asked.control)), to_tensors(asked.control, self.device)
        kept = {} if asked.fresh else self.memory.require(config)
        c_i = under(CONTROL, kept) or {n: np.zeros_like(a) for n, a in asked.control.items()}
        own = to_tensors(c_i, self.device)
        term = LinearTerm(1.0, {name: c[name] - own[name] for name in c})
        objective = LocalObjective([term])
        metrics = yield Minimisation(objective, asked.lr, asked.local_epochs)
        y, length = self.block(list(c)), objective.steps * asked.lr
        change = {name: (x[name] - y[name]) / length - c[name] for name in c}  # option II of (4)
        upload = {name: array for name, array in self.arrays().items() if name in asked.model}
        upload = self.changed(upload | to_numpy(change, CONTROL), asked.model, config)
        self.memory.keep(config, {CONTROL + n: a + upload[CONTROL + n] for n, a in c_i.items()})
        return upload, metrics
