"""FLAME: a personal model for every client and a global one, by ADMM on Moreau envelopes.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||theta_i - w_i||^2)   subject to   w_i = w

After a client's turn pi_i = a_i (theta_i - w_i) with a_i = lambda alpha_i (Lemma 3), so that w_i
follows from theta_i and pi_i. By default theta_i and w_i are minimised over jointly: (12), put into
the Lagrangian (10), leaves a pull of theta_i to w - pi_i/rho of the weight
kappa = lambda rho/(a_i + rho). ``published=True`` is the paper's iteration.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397: Algorithm 1, equations (11) to (14), (17), (18); see
docs/methods/flame.md. The client is `clients.FLAMEClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays, Pattern, compile_pattern
from ..maths.checks import Count, Fraction, Positive
from ..maths.schedules import StepSize
from ..runtime.algorithm import OnClient
from .shared.base import Weights
from .shared.consensus import ConsensusMethod
from .shared.rule import Row, Rule


@dataclass(frozen=True)
class FLAMERule(Rule):
    """theta_i, pi_i/rho and, by default, the w of its last turn; lambda, a_i and rho."""

    lam: float
    a: float
    rho: float

    @classmethod
    def keeps(cls, published: bool) -> dict[str, int]:
        """theta_i begins at w and pi_i at 0, as (33) wants."""
        return {"theta": 1, "dual": 0} if published else {"theta": 1, "dual": 0, "last_w": 1}

    def pull(self, row: Row, w: Any) -> tuple[Any, float]:
        """Return w_i and lambda (11); by default what is left of (10) without w_i."""
        if self.published:
            return self.copy(row), self.lam
        return w - row.dual, self.lam * self.rho / (self.a + self.rho)

    def start(self, row: Row, w: Any) -> Any:
        """Return theta_i; by default moved as w has moved since the client's last turn."""
        return row.theta if self.published else row.theta + (w - row.last_w)

    def move(self, row: Row, u: Any, w: Any) -> Row:
        """Return theta_i, and pi_i/rho by (12) and (13)."""
        dual = self.a / (self.a + self.rho) * (u - w + row.dual)
        return Row(theta=u, dual=dual, last_w=w)

    def copy(self, row: Row) -> Any:
        """Return w_i, by Lemma 3."""
        return row.theta - self.rho / self.a * row.dual


class FLAME(ConsensusMethod):
    """Federated learning by ADMM with Moreau envelopes (FLAME).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a personal model is held near the global one.
    rho : float, optional
        rho, the ADMM penalty parameter. Beside it stands a_i = lambda alpha_i: at rho = a_i, where
        all of the paper's experiments are, a client's message is theta_i itself
        (docs/methods/flame-notes.md, P1). By default such that kappa is 0.3 over the sum of the
        step sizes of a client's round, as FedADMM's rho is, and at most lambda/2, which is
        rho = a_i; with ``published=True`` lambda/m. The paper's Lagrangian is sure to decrease for
        convex f_i and exact steps from rho = 2.5616 a_i on (P2).
    lr : float or callable (default: 0.1)
        eta, the step size of the theta-step, for the plain loss: alpha_i does not scale it. With a
        `tolerance` 1/(L + lambda) is safe.
    local_epochs : int (default: 3)
        H, passes over the data in a round; unused with a `tolerance`.
    tolerance : float, optional
        epsilon_i^0: full-gradient steps until the squared norm of alpha_i times the gradient is at
        most epsilon_i (17), in place of `local_epochs`. The paper gives no value.
    tolerance_decay : float (default: 0.9)
        upsilon_i: epsilon_i <- upsilon_i epsilon_i in every round of client i, the first included
        (18). The paper gives no value.
    max_steps : int (default: 1000)
        Steps after which the accuracy test is given up; the clients' metric ``residual`` tells.
    weights, averaged
        As in `FedADMM`.
    **base
        The parameters of `ConsensusMethod`.

    Notes
    -----
    The clients report three kinds of models (section VI-A): ``personal``, ``global``, and the
    hybrid, where every client takes the better of the two for itself: ``hm-val``, chosen on
    validation data of its own, and ``hm-oracle``, chosen on the test data as the paper's tables
    are, which is too good to be true; see `clients.FLAMEClient`.

    Examples
    --------
    >>> strategy = FLAME(lam=1.0, lr=0.1)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    >>> personal = strategy.personal_arrays(client_id=3)
    """

    method: ClassVar = "FLAME"
    paper: ClassVar = "Zhu, Zeng, Wang, Sun, Li, Yao, Peng, arXiv:2407.16397"
    rule: ClassVar = FLAMERule
    own: ClassVar = "theta"
    kinds: ClassVar = {
        "personal": "personal model",
        "global": "one global model",
        "hm-val": "hybrid, chosen on validation data",
        "hm-oracle": "hybrid, chosen on the test data",
    }

    lam: Positive = 1.0
    rho: Positive | None = None
    lr: StepSize = 0.1
    local_epochs: Count = 3
    tolerance: Positive | None = None
    tolerance_decay: Fraction = 0.9
    max_steps: Count = 1000
    weights: Weights = "uniform"
    averaged: Pattern | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._averaged = compile_pattern("averaged", self.averaged)

    @property
    def seeks_step_sum(self) -> bool:
        """Whether rho was left out, in the default form with a number of epochs."""
        return self.rho is None and not self.published and self.tolerance is None

    @property
    def penalty(self) -> float:
        """The rho in use: kappa a/(lambda - kappa) with the mean a_i, where it was left out."""
        if self.rho is not None:
            return self.rho
        a = self.lam / self.membership.num_initial
        kappa = self.lam / 2 if self.published else min(self.pull, self.lam / 2)
        return kappa * a / (self.lam - kappa)

    def rule_of(self, client_id: int) -> FLAMERule:
        """Return a client's rule."""
        a = self.lam * self.weight_of(client_id)
        return FLAMERule(self.published, self.lam, a, self.penalty)

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Add epsilon_i (18) and alpha_i, where steps are accuracy-tested."""
        given = super().client_fields(client_id)
        if self.tolerance is None:
            return given
        turn = int(self.state.clients[client_id].turns) + 1
        given["tolerance"] = self.tolerance * self.tolerance_decay**turn
        return given | {"loss_weight": self.weight_of(client_id)}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w or theta_i; the client says which of the two is its hybrid model."""
        if kind.startswith("hm"):
            return OnClient("The client takes the better of its personal and the global model.")
        return super().model(kind, client_id)
