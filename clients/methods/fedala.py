"""The client of FedALA; the strategy and the paper are in `fl_admm_strategies.FedALA`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import FedALA
from fl_admm_strategies.algorithms.fedala import FedALAEvaluation, FedALAInstruction
from fl_admm_strategies.maths.blocks import prefixed, under

from ..toolkit.models.personalization import last_parameters
from ..toolkit.round.own_model import OwnModelClient
from ..toolkit.round.torch_client import to_numpy, to_tensors
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.solvers import LocalProblem
from ..toolkit.solving.steps import Evaluation, MethodSteps, Minimisation, Scalars, Steps

W = "W/"
"""Prefix of W_i's parameters in the client's memory, which holds theta_i as well."""
SETTLED, WINDOW = 0.1, 10
"""W_i is learned when the last 10 losses have a standard deviation below 0.1, as in the authors'
code (docs/methods/fedala.md)."""
MOST_PASSES = 100
"""Passes at most when a client learns W_i for the first time. The authors' code has no bound."""

Block = dict[str, Tensor]


class FedALAClient(OwnModelClient[FedALAInstruction]):
    """Client of `FedALA`: trains from a mix of the global model and its own, which it learns.

    Parameters are those of `TorchClient`.
    """

    strategy = FedALA
    instruction = FedALAInstruction

    def steps(self, asked: FedALAInstruction, config: Scalars) -> MethodSteps:
        """Start between w and theta_i, descend on f_i; upload the result, which is theta_i."""
        weights, metrics = self.load_mixed(asked, config)
        metrics |= yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        trained = self.arrays()
        self.memory.keep(config, trained | prefixed(W, to_numpy(weights)))
        return trained, metrics

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the model that the client would start a round from now, and w.

        Learning W_i for that leaves nothing behind.
        """
        asked = FedALAEvaluation.decode(parameters, config)
        self.load_mixed(asked, config)
        return (yield from self.evaluate_models({"personal": self.arrays(), "global": asked.model}))

    def load_mixed(self, asked: FedALAEvaluation, config: Scalars) -> tuple[Block, Scalars]:
        """Load theta_i + (w - theta_i) * W_i, in the top layers, and w below them.

        Returns
        -------
        weights : dict of str to Tensor
            W_i; empty before it was needed for the first time.
        metrics : dict
            ``weight-passes``, the passes that it took to learn W_i.
        """
        names = last_parameters(self.model, asked.layers)
        held = self.memory.require_known(config)
        self.load(asked.model)
        if held is None or not names:
            return {}, {"weight-passes": 0}
        w = self.block(names)
        theta = to_tensors({name: held[name] for name in names}, self.device)
        change = {name: w[name] - theta[name] for name in names}
        kept = to_tensors(under(W, held), self.device)
        if not any(bool(part.any()) for part in change.values()):
            return kept, {"weight-passes": 0}
        weights = kept or {name: torch.ones_like(part) for name, part in w.items()}
        sample = self._sample(asked.sample)
        losses: list[float] = []
        while not losses or not (kept or settled(losses)):
            losses.append(self._pass(sample, asked.weight_lr, theta, change, weights))
        self.load(asked.model)  # the statistics of a batch norm, which moved
        self.load_block(mixed(theta, change, weights))
        return weights, {"weight-passes": len(losses)}

    def _sample(self, share: float) -> LocalProblem:
        """Return the client's problem on a share of its batches, one at least, drawn at random."""
        batches = [(batch.inputs, batch.targets) for batch in self.train_problem.batches()]
        count = max(1, round(share * len(batches)))
        drawn = [batches[int(k)] for k in torch.randperm(len(batches))[:count]]
        return replace(self.train_problem, loader=drawn, split_batch=lambda pair: pair)

    def _pass(
        self, problem: LocalProblem, lr: float, theta: Block, change: Block, weights: Block
    ) -> float:
        """Take a step on W_i for every batch; return the loss of the last, before its step.

        W <- clip(W - eta_w grad f * (w - theta_i), 0, 1), the gradient at the mix.
        """
        problem.model.train()
        loss = torch.tensor(torch.nan)
        with LocalObjective(moving=weights).others_fixed(problem.model) as moving:
            parameters = [moving[name] for name in weights]
            for batch in problem.batches():
                self.load_block(mixed(theta, change, weights))
                loss = problem.loss(batch)
                slopes = torch.autograd.grad(loss, parameters, materialize_grads=True)
                for (name, weight), slope in zip(weights.items(), slopes, strict=True):
                    weight.sub_(lr * slope * change[name]).clamp_(0, 1)
        return loss.item()


def mixed(theta: Block, change: Block, weights: Block) -> Block:
    """Return theta_i + (w - theta_i) * W_i."""
    return {name: theta[name] + part * weights[name] for name, part in change.items()}


def settled(losses: list[float]) -> bool:
    """Return whether W_i is learned, by the last loss of every pass (or there were very many)."""
    quiet = len(losses) > WINDOW and float(np.std(losses[-WINDOW:])) < SETTLED
    return quiet or len(losses) >= MOST_PASSES
