"""Lp-Proj: personal models that agree in a few random projections, by gradient steps.

    minimise  sum_i min_theta ( f_i(theta) + lambda/2 ||P theta - w||^2 )     (p = 2), or with
                                lambda ||P theta - w||_1                      (p = 1)

pFedMe with P theta_i in the place of theta_i: a message has as many numbers as P has rows.

Lin, Han, Li, Zhang, "Personalized Federated Learning towards Communication Efficiency, Robustness
and Fairness", NeurIPS 2022; see docs/methods/lp-proj.md. The client is `clients.LpProjClient`.
`LpProjADMM` solves the problem with p = 2 by ADMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..maths.blocks import Arrays, Pattern, Spec, compile_pattern
from ..maths.checks import Count
from ..maths.projection import projected_block, projection
from ..maths.schedules import StepSize, rate_in
from ..maths.seeds import short
from ..runtime.messages.records import ClientInstruction, Reply
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.envelope import EnvelopeStrategy, check_outer_step
from .shared.models import OwnModelsStrategy

W = "w"
"""The name of the one array that travels."""


@dataclass
class LpProjState:
    """The server's variables.

    Attributes
    ----------
    w : ndarray of shape (dimension,)
    initial : Arrays
        The initial model, which clients start from.
    projection_seed : int
        Draws P.
    """

    w: NDArray[Any]
    initial: Arrays
    projection_seed: int


@dataclass(frozen=True)
class LpProjSGDInstruction(Instruction):
    """What a client gets: w, and before its first accepted reply the initial model."""

    anchor: Arrays
    start: Arrays | None
    lam: float
    lr: float
    outer_lr: float
    local_rounds: int
    inner_steps: int
    p: int
    projection_seed: int
    projected: list[str]
    upload: list[str] | None


class LpProj(OwnModelsStrategy, EnvelopeStrategy):
    """Federated learning with low-dimensional projections (Lp-Proj-1 and Lp-Proj-2).

    Parameters
    ----------
    p : {2, 1} (default: 2)
        The coupling: lambda/2 ||P theta - w||^2, or lambda ||P theta - w||_1, which is robust to
        outliers and chatters with an amplitude of about ``lr * lam``.
    dimension : int (default: 10)
        d_sub, the rows of P: what travels is so many numbers, both ways, after a client's first
        round (in that, it receives the initial model).
    lr : float or callable (default: 0.1)
        eta_p, the step size of theta_i.
    outer_lr : float or callable (default: 0.1)
        eta_l, the step size of w_i.
    local_rounds : int (default: 5)
        R, steps of w_i in a round.
    inner_steps : int (default: 20)
        K, steps of theta_i before each of these, each on a mini-batch of its own.
    unprojected : str, optional
        Regular expression searched in the arrays' names: arrays that P leaves out, as it does all
        buffers. They stay with the client and are trained on its loss alone.
    **base
        The parameters of `EnvelopeStrategy`. P follows from `seed`, so that it never travels.

    Notes
    -----
    There are personal models only, on their clients. What is global is w, `dimension` numbers that
    are no model: ``strategy.state.w``.

    Examples
    --------
    >>> strategy = LpProj(p=2, lam=1.0, lr=0.1, dimension=10)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "LpProj"
    paper: ClassVar = "Lin, Han, Li, Zhang, NeurIPS 2022"
    kinds: ClassVar = {"personal": "personal model"}
    message_type: ClassVar = LpProjSGDInstruction
    upload = Upload("mean")

    p: Literal[2, 1] = 2
    dimension: Count = 10
    lr: StepSize = 0.1
    outer_lr: StepSize = 0.1
    local_rounds: Count = 5
    inner_steps: Count = 20
    unprojected: Pattern | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._unprojected = compile_pattern("unprojected", self.unprojected)

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return f"Lp-Proj-{self.p}"

    def init_state(self, arrays: Arrays) -> LpProjState:
        """Start with theta_i^0 the initial model and w^0 = 0."""
        self._block = projected_block(arrays, self.trained, self._unprojected, self.dimension)
        block = self._block
        matrix = projection(short(self.seed), self.dimension, block.size, block.dtype.name)
        self._norm = float(np.linalg.norm(matrix, 2))  # ||P||
        self._check_steps(1)
        return LpProjState(np.zeros(self.dimension, self._block.dtype), arrays, short(self.seed))

    def _check_steps(self, server_round: int) -> None:
        """Refuse steps that diverge on any loss that is convex."""
        check_outer_step(self.lam, self.outer_lr, server_round)
        lr = rate_in(server_round, self.lr)
        step = lr * self.lam * self._norm**2
        if self.p == 2 and step >= 2:
            raise ValueError(
                f"lr * lam * ||P||^2 is {step:.3g} for a model of {self._block.size} projected "
                "numbers, expected less than 2: P theta would overshoot. Give an lr below "
                f"{lr * 2 / step:.2g}, or a smaller lam or dimension."
            )

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return w and P."""
        self._check_steps(server_round)
        state, names = self.state, self._block.names
        return {
            "anchor": {W: state.w},
            "projection_seed": state.projection_seed,
            "projected": names,
        }

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return the initial model before a client's first accepted reply."""
        start = self.state.initial if self.membership.is_new(client_id) else None
        return super().client_fields(client_id) | {"start": start}

    def upload_spec(self) -> Spec:
        """Return the shape of w_i."""
        return {W: ((self.dimension,), self._block.dtype)}

    def upload_reference(self, sent: ClientInstruction) -> Arrays:
        """Measure w_i from w."""
        return sent.groups["anchor"]

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set w to (1 - beta) w + beta (the mean of the sampled clients' w_i)."""
        self.state.w = self.moved({W: self.state.w}, replies, [W])[W]
