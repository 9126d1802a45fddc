"""The client of Lp-Proj by ADMM; the strategy and the paper are in `LpProjADMM`."""

from __future__ import annotations

import numpy as np
import torch

from fl_admm_strategies import LpProjADMM
from fl_admm_strategies.algorithms.lp_proj import IMAGE, LpProjInstruction
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.projection import projection

from ..toolkit.base import Scalars
from ..toolkit.objective import LocalObjective, ProjectedTerm
from ..toolkit.own_model import OwnModelClient


class LpProjADMMClient(OwnModelClient[LpProjInstruction]):
    """Client of `LpProjADMM`: H epochs on its loss, its projected model pulled towards w_i.

    Parameters are those of `TorchClient`.
    """

    strategy = LpProjADMM
    instruction = LpProjInstruction

    def train(self, asked: LpProjInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Run theta <- theta - eta [grad f_i(theta) + lambda P^T (P theta - w_i)] (185)."""
        self.load_own(asked.start, config)
        names = self.trainable(asked.projected, setting="LpProjADMM(unprojected=...)")
        (w_i,) = asked.anchor.values()
        size = sum(tensor.numel() for tensor in self.block(names).values())
        matrix = projection(asked.projection_seed, len(w_i), size, w_i.dtype.name)
        term = ProjectedTerm(
            asked.lam,
            torch.from_numpy(matrix.copy()).to(self.device),
            torch.from_numpy(np.array(w_i)).to(self.device),
            names,
        )
        metrics = self.solve(LocalObjective([term]), lr=asked.lr, epochs=asked.local_epochs)
        self.memory.keep(config, self.arrays())
        return {IMAGE: term.image(self.block(names)).cpu().numpy()}, metrics
