"""FedADMM: one global model by inexact consensus ADMM, the ancestor of FedAPM and FLAME.

Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023, in the form of FedAPM's Algorithm 1
without personal parameters: equations (8), (11) to (13); see docs/methods/fedadmm.md. The client is
`clients.FedADMMClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Pattern, compile_pattern
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize
from .shared.base import Weights
from .shared.consensus import ConsensusMethod
from .shared.rule import Row, Rule

_LARGEST_RHO = 0.2  # of the default, where S is small (docs/methods/fedadmm-notes.md, P9)


@dataclass(frozen=True)
class FedADMMRule(Rule):
    """u_i and pi_i/rho; rho, and alpha_i m, the client's share of the objective."""

    rho: float
    share: float

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """pi_i/rho, and u_i where local steps start at it."""
        return {"u": 1, "dual": 0} if published else {"dual": 0}

    def pull(self, row: Row, w: Any) -> tuple[Any, float]:
        """Return w - pi_i/rho: <pi_i, u> + rho/2 |u - w|^2 is a proximal term there (11)."""
        return w - row.dual, self.rho / self.share

    def start(self, row: Row, w: Any) -> Any:
        """Return w; in the paper's form u_i."""
        return row.u if self.published else w

    def move(self, row: Row, u: Any, w: Any) -> Row:
        """Return u_i, and pi_i/rho (12)."""
        return Row(u=u, dual=row.dual + (u - w))

    def copy(self, row: Row) -> Any:
        """Return u_i."""
        return row.u


class FedADMM(ConsensusMethod):
    """Federated learning by inexact ADMM (FedADMM).

    Parameters
    ----------
    rho : float, optional
        The ADMM penalty parameter beside the plain loss: m rho, where the paper has rho beside
        f_i/m (docs/methods/fedadmm-notes.md, P3). By default 0.3 over the sum of the step sizes of
        a client's round, the median of what clients report in their first turns, and at most 0.2
        (P9); until three have reported, and in the paper's form, it is 0.1.
    lr : float or callable (default: 0.1)
        The clients' step size on their plain loss, as in plain training: the paper's eta over m.
    local_epochs : int (default: 3)
        E, local epochs: full-gradient steps with GD, passes over the data with SGD.
    weights : {"uniform", "size"} (default: "uniform")
        alpha_i: 1/m, or n_i/n, which a handshake asks for. m and n stay those of the start when
        clients come and go.
    averaged : str, optional
        Regular expression searched in the arrays' names: arrays that are trained on each client's
        loss alone and averaged over the participants, weighted by their examples, as buffers are.
    finetune_epochs : int, optional
        Local epochs from w on the client's own data that make the model a client uses, as in
        `FedAvgFT`. By default a client uses w.
    **base
        The parameters of `ConsensusMethod`.

    Examples
    --------
    >>> strategy = FedADMM(lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedADMM"
    paper: ClassVar = 'Zhou, Li, "Federated Learning via Inexact ADMM", TPAMI 2023'
    kinds: ClassVar = {"global": "one global model"}
    rule: ClassVar = FedADMMRule

    rho: Positive | None = None
    lr: StepSize = 0.1
    local_epochs: Count = 3
    weights: Weights = "uniform"
    averaged: Pattern | None = None
    finetune_epochs: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._averaged = compile_pattern("averaged", self.averaged)

    @property
    def seeks_step_sum(self) -> bool:
        """Whether rho was left out, in the default form."""
        return self.rho is None and not self.published

    @property
    def penalty(self) -> float:
        """The rho in use."""
        return min(self.pull, _LARGEST_RHO) if self.rho is None else self.rho

    def rule_of(self, client_id: int) -> FedADMMRule:
        """Return a client's rule."""
        share = self.weight_of(client_id) * self.membership.num_initial
        return self.rule(self.published, self.penalty, share)
