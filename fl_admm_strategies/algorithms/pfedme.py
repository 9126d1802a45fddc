"""pFedMe: a global model of which every client's Moreau envelope is low, and personal models.

    minimise  (1/m) sum_i F_i(w),    F_i(w) = min_theta f_i(theta) + lambda/2 ||theta - w||^2

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
arXiv:2006.08848: Algorithm 1; see docs/methods/pfedme.md. `PFedMeMatched` is what FLAME's paper
(arXiv:2407.16397) compares with under that name. The clients are `clients.PFedMeClient` and
`clients.PFedMeMatchedClient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Block, weighted_average
from ..maths.checks import Count, Positive
from ..maths.clienttable import ClientTable, Row
from ..maths.consensus import REBUILD_EVERY, Consensus
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.base import KeptMessages
from .shared.envelope import EnvelopeStrategy, check_outer_step
from .shared.models import OneModelStrategy, OwnModelsStrategy, OwnModelState

KINDS = {"personal": "personal model", "global": "one global model"}


@dataclass(frozen=True)
class PFedMeInstruction(Instruction):
    """What a client gets: w. `upload` is empty for one that is not averaged."""

    model: Arrays
    lam: float
    lr: float
    outer_lr: float
    local_rounds: int
    inner_steps: int
    theta_start: str
    upload: list[str] | None


class PFedMe(OneModelStrategy, OwnModelsStrategy, EnvelopeStrategy):
    """Federated learning with Moreau envelopes (pFedMe).

    Parameters
    ----------
    lam : float (default: 0.1)
        lambda, how strongly theta_i is held near w_i.
    lr : float or callable (default: 0.1)
        eta_in, the step size of theta_i. ``lr * lam`` well below 2, as the loss is curved too.
    outer_lr : float or callable, optional
        eta, the step size of w_i. ``outer_lr * lam`` below 2, or w_i diverges; by default it is
        0.75, as with the paper's lambda and a step size of 0.05.
    local_rounds : int (default: 20)
        R, steps of w_i in a round; each has a mini-batch of its own.
    inner_steps : int (default: 5)
        K, steps of theta_i on that same mini-batch.
    theta_start : {"warm", "reset"} (default: "warm")
        Where the K steps begin: where the last ended, in the first step of a round at w (the
        authors' code), or each time at w_i.
    **base
        The parameters of `EnvelopeStrategy`.

    Notes
    -----
    R and K are those of the authors' code on MNIST, in 800 rounds with batches of 20; its lambda is
    15, its step sizes are 0.1 (0.09 for a network) and 0.005. At the same local work that holds the
    personal models back (docs/settings.md). A client with ``full_batch=True`` has all its samples
    for its mini-batch.

    Examples
    --------
    >>> strategy = PFedMe(lam=15.0, lr=0.05, outer_lr=0.05, fraction_train=0.25)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "PFedMe"
    paper: ClassVar = "T. Dinh, Tran, Nguyen, NeurIPS 2020, arXiv:2006.08848"
    kinds: ClassVar = KINDS
    told: ClassVar = PFedMeInstruction
    upload = Upload("mean")
    title = "pFedMe"

    lam: Positive = 0.1
    lr: StepSize = 0.1
    outer_lr: StepSize | None = None
    local_rounds: Count = 20
    inner_steps: Count = 5
    theta_start: Literal["warm", "reset"] = "warm"

    def init_state(self, arrays: Arrays) -> OwnModelState:
        """Start with w^0, the initial model."""
        return OwnModelState(arrays, arrays)

    def given(self, server_round: int) -> dict[str, Any]:
        """Return w, and the step size that follows from lam where none is given."""
        check_outer_step(self.lam, self.outer_lr, server_round)
        return super().given(server_round) | {"outer_lr": self.outer_lr or 0.75 / self.lam}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set w to (1 - beta) w + beta (the mean of the sampled clients' w_i)."""
        self.state.model = self.moved(self.state.model, replies, self.trained)


@dataclass
class PFedMeMatchedState:
    """The server's variables.

    Attributes
    ----------
    consensus : Consensus
        w and the sum of all clients' w_i.
    averaged_arrays : Arrays
        The buffers of the global model.
    initial : Arrays
        The initial model, which theta_i starts from.
    clients : ClientTable
        Rows ``local_w`` (w_i), shape (d,).
    """

    consensus: Consensus
    averaged_arrays: Arrays
    initial: Arrays
    clients: ClientTable


@dataclass(frozen=True)
class PFedMeMatchedInstruction(Instruction):
    """What a client gets: w, and theta_i^0 before its first accepted upload."""

    model: Arrays
    start: Arrays | None
    lam: float
    lr: float
    outer_lr: float
    local_epochs: int


class PFedMeMatched(OwnModelsStrategy, KeptMessages):
    """pFedMe with the local work of FLAME, as FLAME's paper compares with it.

    theta_i stays with its client from round to round and takes H epochs near w; then w_i takes one
    step; w is the mean of w_i over all clients, with the last one of those that sat out.

    Parameters
    ----------
    lam : float (default: 0.1)
        lambda, how strongly theta_i is held near w.
    lr : float or callable (default: 0.1)
        eta, the step size of theta_i.
    outer_lr : float or callable, optional
        eta_g, the step size of w_i: w_i = w - eta_g lambda (w - theta_i). By default 1/lambda,
        which averages the theta_i. FLAME's paper takes the best of 0.01, 0.05, 0.1, 0.2 and 0.5.
    local_epochs : int (default: 1)
        H, passes over the data in a round.
    **base
        The parameters of `SampledStrategy`.
    """

    method: ClassVar = "PFedMeMatched"
    paper: ClassVar = "pFedMe as in Zhu, Zeng, Wang, Sun, Li, Yao, Peng, arXiv:2407.16397"
    kinds: ClassVar = KINDS
    told: ClassVar = PFedMeMatchedInstruction
    title = "pFedMe (FLAME's form)"

    lam: Positive = 0.1
    lr: StepSize = 0.1
    outer_lr: StepSize | None = None
    local_epochs: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer_step(self.lam, self.outer_lr, 1)

    def init_state(self, arrays: Arrays) -> PFedMeMatchedState:
        """Start with theta_i^0 = w_i^0 = w^0, the initial model."""
        self._block = Block.optimised(arrays, self.trained)
        first = self._block.vector(arrays)
        return PFedMeMatchedState(
            Consensus(first, first.astype(np.float64) * self.membership.num_initial, first),
            self._block.rest(arrays),
            arrays,
            ClientTable(local_w=first),
        )

    def new_client(self, client_id: int, reply: Reply | None) -> Row:
        """Start with w_i = w, which leaves the mean as it is."""
        return {"local_w": self.state.consensus.w}

    def given(self, server_round: int) -> dict[str, Any]:
        """Return w, and the step size that follows from lam where none is given."""
        check_outer_step(self.lam, self.outer_lr, server_round)
        return {"model": self.global_model(), "outer_lr": self.outer_lr or 1 / self.lam}

    def given_to(self, client_id: int) -> dict[str, Any]:
        """Return theta_i^0 for a client without a model of its own; for one that joins it is w."""
        w = self.global_model() if self.membership.is_new(client_id) else {}
        return {"start": self.membership.start_of(client_id, self.state.initial, w)}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Take in the participants' w_i; w is the mean over all clients."""
        consensus = self.state.consensus
        for client, reply in replies.items():
            row, new = self.state.clients[client], self._block.vector(reply.arrays)
            consensus.add_change(new.astype(np.float64) - row.local_w)
            row.local_w = new
        if server_round % REBUILD_EVERY == 0:
            consensus.rebuild(self._messages(self.client_ids))
        consensus.aggregate(len(self.membership))
        self.state.averaged_arrays = weighted_average(self.state.averaged_arrays, replies)

    def _messages(self, client_ids: Sequence[int]) -> Iterator[NDArray[Any]]:
        return (self.state.clients[client].local_w for client in client_ids)

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w; theta_i stays with its client."""
        if kind == "personal":
            return super().model(kind, client_id)
        return self._block.model(self.state.consensus.w, self.state.averaged_arrays)
