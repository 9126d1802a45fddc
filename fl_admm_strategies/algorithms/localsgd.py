"""LocalSGD: one global model, and a step size that falls with every local step.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767; Lin, Stich,
Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, arXiv:1808.07217; with the
step sizes of FedGiA's comparison (arXiv:2205.01438, section V); see docs/methods/localsgd.md. The
client is `clients.LocalSGDClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import Count
from ..maths.schedules import StepSize
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.models import OneModelStrategy


@dataclass(frozen=True)
class LocalSGDInstruction(Instruction):
    """What a client gets: x, and k, the number of the round's first step."""

    model: Arrays
    lr: float
    first_step: int
    local_steps: int


class LocalSGD(OneModelStrategy):
    """Local gradient steps of size a/log2(k + 1), and the plain mean of the participants' models.

    Parameters
    ----------
    lr : float or callable (default: 0.5)
        a. The k-th local step of the run, k = 1, 2, ..., is of size a/log2(k + 1).
    local_steps : int (default: 5)
        k0, steps of a round. With a client's ``full_batch=True`` they are full-gradient steps,
        which FedGiA's paper calls FedAvg; else each is on the next mini-batch.
    **base
        The parameters of `StatefulStrategy`.

    Examples
    --------
    >>> strategy = LocalSGD(lr=0.5, local_steps=5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "LocalSGD"
    paper: ClassVar = "Stich, ICLR 2019, arXiv:1805.09767"
    kinds: ClassVar = {"global": "one global model"}
    message_type: ClassVar = LocalSGDInstruction
    upload = Upload("mean", stateless=True)
    mean_weights = "uniform"

    lr: StepSize = 0.5
    local_steps: Count = 5

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return x and the number of the round's first step."""
        first = (server_round - 1) * self.local_steps + 1
        return {"model": self.state.model, "first_step": first}
