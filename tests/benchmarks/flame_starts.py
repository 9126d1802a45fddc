"""FLAME with other starts of its local steps: what docs/results/flame-start compares."""

from __future__ import annotations

from typing import Any, ClassVar

from clients import FLAMEClient
from fl_admm_strategies import FLAME
from fl_admm_strategies.algorithms.flame import FLAMERule
from fl_admm_strategies.algorithms.shared.rule import Row


class GlobalRule(FLAMERule):
    """Begins at w."""

    def start(self, row: Row, w: Any) -> Any:
        return w


class FromGlobal(FLAME):
    """FLAME whose local steps begin at w."""

    rule: ClassVar = GlobalRule


class FromGlobalClient(FLAMEClient):
    """Its client."""

    strategy = FromGlobal


class DualRule(FLAMERule):
    """Begins at w + pi_i/a_i, which is w + theta_i - w_i."""

    def start(self, row: Row, w: Any) -> Any:
        return w + self.rho / self.a * row.dual


class FromDual(FLAME):
    """FLAME whose local steps begin at w + pi_i/a_i."""

    rule: ClassVar = DualRule


class FromDualClient(FLAMEClient):
    """Its client."""

    strategy = FromDual
