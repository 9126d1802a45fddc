"""FedMC-ADMM: federated matrix completion, for recommenders.

Each client holds the ratings M_i of its own users; all rate the same items. The factors U_i of the
users stay with their client, the factors V of the items are shared:

    minimise  (1/p) sum_i [1/2 |P_i(M_i - U_i V)|_F^2 + R_i(U_i)] + R(V)              (1), (2)

where P_i keeps the observed ratings. Every client has a copy W_i of V, and W_i = V is kept by ADMM.

Hytla, Nghia, Phan, Rice, "A Linearized Alternating Direction Multiplier Method for Federated Matrix
Completion Problems", arXiv:2503.12733: Algorithm 1; see docs/methods/fedmc-admm.md. Here are (13)
and (16); (14) and (15) are the client's, `clients.FedMCADMMClient`, and so are the exact minimisers
that take their place by default (docs/methods/fedmc-admm-notes.md, P14).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays
from ..maths.checks import Count, Positive
from ..runtime.algorithm import OnClient
from .fedadmm import FedADMMRule
from .shared.completion import ExactCompletion
from .shared.consensus import ConsensusInstruction, ConsensusMethod


@dataclass(frozen=True)
class FedMCInstruction(ConsensusInstruction):
    """What a client gets beside its rule: what draws its U_i^0, and what its steps are."""

    factor_seed: int
    factor_scale: float
    inner_steps: int
    feedback: str
    confidence: float


class FedMCADMM(ConsensusMethod, ExactCompletion):
    """Federated matrix completion by ADMM (FedMC-ADMM).

    A client's two steps in a round are the minimisers in U_i, at V, and in W_i, with biases of
    users and items and the client's mean rating in the model. The objective is a sum over the
    clients, not their mean, so that no weight depends on their number; the clients' regulariser
    must be `SquaredL2`. With ``published=True`` they are the paper's proximal gradient steps on its
    objective, without biases.

    The initial arrays are V^0 alone, of shape (r, n): see `initial_item_factors`. With biases the
    last row are the items', so that the rank is r - 1.

    Parameters
    ----------
    regularizer : Regularizer
        R, on the items' factors: `SquaredL2(gamma)`, `L1Norm(gamma)`, or an object of your own with
        a proximal operator. The clients have one for their users' factors.
    beta : float (default: 1.0)
        beta, the ADMM penalty parameter; the paper does not say which it used (see Notes).
    inner_steps : int (default: 10)
        N, with ``published=True``: proximal gradient steps of a client on each of its two blocks in
        a round.
    **base
        The parameters of `ConsensusMethod` (u_i, w and pi_i are W_i, V and Y_i here) and of
        `ExactCompletion`; `init_scale` is for ``published=True``.

    Notes
    -----
    Evaluation reports ``loss``, Phi (17), ``rmse``, in stars, and what else `CompletionStrategy`
    says. They are the paper's with ``fraction_evaluate=1``.

    With ``published=True`` two settings of what the paper leaves open work
    (docs/methods/fedmc-admm-notes.md, P1): ``beta=1`` and ``init_scale=1`` on ratings as they are,
    and that of the authors' code, ``beta=1e4`` and ``init_scale=2e-4`` on standardised ratings. A
    beta well above |U^T U|_F / p freezes V, one far below is unstable. The bound on beta of
    Theorems 4.7 and 4.8 (a max where the paper prints min) is some five orders above what works
    best, so it is not checked. The duals start at Y_i = 0, as in the authors' code (P3).

    U_i never leaves its client. One that lost it starts again at U_i^0, which is drawn from a seed
    in the message.

    A client that connects in mid-run starts with W_i = V, Y_i = 0 and counts in the mean from its
    first accepted upload. When a client has left, its Z_i leaves the mean. In the paper's objective
    p stays what it was at the start, in the clients' steps and in that of R's proximal operator:
    with p' clients this is Algorithm 1 for p'/p times (2), so that the minimiser is that of the p'
    clients and no Y_i changes its scale.

    That U_i stays is no promise of privacy: by Lemma 4.5 Y_i is a gradient with a proximal term,
    from which something can be inferred about the ratings. With ``duals="client"`` the
    server needs no more than a sum over the clients, which secure aggregation can give it.

    Examples
    --------
    >>> strategy = FedMCADMM(SquaredL2(8.0), fraction_train=0.1, seed=0)
    >>> result = strategy.start(grid, initial_item_factors(5, 3706, seed=0), num_rounds=20)
    >>> rmse = result.evaluate_metrics_clientapp[20]["rmse"]
    """

    method: ClassVar = "FedMCADMM"
    paper: ClassVar = "Hytla, Nghia, Phan, Rice, arXiv:2503.12733"
    kinds: ClassVar = ExactCompletion.kinds
    rule: ClassVar = FedADMMRule
    message_type: ClassVar = FedMCInstruction
    title = "FedMC-ADMM"

    beta: Positive = 1.0
    inner_steps: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published and self.feedback != "explicit":
            raise ValueError(
                f"feedback is {self.feedback!r}, expected 'explicit' with published=True, the "
                "paper's iteration. Leave out one of the two."
            )

    @property
    def is_summed(self) -> bool:
        """Whether the objective is a sum over the clients."""
        return not self.published

    @property
    def solver_settings(self) -> dict[str, Any]:
        """What the clients solve for."""
        return {} if self.published else super().solver_settings

    @property
    def has_biases(self) -> bool:
        """Whether the last row of V are biases."""
        return not self.published and super().has_biases

    @property
    def penalty(self) -> float:
        """The beta in use."""
        return self.beta

    def rule_of(self, client_id: int) -> FedADMMRule:
        """Return a client's rule; f_i has the share 1/p in the paper's objective."""
        share = 1 / self.membership.num_initial if self.published else 1.0
        return FedADMMRule(self.published, self.beta, share)

    def agreed(self, arrays: Arrays) -> Arrays:
        """Return V^0."""
        return dict.fromkeys(arrays, self.first_factors(arrays))

    def center(self, mean: NDArray[np.float64]) -> NDArray[Any]:
        """Return prox_{R/(p beta)} (16): (68) for the squared l2 norm, (73) for the l1 norm."""
        count = self.membership.num_initial if self.published else len(self.membership)
        v = self.regularizer.prox(mean.reshape(self._shape), 1 / (count * self.beta))
        return np.asarray(v.ravel())

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Add what draws U_i^0."""
        return super().client_fields(client_id) | self.first_users(client_id)

    @property
    def item_factors(self) -> NDArray[Any]:
        """V, shape (r, n)."""
        return np.asarray(self.state.w.reshape(self._shape))

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return V; the users' factors are private to their client."""
        return ExactCompletion.model(self, kind, client_id)
