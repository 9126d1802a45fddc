"""The client of LocalSGD with a linear model, apart from that which needs PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fl_admm_strategies import LocalSGD
from fl_admm_strategies.algorithms.localsgd import LocalSGDInstruction
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.maths.checks import check_fraction

from ..toolkit.round.linear import LinearClient
from ..toolkit.solving.steps import Scalars


class LocalSGDLinearClient(LinearClient[LocalSGDInstruction]):
    """Client of `LocalSGD` with a linear model over a data matrix, in float64. It keeps nothing.

    Parameters are those of `LinearClient`, and:

    Parameters
    ----------
    batch_share : float (default: 1.0)
        The share of the samples that a step is taken on, drawn anew for each, without replacement;
        max(1, round(batch_share d_i)) samples. 1: all of them, which FedGiA's paper calls FedAvg;
        its LocalSGD has 0.05.
    """

    strategy = LocalSGD
    instruction = LocalSGDInstruction
    closed_form = "its steps are on a linear model, in numpy"

    def __init__(self, *args: Any, batch_share: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_fraction("batch_share", batch_share, zero=False)
        self.batch_share = batch_share

    def train(self, asked: LocalSGDInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Run x <- x - a/log2(k + 1) grad f_i(x) for the k of this round; upload x.

        Metrics: ``loss``, f_i at the x that the server sent.
        """
        x, problem = self.vector(asked.model), self.problem
        loss, _ = problem.value_and_gradient(x)
        draws = np.random.default_rng(int(config["seed"]))
        size = max(1, round(self.batch_share * problem.num_examples))
        for k in range(asked.first_step, asked.first_step + asked.local_steps):
            if size == problem.num_examples:
                rows: Any = slice(None)
            else:
                rows = draws.choice(problem.num_examples, size, replace=False)
            _, gradient = problem.value_and_gradient(x, rows)
            x = x - asked.lr / math.log2(k + 1) * gradient
        ((name, array),) = asked.model.items()
        upload = {name: x.reshape(array.shape).astype(array.dtype)}
        self.initial_loss = loss
        return upload, {"loss": loss}
