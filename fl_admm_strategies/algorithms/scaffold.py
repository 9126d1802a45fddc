"""SCAFFOLD: FedAvg whose clients correct their steps by how their gradient differs from the mean.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, arXiv:1910.06378: Algorithm 1 with option II; see
docs/methods/scaffold.md. The client is `clients.SCAFFOLDClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, Spec, average, under
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from ..runtime.sampled import SampledStrategy
from .shared.base import check_bound_of_changes

CONTROL = "control/"
"""Before the names of the arrays of an upload's change of c_i."""


@dataclass
class SCAFFOLDState:
    """x, the global model, and the control variates.

    Attributes
    ----------
    model : Arrays
        x, with its buffers.
    total : ndarray of shape (d,), float64
        The sum of all c_i, which stay with the clients: c is a share of it.
    began_in : int
        The round from which on all c_i are 0 until a client's next accepted upload.
    """

    model: Arrays
    total: NDArray[np.float64]
    began_in: int = 0


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

    def model_of(self, upload: Arrays, metrics: Mapping[str, Any]) -> Arrays:
        """Return y_i."""
        return {name: upload[name] for name in self.model}


class SCAFFOLD(SampledStrategy):
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

    lr: StepSize = 0.1
    local_epochs: Count = 1
    global_lr: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bound_of_changes("client", self.max_norm, self.on_excess)

    def init_state(self, arrays: Arrays) -> SCAFFOLDState:
        """Start with x^0, the initial model, and all c_i^0 = 0."""
        self._block = Block.optimised(arrays, self.trained)
        return SCAFFOLDState(arrays, np.zeros(self._block.size))

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, SCAFFOLDInstruction]:
        """Send x and c to everybody."""
        state, last_accepted = self.state, self.membership.last_accepted
        control = (state.total / len(self.membership)).astype(self._block.dtype)
        arrays = self._block.arrays(control)
        return {
            client: SCAFFOLDInstruction.of(
                self,
                server_round,
                model=state.model,
                control=arrays,
                fresh=last_accepted.get(client, 0) <= state.began_in,
            )
            for client in client_ids
        }

    def upload_spec(self) -> Spec:
        """Return the model's arrays for y_i, and those of the change of c_i."""
        changes = {CONTROL + name: entry for name, entry in self._block.spec.items()}
        return self.model_spec | changes

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Move x by eta_g times the mean of y_i - x, and c by 1/N times the changes of c_i (5)."""
        state, eta = self.state, self.global_lr
        means = average(state.model, replies, np.ones(len(replies)))
        # Not x + eta_g (mean - x), which is the mean for eta_g = 1 only to rounding.
        moved = {name: (1 - eta) * state.model[name] + eta * means[name] for name in self.trained}
        state.model = means | moved
        for reply in replies.values():
            state.total += self._block.vector(under(CONTROL, reply.arrays))

    def remove_clients(self, client_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Begin with c_i = 0 again: nobody here knows the c_i of those that have left."""
        self._begin_again(self.last_round)

    def on_state_lost(self, server_round: int, client_ids: Sequence[int]) -> None:
        """Begin with c_i = 0 again: nobody knows the c_i that were lost."""
        self._begin_again(server_round)

    def _begin_again(self, server_round: int) -> None:
        self.state.total = np.zeros(self._block.size)
        self.state.began_in = server_round

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return x."""
        return {name: array.copy() for name, array in self.state.model.items()}
