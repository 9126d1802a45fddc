"""pFedMe: a global model of which every client's Moreau envelope is low, and personal models.

    minimise  (1/m) sum_i F_i(w),    F_i(w) = min_theta f_i(theta) + lambda/2 ||theta - w||^2

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
arXiv:2006.08848: Algorithm 1; see docs/methods/pfedme.md. `PFedMeMatched` is what FLAME's paper
(arXiv:2407.16397) compares with under that name. The clients are `clients.PFedMeClient` and
`clients.PFedMeMatchedClient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize, rate_in
from ..runtime.messages.records import Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.consensus import ConsensusMethod
from .shared.envelope import EnvelopeStrategy, check_outer_step
from .shared.models import OneModelStrategy, OwnModelsStrategy, OwnModelState
from .shared.rule import Row, Rule

KINDS = {"personal": "personal model", "global": "one global model"}


@dataclass(frozen=True)
class PFedMeInstruction(Instruction):
    """What a client gets: w. `upload` is empty where the client is not averaged."""

    model: Arrays
    lam: float
    lr: float
    outer_lr: float
    local_rounds: int
    inner_steps: int
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
    **base
        The parameters of `EnvelopeStrategy`.

    Notes
    -----
    The K steps begin where the last ended, in the first step of a round at w, as in the authors'
    code. R and K are those of that code on MNIST, in 800 rounds with batches of 20; its lambda is
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
    message_type: ClassVar = PFedMeInstruction
    upload = Upload("mean")
    title = "pFedMe"

    lam: Positive = 0.1
    lr: StepSize = 0.1
    outer_lr: StepSize | None = None
    local_rounds: Count = 20
    inner_steps: Count = 5

    def init_state(self, arrays: Arrays) -> OwnModelState:
        """Start with w^0, the initial model."""
        return OwnModelState(arrays, arrays)

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return w, and the step size that follows from lam where none is given."""
        check_outer_step(self.lam, self.outer_lr, server_round)
        return super().shared_fields(server_round) | {"outer_lr": self.outer_lr or 0.75 / self.lam}

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set w to (1 - beta) w + beta (the mean of the sampled clients' w_i)."""
        self.state.model = self.moved(self.state.model, replies, self.trained)


@dataclass(frozen=True)
class PFedMeMatchedRule(Rule):
    """theta_i and w_i; lambda, and eta_g lambda, by how much of the way w_i moves to theta_i."""

    lam: float
    rate: float

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """theta_i and w_i."""
        return {"theta": 1, "local_w": 1}

    def pull(self, row: Row, w: Any) -> tuple[Any, float]:
        """Return w and lambda."""
        return w, self.lam

    def start(self, row: Row, w: Any) -> Any:
        """Return theta_i."""
        return row.theta

    def move(self, row: Row, u: Any, w: Any) -> Row:
        """Return theta_i, and w_i = w - eta_g lambda (w - theta_i)."""
        return Row(theta=u, local_w=w - self.rate * (w - u))

    def copy(self, row: Row) -> Any:
        """Return w_i."""
        return row.local_w

    def message(self, row: Row) -> Any:
        """Return w_i: there are no duals."""
        return row.local_w


class PFedMeMatched(ConsensusMethod):
    """pFedMe with the local work of FLAME, as FLAME's paper compares with it.

    theta_i stays from round to round and takes H epochs near w; then w_i takes one step; w is the
    mean of w_i over all clients, with the last one of those that sat out.

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
        The parameters of `ConsensusMethod`; `published` is True, there is this form alone.
    """

    method: ClassVar = "PFedMeMatched"
    paper: ClassVar = "pFedMe as in Zhu, Zeng, Wang, Sun, Li, Yao, Peng, arXiv:2407.16397"
    kinds: ClassVar = KINDS
    rule: ClassVar = PFedMeMatchedRule
    own: ClassVar = "theta"
    default_norm = None
    title = "pFedMe (FLAME's form)"

    lam: Positive = 0.1
    lr: StepSize = 0.1
    outer_lr: StepSize | None = None
    local_epochs: Count = 1
    published: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.published:
            raise ValueError("published is False, expected True: there is this form alone.")
        check_outer_step(self.lam, self.outer_lr, 1)

    @property
    def penalty(self) -> float:
        """There is none: w has no dual."""
        return 0.0

    def rule_of(self, client_id: int) -> PFedMeMatchedRule:
        """Return a client's rule in the round that is under way."""
        lr = rate_in(self.last_round + 1, self.outer_lr or 1 / self.lam, "outer_lr")
        return PFedMeMatchedRule(self.published, self.lam, lr * self.lam)
