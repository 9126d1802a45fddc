"""The clients of pFedMe; the strategies and the papers are in `PFedMe` and `PFedMeMatched`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fl_admm_strategies import PFedMe, PFedMeMatched
from fl_admm_strategies.algorithms.pfedme import PFedMeInstruction

from ..toolkit.round.own_model import OwnModelClient
from ..toolkit.round.proximal import ProximalClient
from ..toolkit.round.torch_client import to_numpy
from ..toolkit.solving.objective import LocalObjective, ProximalTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars

Block = Mapping[str, Tensor]


def moved(w: Block, theta: Block, rate: float) -> dict[str, Tensor]:
    """Return w - rate (w - theta): a step along the gradient lambda (w - theta) of F_i at w."""
    return {name: tensor - rate * (tensor - theta[name]) for name, tensor in w.items()}


class PFedMeClient(OwnModelClient[PFedMeInstruction]):
    """Client of `PFedMe`: R times K steps of theta_i near w_i, then one of w_i; it keeps theta_i.

    Parameters are those of `TorchClient`.
    """

    strategy = PFedMe
    instruction = PFedMeInstruction

    def steps(self, asked: PFedMeInstruction, config: Scalars) -> MethodSteps:
        """Run theta <- theta - eta_in [grad f(theta) + lambda (theta - w_i)] K times on one batch.

        Then w_i <- w_i - eta lambda (w_i - theta); all that R times. Uploads w_i.
        """
        self.load(asked.model)
        names, batches = self.trained_names(), self.draws()
        w = self.block(names)
        for _ in range(asked.local_rounds):
            objective = LocalObjective([ProximalTerm(asked.lam, w)])
            metrics = yield Minimisation(objective, asked.lr, asked.inner_steps, next(batches))
            w = moved(w, self.block(names), asked.outer_lr * asked.lam)
        theta = self.arrays()
        self.memory.keep(config, theta)
        return theta | to_numpy(w), metrics


class PFedMeMatchedClient(ProximalClient):
    """Client of `PFedMeMatched`: H epochs of theta_i near w.

    Parameters are those of `TorchClient`.
    """

    strategy = PFedMeMatched
