"""The client of Ditto; the strategy and the paper are in `fl_admm_strategies.Ditto`."""

from __future__ import annotations

from fl_admm_strategies import Ditto
from fl_admm_strategies.algorithms.ditto import DittoInstruction
from fl_admm_strategies.maths.blocks import prefixed

from ..toolkit.round.own_model import OwnModelClient
from ..toolkit.round.torch_client import read_only
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class DittoClient(OwnModelClient[DittoInstruction]):
    """Client of `Ditto`: trains w on its data, then its own v_i, pulled towards the w it received.

    Parameters are those of `TorchClient`.
    """

    strategy = Ditto
    instruction = DittoInstruction

    def steps(self, asked: DittoInstruction, config: Scalars) -> MethodSteps:
        """Take the global step from w, then the personal one from v_i; upload w_i.

        v <- v - eta_p [grad f_i(v) + lambda (v - w)]. Metrics: those of the global step, and under
        names that begin with ``personal-`` those of the personal one.
        """
        self.load(asked.model)
        w = read_only({name: asked.model[name] for name in self.trained_names()}, self.device)
        metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        upload = self.arrays()
        self.load_own(asked.start, config)
        terms = [ProximalTerm(asked.lam, w)] if asked.lam else []
        personal = yield Minimisation(
            LocalObjective(terms), asked.personal_lr, asked.personal_epochs
        )
        self.memory.keep(config, self.arrays())
        return upload, metrics | prefixed("personal-", personal)
