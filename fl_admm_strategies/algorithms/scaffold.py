"""SCAFFOLD: FedAvg with steps that are corrected by the client's difference to the mean gradient.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, arXiv:1910.06378: Algorithm 1 with option II; see
docs/methods/scaffold.md. The client is `clients.SCAFFOLDClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..maths.blocks import Arrays, Block, Spec, average, under
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.models import ModelState, OneModelStrategy
from .shared.totals import Totals, TotalsStrategy

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


@dataclass
class SCAFFOLDState(ModelState):
    """x with its buffers, and the sum of the c_i."""

    totals: Totals


class SCAFFOLD(TotalsStrategy, OneModelStrategy):
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
        The parameters of `StatefulStrategy`.

    Notes
    -----
    All clients have the same weight. Messages are twice as large as FedAvg's in both directions.
    When a client has left, or has lost its c_i, all control variates begin again at 0.

    Examples
    --------
    >>> strategy = SCAFFOLD(lr=0.1, local_epochs=3, fraction_train=0.2)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "SCAFFOLD"
    paper: ClassVar = "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020, arXiv:1910.06378"
    kinds: ClassVar = {"global": "one global model"}
    message_type: ClassVar = SCAFFOLDInstruction

    lr: StepSize = 0.1
    local_epochs: Count = 1
    global_lr: Positive = 1.0

    upload: ClassVar = Upload("sum")

    def init_state(self, arrays: Arrays) -> SCAFFOLDState:
        """Start with the initial model and all c_i at 0."""
        self._block = Block.optimised(arrays, self.trained)
        return SCAFFOLDState(arrays, Totals.start(self._block.spec))

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return x and c."""
        size, sums = len(self.membership), self.state.totals.sums
        control = {n: (sums[n] / size).astype(dtype) for n, (_, dtype) in self._block.spec.items()}
        return {"model": self.state.model, "control": control}

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return whether a client's c_i is 0."""
        return {"fresh": self.is_fresh(client_id)}

    def upload_spec(self) -> Spec:
        """Return the model's arrays for y_i, and those of the change of c_i."""
        changes = {CONTROL + name: entry for name, entry in self._block.spec.items()}
        return self.model_spec | changes

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure y_i from x, the change of c_i from 0."""
        return sent.groups["model"]

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Move x by eta_g times the mean of y_i - x, and c by 1/N times the changes of c_i (5)."""
        state, eta = self.state, self.global_lr
        model = average(state.model, replies, np.ones(len(replies)))
        for name in self._block.names:
            # Not x + eta_g (mean - x), which is the mean for eta_g = 1 only to rounding.
            x = state.model[name]
            model[name] = np.asarray((1 - eta) * x + eta * model[name], dtype=x.dtype)
        state.model = model
        state.totals.add(under(CONTROL, reply.arrays) for reply in replies.values())
