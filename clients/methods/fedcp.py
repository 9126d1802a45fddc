"""The client of FedCP; the strategy and the paper are in `fl_admm_strategies.FedCP`."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from fl_admm_strategies import FedCP
from fl_admm_strategies.algorithms.fedcp import FedCPInstruction
from fl_admm_strategies.maths.blocks import Arrays

from ..toolkit.models.heads import RoutedHeads, mean_discrepancy
from ..toolkit.round.two_headed import TwoHeadedClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import MethodSteps, Minimisation, Scalars


class FedCPClient(TwoHeadedClient[FedCPInstruction]):
    """Client of `FedCP`: trains features, policy and its personal head beside the global one.

    Parameters are those of `TorchClient`. The model is a `RoutedHeads`.
    """

    strategy = FedCP
    instruction = FedCPInstruction
    heads = RoutedHeads
    closed_form = "its clients hold their features near those that they received"

    def steps(self, asked: FedCPInstruction, config: Scalars) -> MethodSteps:
        """Descend on l(logits, y) + lambda MMD(h, h of the features received), the head fixed.

        Uploaded are features, policy, and the mean of both heads in the place of the global one.
        """
        self.load_split(asked.shared, asked.personal, config)

        def loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
            logits, features, received = outputs
            return self.loss_fn(logits, targets) + asked.lam * mean_discrepancy(features, received)

        moving = [name for name in self.trained_names() if not name.startswith("head.")]
        routed = _Routed(self.model, noise=asked.gumbel)
        with (
            LocalObjective(moving=moving).others_fixed(self.model),
            self.training_on(self.problem_with(routed, loss)),
        ):
            metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        self.memory.keep(config, self.kept(asked))
        trained = self.arrays()
        return trained | with_mean_head(trained), metrics


class _Routed(nn.Module):
    """The logits of a model, its features, and those of the model as it was."""

    def __init__(self, model: Any, *, noise: bool) -> None:
        super().__init__()
        self.model = model
        self.received = copy.deepcopy(model).requires_grad_(False)
        self.context = model.context()
        self.noise = noise

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        features = self.model.features(*args, **kwargs)
        shares = self.model.route(features, self.context, noise=self.noise)
        received = self.received.features(*args, **kwargs)
        return self.model.join(features, shares), features, received


def with_mean_head(model: Arrays) -> Arrays:
    """Return the mean of both heads of a model, under the names of the generic one."""
    return {
        name: ((array + model[f"personal_{name}"]) / 2).astype(array.dtype)
        for name, array in model.items()
        if name.startswith("head.") and array.dtype.kind == "f"
    }
