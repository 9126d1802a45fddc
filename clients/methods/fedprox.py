"""The client of FedProx; the strategy and the paper are in `fl_admm_strategies.FedProx`."""

from __future__ import annotations

from fl_admm_strategies import FedProx
from fl_admm_strategies.algorithms.fedprox import FedProxInstruction

from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class FedProxClient(TorchClient[FedProxInstruction]):
    """Client of `FedProx`: E epochs from w, pulled back to it. It keeps nothing.

    Parameters are those of `TorchClient`.
    """

    strategy = FedProx
    instruction = FedProxInstruction

    def steps(self, asked: FedProxInstruction, config: Scalars) -> MethodSteps:
        """Run x <- x - eta [grad f_i(x) + mu (x - w)]; upload x."""
        self.load(asked.model)
        terms = [ProximalTerm(asked.mu, self.block(self.trained_names()))] if asked.mu else []
        metrics = yield Minimisation(LocalObjective(terms), asked.lr, asked.local_epochs)
        return self.arrays(), metrics
