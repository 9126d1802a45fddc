"""Lp-Proj-2 by ADMM: personal models that agree in a few random projections, and nowhere else.

    minimise  sum_i alpha_i (f_i(theta_i) + lambda/2 ||P theta_i - w_i||^2)   subject to   w_i = w

It is FLAME's rule with P theta_i in the place of theta_i: a message has as many numbers as P has
rows.

Zhu, Zeng, Wang, Sun, Li, Yao, Peng, "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness", arXiv:2407.16397, appendix C: Algorithm 2, equations (182) to (188), with
p = 2; see docs/methods/lp-proj-admm.md. The client is `clients.LpProjADMMClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays, Pattern, Spec, compile_pattern
from ..maths.checks import Count, Positive
from ..maths.projection import projected_block, projection
from ..maths.schedules import StepSize
from ..maths.seeds import short
from ..runtime.algorithm import OnClient
from .flame import FLAMERule
from .shared.base import Weights
from .shared.consensus import ConsensusInstruction, ConsensusMethod
from .shared.models import OwnModelEvaluation, on_client

IMAGE = "P theta"
"""The name of the one array that a client uploads."""


@dataclass(frozen=True)
class LpProjInstruction(ConsensusInstruction):
    """What a client gets: w, and before its first accepted upload the initial model."""

    initial: Arrays | None
    lr: float
    local_epochs: int
    projection_seed: int
    projected: list[str]


class LpProjADMM(ConsensusMethod):
    """Federated learning with low-dimensional projections, by ADMM (Lp-Proj-2).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a projected personal model is held near the global variable.
    rho : float, optional
        rho, the ADMM penalty parameter; lambda/m by default.
    lr : float or callable (default: 0.1)
        eta, the clients' step size.
    local_epochs : int (default: 3)
        H, passes over the data in a round.
    dimension : int (default: 10)
        d_sub, the rows of P: what travels is so many numbers, both ways, after a client's first
        round (in that, it receives the initial model).
    unprojected : str, optional
        Regular expression searched in the arrays' names: arrays that P leaves out, as it does all
        buffers. They stay with the client and are trained on its loss alone.
    weights
        As in `FedADMM`.
    **base
        The parameters of `ConsensusMethod`, of which `published` is True by default. P follows from
        `seed`, so that it never travels.

    Notes
    -----
    There are personal models only, on their clients. What is global is w, `dimension` numbers that
    are no model: ``strategy.state.w``.

    Examples
    --------
    >>> strategy = LpProjADMM(lam=1.0, lr=0.1, dimension=10)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "LpProjADMM"
    paper: ClassVar = "Zhu, Zeng, Wang, Sun, Li, Yao, Peng, arXiv:2407.16397, appendix C"
    kinds: ClassVar = {"personal": "personal model"}
    message_type: ClassVar = LpProjInstruction
    rule: ClassVar = FLAMERule
    default_norm = None  # the paper's form is the default: far uploads are refused in it too
    title = "ADMM-Lp-Proj-2"

    lam: Positive = 1.0
    rho: Positive | None = None
    lr: StepSize = 0.1
    local_epochs: Count = 3
    dimension: Count = 10
    unprojected: Pattern | None = None
    weights: Weights = "uniform"
    published: bool = True

    @property
    def penalty(self) -> float:
        """The rho in use."""
        return self.lam / self.membership.num_initial if self.rho is None else self.rho

    def rule_of(self, client_id: int) -> FLAMERule:
        """Return a client's rule."""
        a = self.lam * self.weight_of(client_id)
        return FLAMERule(self.published, self.lam, a, self.penalty)

    def agreed(self, arrays: Arrays) -> Arrays:
        """Return P theta^0."""
        apart = compile_pattern("unprojected", self.unprojected)
        block = projected_block(arrays, self.trained, apart, self.dimension)
        self._initial, self._projected = arrays, block.names
        matrix = projection(short(self.seed), self.dimension, block.size, block.dtype.name)
        return {IMAGE: matrix @ block.vector(arrays)}

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Add P."""
        drawn = {"projection_seed": short(self.seed), "projected": self._projected}
        return super().shared_fields(server_round) | drawn

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Add the initial model before a client's first accepted upload."""
        initial = self._initial if self.membership.is_new(client_id) else None
        return super().client_fields(client_id) | {"initial": initial}

    def upload_spec(self) -> Spec:
        """Return the shape of P theta_i."""
        return self._block.spec

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, OwnModelEvaluation]:
        """Ask for the models that the clients have."""
        is_new = self.membership.is_new
        return {c: OwnModelEvaluation(self._initial if is_new(c) else {}, None) for c in client_ids}

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Personal models stay with their clients."""
        return on_client(self)
