"""The client of Per-FedAvg; the strategy and the paper are in `fl_admm_strategies.PerFedAvg`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_admm_strategies import PerFedAvg
from fl_admm_strategies.algorithms.perfedavg import PerFedAvgEvaluation, PerFedAvgInstruction
from fl_admm_strategies.maths.blocks import Arrays

from ..toolkit.data.batches import Loader
from ..toolkit.round.torch_client import TorchClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.solvers import gradient_descent
from ..toolkit.solving.steps import Evaluation, Scalars, Steps

Block = Mapping[str, Tensor]

SMALL = 1e-3
"""How far from w the two gradients of a Hessian-vector product are taken. Nearer to it, the
rounding of float32 is as large as their difference."""


class PerFedAvgClient(TorchClient[PerFedAvgInstruction]):
    """Client of `PerFedAvg`: tau steps along the gradient of f_i(w - alpha grad f_i(w)).

    It keeps nothing. Parameters are those of `TorchClient`, without an optimizer, a schedule or
    clipping: the steps are a formula.
    """

    strategy = PerFedAvg
    instruction = PerFedAvgInstruction
    closed_form = "its steps are a formula of gradients"

    def train(self, asked: PerFedAvgInstruction, config: Scalars) -> tuple[Arrays, Scalars]:
        """Run w <- w - beta d tau times, d = (I - alpha H) g; upload w.

        g is the gradient at w - alpha grad f(w; D), on the batch D', and H the Hessian at w, on
        D''. Metrics: ``loss``, that of w on the batch of the last step.
        """
        self.load(asked.model)
        self.refuse_own_steps("PerFedAvg takes no other steps than its own", "use FedAvgFT")
        self.model.train()
        batches, losses = self.draws(), []
        for _ in range(asked.local_steps):
            w = self.block(self.trained_names())
            loss, direction = self._direction(asked, w, batches)
            losses.append(loss)
            self.load_block(_moved(w, direction, asked.lr))
        self.initial_loss = losses[0]
        return self.arrays(), {"loss": losses[-1]}

    def _direction(
        self, asked: PerFedAvgInstruction, w: Block, batches: Iterator[Loader]
    ) -> tuple[float, Block]:
        """Return f at w, and d."""
        # One forward pass in training mode counts for the buffers, the last.
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

        def gradient(at: Block, loader: Loader) -> tuple[float, Block]:
            self.load_block(at)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
            loss = replace(self.train_problem, loader=loader).set_gradient()
            return loss, self.model_arrays.gradients(w)

        loss, slope = gradient(w, next(batches))
        _, g = gradient(_moved(w, slope, asked.alpha), next(batches))
        if asked.mode == "fo":
            return loss, g
        third = next(batches)
        norm = float(torch.linalg.vector_norm(torch.cat([part.flatten() for part in g.values()])))
        delta = SMALL / max(1.0, norm) if asked.delta is None else asked.delta
        # Of one function, so with one draw of a dropout: over delta another would be all there is.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            _, ahead = gradient(_moved(w, g, -delta), third)
        _, behind = gradient(_moved(w, g, delta), third)
        product = {name: (ahead[name] - behind[name]) / (2 * delta) for name in g}
        return loss, _moved(g, product, asked.alpha)

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate the model on the test data, as it is and adapted to the training data.

        Returns
        -------
        loss : float
            Test loss of the adapted model.
        num_examples : int
        metrics : dict
            ``adapted-loss`` and ``adapted-METRIC``; the same with ``global``.
        """
        asked = PerFedAvgEvaluation.decode(parameters, config)
        self.load(asked.global_)
        self.train_size()
        gradient_descent(
            self.train_problem, LocalObjective(), lr=asked.alpha, epochs=1, full_batch=True
        )
        models = {"adapted": self.arrays(), "global": asked.global_}
        return (yield from self.evaluate_models(models))


def _moved(block: Block, along: Block, rate: float) -> dict[str, Tensor]:
    return {name: tensor - rate * along[name] for name, tensor in block.items()}
