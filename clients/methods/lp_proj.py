"""The clients of Lp-Proj; strategies and papers are in `LpProj` and, by ADMM, `LpProjADMM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fl_admm_strategies import LpProj, LpProjADMM
from fl_admm_strategies.algorithms.lp_proj import IMAGE, LpProjInstruction
from fl_admm_strategies.algorithms.lp_proj_sgd import LpProjSGDInstruction, W
from fl_admm_strategies.maths.blocks import Arrays, prefixed, under
from fl_admm_strategies.maths.projection import projection

from ..toolkit.round.mirror import MirrorClient
from ..toolkit.round.own_model import OwnModelClient
from ..toolkit.solving.objective import LocalObjective, ProjectedTerm
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars

OWN = "own/"
"""Before the names of the arrays of theta_i in the memory of `LpProjADMMClient`."""


class ProjectedClient(OwnModelClient[Any]):
    """Base of the clients with a pull on P theta_i, for a random matrix P."""

    def projected_term(
        self, weight: float, target: NDArray[Any], seed: int, names: Sequence[str], power: int = 2
    ) -> ProjectedTerm:
        """Return the pull of P theta towards a vector."""
        size = sum(tensor.numel() for tensor in self.block(names).values())
        matrix = projection(seed, len(target), size, target.dtype.name)
        return ProjectedTerm(
            weight,
            torch.from_numpy(matrix.copy()).to(self.device),
            torch.from_numpy(np.array(target)).to(self.device),
            names,
            power,
        )


class LpProjADMMClient(MirrorClient, ProjectedClient):
    """Client of `LpProjADMM`: H epochs on its loss, its projected model pulled by its rule.

    Parameters are those of `TorchClient`.
    """

    strategy = LpProjADMM
    instruction: ClassVar[Any] = LpProjInstruction
    resent = False  # the strategy does not have theta_i

    def steps(self, asked: LpProjInstruction, config: Scalars) -> MethodSteps:
        """Run theta <- theta - eta [grad f_i(theta) + lambda P^T (P theta - w_i)] (185)."""
        turn = self.turn(asked, config)
        self.load_own(asked.initial, config)
        names = self.trainable(asked.projected, setting="LpProjADMM(unprojected=...)")
        point, weight = turn.rule.pull(turn.row, turn.w)
        term = self.projected_term(weight, point, asked.projection_seed, names)
        metrics = yield Minimisation(LocalObjective([term]), asked.lr, asked.local_epochs)
        upload = {IMAGE: term.image(self.block(names)).cpu().numpy()}
        return self.end(turn, upload, prefixed(OWN, self.arrays()), config), metrics

    def own_model(self, kept: Arrays) -> Arrays:
        """Return theta_i."""
        return under(OWN, kept)


class LpProjClient(ProjectedClient):
    """Client of `LpProj`: R times K steps of its model, pulled towards w_i, then one of w_i.

    Parameters are those of `TorchClient`.
    """

    strategy = LpProj
    instruction: ClassVar[Any] = LpProjSGDInstruction

    def steps(self, asked: LpProjSGDInstruction, config: Scalars) -> MethodSteps:
        """Run theta <- theta - eta_p [grad f(theta) + lambda P^T psi(P theta - w_i)] K times.

        Each on a mini-batch of its own; then w_i <- w_i - eta_l lambda psi(w_i - P theta); all that
        R times. psi(x) = x for p = 2, sign(x) for p = 1. Uploads w_i.
        """
        self.load_own(asked.start, config)
        names = self.trainable(asked.projected, setting="LpProj(unprojected=...)")
        (target,), batches = asked.anchor.values(), self.draws(asked.inner_steps)
        term = self.projected_term(asked.lam, target, asked.projection_seed, names, asked.p)
        epochs = asked.inner_steps if self.full_batch else 1  # K steps in any case
        for _ in range(asked.local_rounds):
            objective = LocalObjective([term])
            metrics = yield Minimisation(objective, asked.lr, epochs, next(batches))
            term = term.moved(self.block(names), asked.outer_lr)
        self.memory.keep(config, self.arrays())
        return {W: term.target.cpu().numpy()}, metrics
