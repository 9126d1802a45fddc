"""The clients of Lp-Proj; strategies and papers are in `LpProj` and, by ADMM, `LpProjADMM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from fl_admm_strategies import LpProj, LpProjADMM
from fl_admm_strategies.algorithms.lp_proj import IMAGE, LpProjInstruction
from fl_admm_strategies.algorithms.lp_proj_sgd import LpProjSGDInstruction, W
from fl_admm_strategies.maths.projection import projection

from ..toolkit.round.own_model import OwnModelClient
from ..toolkit.solving.objective import LocalObjective, ProjectedTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars

Asked = TypeVar("Asked", LpProjInstruction, LpProjSGDInstruction)


class ProjectedClient(OwnModelClient[Asked]):
    """Base of the clients whose own model is pulled in what a random matrix P sees of it."""

    def projected_term(self, asked: Asked, names: Sequence[str], power: int) -> ProjectedTerm:
        """Return the pull towards the vector that the server sent."""
        (target,) = asked.anchor.values()
        size = sum(tensor.numel() for tensor in self.block(names).values())
        matrix = projection(asked.projection_seed, len(target), size, target.dtype.name)
        return ProjectedTerm(
            asked.lam,
            torch.from_numpy(matrix.copy()).to(self.device),
            torch.from_numpy(np.array(target)).to(self.device),
            names,
            power,
        )


class LpProjADMMClient(ProjectedClient[LpProjInstruction]):
    """Client of `LpProjADMM`: H epochs on its loss, its projected model pulled towards w_i.

    Parameters are those of `TorchClient`.
    """

    strategy = LpProjADMM
    instruction = LpProjInstruction

    def steps(self, asked: LpProjInstruction, config: Scalars) -> MethodSteps:
        """Run theta <- theta - eta [grad f_i(theta) + lambda P^T (P theta - w_i)] (185)."""
        self.load_own(asked.start, config)
        names = self.trainable(asked.projected, setting="LpProjADMM(unprojected=...)")
        term = self.projected_term(asked, names, 2)
        metrics = yield Minimisation(LocalObjective([term]), asked.lr, asked.local_epochs)
        self.memory.keep(config, self.arrays())
        return {IMAGE: term.image(self.block(names)).cpu().numpy()}, metrics


class LpProjClient(ProjectedClient[LpProjSGDInstruction]):
    """Client of `LpProj`: R times K steps of its model, pulled towards w_i, then one of w_i.

    Parameters are those of `TorchClient`.
    """

    strategy = LpProj
    instruction = LpProjSGDInstruction

    def steps(self, asked: LpProjSGDInstruction, config: Scalars) -> MethodSteps:
        """Run theta <- theta - eta_p [grad f(theta) + lambda P^T psi(P theta - w_i)] K times.

        Each on a mini-batch of its own; then w_i <- w_i - eta_l lambda psi(w_i - P theta); all that
        R times. psi(x) = x for p = 2, sign(x) for p = 1. Uploads w_i.
        """
        self.load_own(asked.start, config)
        names = self.trainable(asked.projected, setting="LpProj(unprojected=...)")
        term, batches = self.projected_term(asked, names, asked.p), self.draws(asked.inner_steps)
        epochs = asked.inner_steps if self.full_batch else 1  # K steps in any case
        for _ in range(asked.local_rounds):
            objective = LocalObjective([term])
            metrics = yield Minimisation(objective, asked.lr, epochs, next(batches))
            term = term.moved(self.block(names), asked.outer_lr)
        self.memory.keep(config, self.arrays())
        return {W: term.target.cpu().numpy()}, metrics
