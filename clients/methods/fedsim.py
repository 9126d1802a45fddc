"""The client of FedSim; the strategy and the paper are in `fl_admm_strategies.FedSim`."""

from __future__ import annotations

from typing import Any, ClassVar

from fl_admm_strategies import FedSim
from fl_admm_strategies.algorithms.shared.split import SplitInstruction

from ..toolkit.round.split_model import SplitClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class FedSimClient(SplitClient[SplitInstruction]):
    """Client of `FedSim`: trains its personal v_i and the shared u at once.

    v_i never leaves the client, and its shapes may be this client's own. It starts from the values
    of the model that the client is given. Parameters are those of `TorchClient`.
    """

    strategy: ClassVar[Any] = FedSim
    instruction = SplitInstruction

    def steps(self, asked: SplitInstruction, config: Scalars) -> MethodSteps:
        """Run (u, v) <- (u, v) - eta grad f_i(u, v), both gradients at one point; upload u."""
        self.load_split(asked.shared, asked.personal, config)
        metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        self.memory.keep(config, self.kept(asked))
        return self.arrays(), metrics
