"""What FLAME and ADMM for Lp-Proj share: the strategy's side of the step of `maths.moreau`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...maths.checks import Positive
from ...maths.clienttable import ClientRow
from ...maths.moreau import change_of, messages, moved
from .base import KeptMessages, WeightedStrategy


class MoreauStrategy(KeptMessages, WeightedStrategy):
    """Base of the methods whose clients upload theta_i, of which w_i and the message follow.

    The state's table has theta_i in the column `uploaded`, w_i in ``local_w``, and ``alpha``.

    Parameters
    ----------
    lam : float
        lambda, how strongly theta_i is held near w_i.
    **base
        The parameters of `WeightedStrategy`.
    """

    uploaded: ClassVar[str]

    lam: Positive

    @property
    def penalty(self) -> float:
        """The rho that is used."""
        raise NotImplementedError

    @property
    def _of_participants(self) -> bool:
        """Whether a message is pi_i/rho; see `Consensus`."""
        return False

    def _advance(
        self, row: ClientRow, uploaded: NDArray[Any], part: slice = slice(None)
    ) -> NDArray[Any]:
        """Move a part of a client's variables to its new theta_i; return its message's change."""
        theta, local_w = getattr(row, self.uploaded)[part], row.local_w[part]
        a, w = self.lam * float(row.alpha), self.state.consensus.w[part]
        rho, over = self.penalty, self._of_participants
        dual = a * (theta - local_w)
        new = moved(uploaded, dual, w, np.empty_like(local_w), a=a, rho=rho)
        change = change_of(uploaded, new, dual, local_w, w, a=a, rho=rho, of_participants=over)
        theta[:], local_w[:] = uploaded, new
        return change

    def _messages(self, client_ids: Sequence[int]) -> NDArray[Any]:
        theta, local_w, alpha = (
            self.state.clients.rows(name, client_ids)
            for name in (self.uploaded, "local_w", "alpha")
        )
        a, over = self.lam * alpha, self._of_participants
        return messages(theta, local_w, a=a, rho=self.penalty, of_participants=over)
