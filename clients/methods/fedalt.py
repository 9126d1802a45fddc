"""The client of FedAlt; the strategy and the paper are in `fl_admm_strategies.FedAlt`."""

from __future__ import annotations

from fl_admm_strategies import FedAlt
from fl_admm_strategies.algorithms.fedalt import FedAltInstruction
from fl_admm_strategies.maths.blocks import prefixed

from ..toolkit.round.split_model import SplitClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class FedAltClient(SplitClient[FedAltInstruction]):
    """Client of `FedAlt`: trains its personal v_i, then the shared u at the new v_i.

    v_i never leaves the client, and its shapes may be this client's own. It starts from the values
    of the model that the client is given. Parameters are those of `TorchClient`.
    """

    strategy = FedAlt
    instruction = FedAltInstruction

    def steps(self, asked: FedAltInstruction, config: Scalars) -> MethodSteps:
        """Run v <- v - eta_v grad_v f_i(u, v), then u <- u - eta_u grad_u f_i(u, v); upload u.

        Metrics: those of the second, and under names that begin with ``personal-`` of the first.
        """
        self.load_split(asked.shared, asked.personal, config)
        personal, shared = self.trained_parts(asked.personal)
        metrics: Scalars = {}
        if personal:
            objective = LocalObjective(moving=personal)
            first = yield Minimisation(objective, asked.personal_lr, asked.personal_epochs)
            metrics = dict(prefixed("personal-", first))
        if shared:
            objective = LocalObjective(moving=shared)
            metrics |= yield Minimisation(objective, asked.lr, asked.local_epochs)
        self.memory.keep(config, self.kept(asked))
        return self.arrays(), metrics
