"""SCAFFOLD: FedAvg whose clients correct their steps by how their gradient differs from the mean.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, arXiv:1910.06378: Algorithm 1 with option II; see
docs/methods/scaffold.md. The client is `clients.SCAFFOLDClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..maths.blocks import Arrays, Spec, average, under
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from .shared.base import SummedStrategy

CONTROL = "control/"
"""Before the names of the arrays of an upload's change of c_i."""


@dataclass(frozen=True)
class SCAFFOLDInstruction(Instruction):
    """What a client gets: x, which it starts from, and c.

    `fresh` is True where its c_i is 0: it has not taken part since all of them were.
    """

    model: Arrays
    control: Arrays
    lr: float
    local_epochs: int
    fresh: bool


class SCAFFOLD(SummedStrategy):
    """Federated learning with control variates against client drift (SCAFFOLD).

    Parameters
    ----------
    lr : float or callable (default: 0.1)
        eta_l, the clients' step size.
    local_epochs : int (default: 1)
        E, local epochs. The paper's K, steps of a round, is E times the number of batches.
    global_lr : float (default: 1.0)
        eta_g, the step size of the server; 1 sets x to the mean of the y_i.
    **base
        The parameters of `SampledStrategy`.

    Notes
    -----
    All clients count alike. Messages are twice as large as FedAvg's in both directions. When a
    client has left, or has lost its c_i, all control variates begin again at 0.

    Examples
    --------
    >>> strategy = SCAFFOLD(lr=0.1, local_epochs=3, fraction_train=0.2)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "SCAFFOLD"
    paper: ClassVar = "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020, arXiv:1910.06378"
    kinds: ClassVar = {"global": "one global model"}
    told: ClassVar = SCAFFOLDInstruction

    lr: StepSize = 0.1
    local_epochs: Count = 1
    global_lr: Positive = 1.0

    def given(self, server_round: int) -> dict[str, Any]:
        """Return x and c."""
        control = self.state.consensus.total / len(self.membership)
        arrays = self._block.arrays(control.astype(self._block.dtype))
        return {"model": self.global_model(), "control": arrays}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return whether a client's c_i is 0."""
        return {"fresh": self.is_fresh(client_id)}

    def upload_spec(self) -> Spec:
        """Return the model's arrays for y_i, and those of the change of c_i."""
        changes = {CONTROL + name: entry for name, entry in self._block.spec.items()}
        return self.model_spec | changes

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Move x by eta_g times the mean of y_i - x, and c by 1/N times the changes of c_i (5)."""
        state, eta = self.state, self.global_lr
        means = average(self.global_model(), replies, np.ones(len(replies)))
        consensus, mean = state.consensus, self._block.vector(means)
        # Not x + eta_g (mean - x), which is the mean for eta_g = 1 only to rounding.
        consensus.w = (1 - eta) * consensus.w + eta * mean
        state.buffers = self._block.rest(means)
        for reply in replies.values():
            consensus.add_change(self._block.vector(under(CONTROL, reply.arrays)))
