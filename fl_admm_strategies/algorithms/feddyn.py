"""FedDyn: every client's loss gets a linear and a quadratic term, so that the minimisers agree.

It is FedADMM's default form: theta is w, alpha is rho, grad_i is -pi_i and h the mean of the -pi_i.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, arXiv:2111.04263: Algorithm 1; see docs/methods/feddyn.md. The client
is `clients.FedDynClient`.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from ..maths.checks import Positive
from .fedadmm import FedADMM
from .shared.base import Duals


class FedDyn(FedADMM):
    """Federated learning with dynamic regularization (FedDyn).

    Parameters
    ----------
    alpha : float, optional
        alpha > 0, the weight of the quadratic term; the paper has 0.1, 0.01 and 0.001. By default
        as FedADMM's rho.
    duals : {"strategy", "client"} (default: "client")
        Where the grad_i live. "client", as in the paper: when a client has left, or has lost its
        grad_i, these and h begin again at 0.
    **base
        The parameters of `FedADMM`, without `rho` and `published`.

    Examples
    --------
    >>> strategy = FedDyn(alpha=0.1, lr=0.1, fraction_train=0.2)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "FedDyn"
    paper: ClassVar = (
        "Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, ICLR 2021, arXiv:2111.04263"
    )
    form = ""  # its paper has no other

    alpha: Positive | None = None
    duals: Duals = "client"
    rho: Positive | None = field(init=False, default=None)
    published: bool = field(init=False, default=False)

    @property
    def seeks_step_sum(self) -> bool:
        """Whether alpha was left out."""
        return self.alpha is None

    @property
    def penalty(self) -> float:
        """alpha, or what stands in its place."""
        return super().penalty if self.alpha is None else self.alpha
