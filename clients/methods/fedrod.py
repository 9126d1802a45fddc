"""The client of FedRoD; the strategy and the paper are in `fl_admm_strategies.FedRoD`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fl_admm_strategies import FedRoD
from fl_admm_strategies.algorithms.fedrod import FedRoDInstruction
from fl_admm_strategies.algorithms.shared.split import SplitEvaluation

from ..toolkit.models.heads import TwoHeaded
from ..toolkit.round.split_model import is_personal
from ..toolkit.round.two_headed import TwoHeadedClient
from ..toolkit.solving.objective import LocalObjective
from ..toolkit.solving.steps import Evaluation, MethodSteps, Minimisation, Scalars, Steps

COUNTS = "class-counts"
"""The name of N_i in the client's memory."""


class FedRoDClient(TwoHeadedClient[FedRoDInstruction]):
    """Client of `FedRoD`: trains features and generic head together, and its personal head on top.

    Parameters are those of `TorchClient`. The model is a `TwoHeaded`, and `loss_fn` one of logits
    and class labels.
    """

    strategy = FedRoD
    instruction = FedRoDInstruction
    heads = TwoHeaded
    closed_form = "its clients train two heads at once, on a loss each"

    def steps(self, asked: FedRoDInstruction, config: Scalars) -> MethodSteps:
        """Descend on l(g + gamma log N_i, y) + l(stop(g) + p_i, y); upload features and g.

        g and p_i are the logits of the heads for the features z; the second term changes p_i alone.
        """
        self.load_split(asked.shared, asked.personal, config)
        model: Any = self.model
        held = self.memory.recall(config)
        counts = self._class_counts() if held is None else torch.from_numpy(held[COUNTS].copy())
        numbers = counts.to(self.device)

        def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
            generic, both = outputs
            balanced = with_prior(generic, numbers, asked.gamma)
            return self.loss_fn(balanced, targets) + self.loss_fn(both, targets)

        with self.training_on(self.problem_with(_BothHeads(model), loss)):
            metrics = yield Minimisation(LocalObjective(), asked.lr, asked.local_epochs)
        self.memory.keep(config, self.kept(asked) | {COUNTS: counts.numpy()})
        return self.arrays(), metrics

    def _class_counts(self) -> Tensor:
        """Return N_i, the number of the client's training samples of every class.

        Raises
        ------
        ValueError
            If the data are not those of a classification.
        """
        targets = torch.cat([batch.targets.cpu() for batch in self.train_problem.batches()])
        if targets.ndim != 1 or targets.is_floating_point():
            raise ValueError(
                f"The targets are {targets.dtype} of shape {tuple(targets.shape)}, expected a "
                "class number for every sample: FedRoD counts the classes."
            )
        return torch.bincount(targets[targets >= 0])  # what is below 0 the loss ignores

    def test(self, parameters: list[NDArray[Any]], config: Scalars) -> Steps[Evaluation]:
        """Evaluate both heads together, and the generic one, which is as if the other were 0."""
        asked = SplitEvaluation.decode(parameters, config)
        self.load_split(asked.global_, asked.personal, config)
        both = self.arrays()
        generic = {
            name: np.zeros_like(array) if is_personal(name, asked.personal) else array
            for name, array in both.items()
        }
        return (yield from self.evaluate_models({"personal": both, "global": generic}))


class _BothHeads(nn.Module):
    """The logits of the generic head, and those of both, whose gradient is the personal one's."""

    def __init__(self, model: TwoHeaded) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        features = self.model.features(*args, **kwargs)
        generic = self.model.head(features)
        return generic, generic.detach() + self.model.personal_head(features.detach())


def with_prior(logits: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return logits + gamma log N_i, of which cross-entropy makes balanced softmax.

    A class of which there are no samples is removed; with gamma = 0 nothing is changed.
    """
    if not gamma:
        return logits
    counts = F.pad(counts, (0, logits.shape[-1] - len(counts)))  # the last may have no sample
    prior = gamma * counts.clamp(min=1).to(logits.dtype).log()
    # A number in place of the logarithm of 0, which half precision and a smoothed loss do not take.
    return (logits + prior).masked_fill(counts == 0, torch.finfo(logits.dtype).min)
