"""Ditto: FedAvg for one global model, and beside it a personal model that is pulled towards it.

    v_i = argmin f_i(v) + lambda/2 ||v - w||^2,    w by FedAvg

The personal models never leave their clients and do not influence w.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, arXiv:2012.04221: Algorithm 1; see docs/methods/ditto.md. The client is `clients.DittoClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..maths.blocks import Arrays
from ..maths.checks import Count, NotNegative
from ..maths.schedules import StepSize
from ..runtime.messages.schema import Instruction
from .shared.base import Weights
from .shared.models import OneModelStrategy, OwnModelsStrategy, OwnModelState
from .shared.robust import RobustStrategy


@dataclass(frozen=True)
class DittoInstruction(Instruction):
    """What a client gets: w, and v_i^0 before its first accepted upload."""

    model: Arrays
    start: Arrays | None
    lam: float
    lr: float
    local_epochs: int
    personal_lr: float
    personal_epochs: int


class Ditto(RobustStrategy, OneModelStrategy, OwnModelsStrategy):
    """Federated learning with a global model and personal ones beside it (Ditto).

    Parameters
    ----------
    lam : float (default: 1.0)
        lambda, how strongly a personal model is held near the global one; 0 is local training.
    lr : float or callable (default: 0.1)
        eta_g, the step size of the global model's local work.
    local_epochs : int (default: 1)
        K_g, its local epochs.
    personal_lr : float or callable, optional
        eta_p, the step size of the personal model. By default `lr`.
    personal_epochs : int, optional
        K_p, its local epochs. By default `local_epochs`.
    weights : {"uniform", "size"} (default: "uniform")
        Whether w is the plain mean of the participants' models or weighted by their examples.
    **base
        The parameters of `RobustStrategy`; the paper's experiments have robust rules, too.

    Notes
    -----
    Both steps of a round start from what the client has when w arrives: the global one from w, the
    personal one from v_i, pulled to that same w. A client that lost its v_i starts again from w^0,
    a client that joins in mid-run, of which the paper does not speak, from w.

    Examples
    --------
    >>> strategy = Ditto(lam=1.0, lr=0.1, fraction_train=0.5)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "Ditto"
    paper: ClassVar = "Li, Hu, Beirami, Smith, ICML 2021, arXiv:2012.04221"
    kinds: ClassVar = {"personal": "personal model", "global": "one global model"}
    message_type: ClassVar = DittoInstruction

    lam: NotNegative = 1.0
    lr: StepSize = 0.1
    local_epochs: Count = 1
    personal_lr: StepSize | None = None
    personal_epochs: Count | None = None
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "size" and self.aggregation != "mean":
            raise ValueError(
                f"weights is 'size', expected 'uniform' beside aggregation={self.aggregation!r}, "
                "in which all uploads have the same weight."
            )

    def init_state(self, arrays: Arrays) -> OwnModelState:
        """Start with w^0 and all v_i^0 the initial model."""
        return OwnModelState(arrays, arrays)

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return w, and how v_i is trained."""
        epochs = self.personal_epochs or self.local_epochs
        own = {"personal_lr": self.personal_lr or self.lr, "personal_epochs": epochs}
        return super().shared_fields(server_round) | own

    def client_fields(self, client_id: int) -> dict[str, Any]:
        """Return v_i^0 for a client without a model of its own."""
        initial, w = self.state.initial, self.state.model
        return {"start": self.membership.start_of(client_id, initial, w)}
