"""FedALA: FedAvg with clients that start each round between the global model and their own.

    theta <- theta_i + (w - theta_i) * W_i   in the top layers,   theta <- w   below

W_i, a weight in [0, 1] for every parameter of these layers, is learned on the client's loss and
never leaves it, nor does theta_i, the client's model after its last training.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning", AAAI 2023, arXiv:2212.01197: Algorithm 1; see docs/methods/fedala.md. The
client is `clients.FedALAClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import Count, Fraction, WholeNumber
from ..maths.schedules import StepSize, StepSizeOrZero
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.models import OneModelStrategy


@dataclass(frozen=True)
class FedALAEvaluation(Instruction):
    """What a client needs to evaluate w and the model that it would start a round from."""

    model: Arrays
    layers: int
    sample: float
    weight_lr: float


@dataclass(frozen=True)
class FedALAInstruction(FedALAEvaluation):
    """What a client gets: w, how to learn W_i, and how to train from there."""

    lr: float
    local_epochs: int


class FedALA(OneModelStrategy):
    """Federated learning with adaptive local aggregation (FedALA).

    Parameters
    ----------
    layers : int (default: 1)
        p, the layers, counted from the output, in which clients mix the global model with their
        own; they take the others as they come. A normalisation belongs to the layer before it.
        0: none, which is FedAvg.
    sample : float (default: 0.8)
        s, the share of its training batches on which a client learns W_i.
    weight_lr : float or callable (default: 1.0)
        eta_w, the step size of W_i.
    lr : float or callable (default: 0.1)
        eta, the step size of the training.
    local_epochs : int (default: 1)
        Local epochs.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    w is the mean of the participants' models, weighted by their examples. A client that has not
    trained yet, or has lost theta_i, starts from w.

    Examples
    --------
    >>> strategy = FedALA(layers=1, lr=0.1)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedALA"
    paper: ClassVar = "Zhang, Hua, Wang, Song, Xue, Ma, Guan, AAAI 2023, arXiv:2212.01197"
    kinds: ClassVar = {"personal": "personal model", "global": "one global model"}
    message_type: ClassVar = FedALAInstruction
    upload = Upload("mean")

    layers: WholeNumber = 1
    sample: Fraction = 0.8
    weight_lr: StepSizeOrZero = 1.0
    lr: StepSize = 0.1
    local_epochs: Count = 1

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedALAEvaluation]:
        """Send w to all."""
        evaluation = FedALAEvaluation.of(self, server_round, model=self.state.model)
        return dict.fromkeys(client_ids, evaluation)
