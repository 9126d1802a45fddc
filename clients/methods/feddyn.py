"""The client of FedDyn; the strategy and the paper are in `fl_admm_strategies.FedDyn`."""

from __future__ import annotations

import torch

from fl_admm_strategies import FedDyn
from fl_admm_strategies.algorithms.feddyn import FedDynInstruction
from fl_admm_strategies.maths.blocks import under

from ..toolkit.round.torch_client import TorchClient, to_numpy, to_tensors
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars

GRADIENT = "gradient/"
"""Prefix of grad_i in the client's memory."""


class FedDynClient(TorchClient[FedDynInstruction]):
    """Client of `FedDyn`: E epochs from theta on its regularised loss. It keeps grad_i.

    Parameters are those of `TorchClient`.
    """

    strategy = FedDyn
    instruction = FedDynInstruction

    def steps(self, asked: FedDynInstruction, config: Scalars) -> MethodSteps:
        """Descend on f_i(x) - <grad_i, x> + alpha/2 ||x - theta||^2; upload the change of theta.

        Both terms are alpha/2 ||x - (theta + grad_i/alpha)||^2 but for a constant.
        """
        self.load(asked.anchor)
        theta, alpha = self.block(asked.optimised), asked.alpha
        kept = {} if asked.begins else self.memory.require(config)
        held = to_tensors(under(GRADIENT, kept), self.device)
        grad = held or {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        anchor = {name: theta[name] + grad[name] / alpha for name in theta}
        objective = LocalObjective([ProximalTerm(alpha, anchor)])
        metrics = yield Minimisation(objective, asked.lr, asked.local_epochs)
        new = self.block(asked.optimised)
        change = {name: new[name] - theta[name] for name in theta}
        moved, share = self.clipped(to_numpy(change), {}, config)
        grad = {name: grad[name] - share * alpha * change[name] for name in theta}
        upload, held_back = self.whole_change(moved, config, first=asked.begins)
        self.memory.keep(config, held_back | to_numpy(grad, GRADIENT))
        return self.arrays() | upload, metrics
