"""The client of local training; the strategy is `fl_admm_strategies.Local`."""

from __future__ import annotations

from fl_admm_strategies import Local
from fl_admm_strategies.algorithms.local import LocalInstruction

from ..toolkit.round.own_model import OwnModelClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class LocalClient(OwnModelClient[LocalInstruction]):
    """Client of `Local`: some epochs on its own loss. Parameters are those of `TorchClient`."""

    strategy = Local
    instruction = LocalInstruction

    def steps(self, asked: LocalInstruction, config: Scalars) -> MethodSteps:
        """Descend on f_i from the client's own model; upload nothing."""
        self.load_own(asked.start, config)
        metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        self.memory.keep(config, self.arrays())
        return {}, metrics
