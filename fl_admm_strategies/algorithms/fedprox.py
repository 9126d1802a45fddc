"""FedProx: FedAvg with clients that are pulled towards the model that they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, arXiv:1812.06127: Algorithm 2; see docs/methods/fedprox.md. The client is
`clients.FedProxClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import NotNegative
from ..maths.schedules import EpochSchedule, StepSize, epochs_in
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.models import OneModelStrategy


@dataclass(frozen=True)
class FedProxInstruction(Instruction):
    """What a client gets: w, which it starts from and is pulled to."""

    model: Arrays
    mu: float
    lr: float
    local_epochs: int


class FedProx(OneModelStrategy):
    """Federated learning with a proximal term (FedProx).

    Parameters
    ----------
    mu : float (default: 0.1)
        mu, the weight of the proximal term mu/2 ||w_i - w||^2; 0 is FedAvg.
    lr : float or callable (default: 0.1)
        eta, the clients' step size.
    local_epochs : int or callable (default: 1)
        E, local epochs. A callable gets (round, client id): `RandomEpochs` for clients of unequal
        power; their unfinished work counts in the paper.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    w is the mean of the participants' models, weighted by their examples.
    """

    method: ClassVar = "FedProx"
    paper: ClassVar = "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020, arXiv:1812.06127"
    kinds: ClassVar = {"global": "one global model"}
    upload = Upload("mean", stateless=True)

    mu: NotNegative = 0.1
    lr: StepSize = 0.1
    local_epochs: EpochSchedule = 1

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, FedProxInstruction]:
        """Send w to all."""
        epochs = {c: epochs_in(server_round, c, self.local_epochs) for c in client_ids}
        asked = {
            number: FedProxInstruction.of(
                self, server_round, model=self.state.model, local_epochs=number
            )
            for number in {*epochs.values()}
        }
        return {client: asked[number] for client, number in epochs.items()}
