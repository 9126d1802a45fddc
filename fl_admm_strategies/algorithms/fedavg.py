"""FedAvg: clients descend on their own losses from a common model, which becomes their mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, arXiv:1602.05629: Algorithm 1; see docs/methods/fedavg.md.
The client is `clients.SGDClient`, or any that was written for Flower's own FedAvg; that of
`FedAvgFT` is `clients.FedAvgFTClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import Count
from ..maths.schedules import StepSize
from ..runtime.messages.schema import Instruction
from .shared.models import OneModelStrategy
from .shared.robust import RobustStrategy


@dataclass(frozen=True)
class FedAvgInstruction(Instruction):
    """What a client gets: w, which it starts from. The group is called as Flower calls it."""

    arrays: Arrays
    lr: float
    local_epochs: int


_TITLES = {
    "mean": "FedAvg",
    "krum": "Krum",
    "multi-krum": "multi-Krum",
    "median": "FedMedian",
    "trimmed-mean": "FedTrimmedAvg",
}


class FedAvg(RobustStrategy, OneModelStrategy):
    """Federated averaging (FedAvg), with the mean or a robust rule.

    Parameters
    ----------
    lr : float or callable (default: 0.1)
        eta, the clients' step size.
    local_epochs : int (default: 1)
        E, local epochs.
    **base
        The parameters of `RobustStrategy`.

    Notes
    -----
    w is the mean of the participants' models, weighted by their examples. A client that was written
    for Flower's own FedAvg will do; it may leave `lr` and `local_epochs` unread.
    """

    method: ClassVar[str | None] = None
    paper: ClassVar = (
        "McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, arXiv:1602.05629"
    )
    kinds: ClassVar = {"global": "one global model"}
    message_type: ClassVar = FedAvgInstruction

    lr: StepSize = 0.1
    local_epochs: Count = 1

    @property
    def title(self) -> str:
        """The method's name as its paper, or that of the robust rule, writes it."""
        return _TITLES[self.aggregation]

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return w."""
        return {"arrays": self.state.model}


class FedAvgFT(FedAvg):
    """FedAvg, and for each client the last global model after some epochs on the client's own data.

    Parameters
    ----------
    finetune_epochs : int (default: 3)
        Local epochs from w, with step size `lr`, that make the model a client uses.
    **base
        The parameters of `FedAvg`.

    Notes
    -----
    Training is FedAvg's, to the bit. Clients fine-tune to be evaluated, and keep nothing:
    ``clients.personalise`` makes the model from the global one.

    Examples
    --------
    >>> strategy = FedAvgFT(lr=0.1, finetune_epochs=3, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedAvgFT"
    paper: ClassVar = "no paper: FedAvg, fine-tuned by each client"

    finetune_epochs: Count = 3

    @property
    def title(self) -> str:
        """FedAvg's name, or that of the robust rule, fine-tuned."""
        return f"{super().title}, fine-tuned"
