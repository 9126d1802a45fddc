"""How the app builds each algorithm's strategy and client out of an experiment's settings."""

from __future__ import annotations

import math
from typing import Any, Literal

from flwr.app import Context
from pydantic import Field
from torch import nn

from clients import FPFCClient
from clients.torch_client import TorchClient
from fl_admm_strategies import FPFC, L1, MCP, SmoothedSCAD
from fl_admm_strategies.penalties import Penalty

from .section import Section


class FPFCSettings(Section):
    """The table ``[algorithm]`` of an experiment with FPFC."""

    name: Literal["fpfc"]
    penalty: Literal["scad", "l1", "mcp"] = "scad"
    lam: float
    a: float = 3.7
    xi: float = 1e-4
    gamma: float = 3.0
    rho: float = 1.0
    lr: float
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    lr_decay_every: int = Field(default=1, ge=1)
    local_epochs: int = Field(default=10, ge=1)
    clustered: str | None = None
    nu: float = 0.1

    @property
    def title(self) -> str:
        """The algorithm's name as the paper's tables have it."""
        return {"scad": "FPFC", "l1": "FPFC-l1", "mcp": "FPFC-MCP"}[self.penalty]

    def strategy(self, **base: Any) -> FPFC:
        """Build the strategy; `base` are the parameters of `StatefulStrategy`."""
        penalty: Penalty
        if self.penalty == "scad":
            penalty = SmoothedSCAD(self.lam, a=self.a, xi=self.xi)
        elif self.penalty == "l1":
            penalty = L1(self.lam)
        else:
            penalty = MCP(self.lam, gamma=self.gamma)

        def decayed(server_round: int) -> float:
            # Rounds count from 1 here and from 0 in the paper (specs 6.2 A15).
            return self.lr * self.lr_decay ** math.floor((server_round - 1) / self.lr_decay_every)

        return FPFC(
            penalty,
            rho=self.rho,
            lr=self.lr if self.lr_decay == 1.0 else decayed,
            local_epochs=self.local_epochs,
            clustered=self.clustered,
            nu=self.nu,
            **base,
        )

    def client(self, context: Context, model: nn.Module, **local: Any) -> TorchClient:
        """Build a client; `local` are the parameters of `TorchClient`."""
        return FPFCClient(context, model, **local)


AlgorithmSettings = FPFCSettings
"""One algorithm so far; a union discriminated by `name` when there are more."""
