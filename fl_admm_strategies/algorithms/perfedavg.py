"""Per-FedAvg: a global model that fits each client after one gradient step on its data.

    minimise  (1/m) sum_i f_i(w - alpha grad f_i(w))

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, arXiv:2002.07948: Algorithm 1 and its
approximations; see docs/methods/perfedavg.md. The client is `clients.PerFedAvgClient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..maths.blocks import Arrays
from ..maths.checks import Count, Positive
from ..maths.schedules import StepSize, StepSizeOrZero
from ..runtime.algorithm import OnClient
from ..runtime.messages.schema import Instruction
from ..runtime.uploads import Upload
from .shared.base import Weights
from .shared.models import OneModelStrategy


@dataclass(frozen=True)
class PerFedAvgInstruction(Instruction):
    """What a client gets: w."""

    model: Arrays
    mode: str
    alpha: float
    lr: float
    local_steps: int
    delta: float | None


@dataclass(frozen=True)
class PerFedAvgEvaluation(Instruction):
    """The model to evaluate, as it is and after one step of alpha."""

    global_: Arrays
    alpha: float


class PerFedAvg(OneModelStrategy):
    """Federated learning of an initialisation (Per-FedAvg).

    Parameters
    ----------
    mode : {"hf", "fo"} (default: "hf")
        How the gradient of f_i(w - alpha grad f_i(w)) is computed: its Hessian-vector product by
        the difference of two gradients (Per-FedAvg (HF)), or without that product (FO). What the
        code of some papers calls Per-FedAvg, FedAvg adapted only in the end, is `FedAvgFT`.
    alpha : float or callable (default: 0.01)
        alpha, the step size of the adaptation.
    lr : float or callable (default: 0.1)
        beta, the step size of w; the paper has 0.001.
    local_steps : int (default: 10)
        tau, steps of w in a round, each with mini-batches of its own: two for "fo", else three.
    delta : float, optional
        Half the distance of the two gradients of "hf", in lengths of g, the gradient after the
        adaptation: they are taken at w + delta g and w - delta g. By default 0.001/max(1, ||g||).
    weights : {"uniform", "size"} (default: "uniform")
        Whether w is the plain mean of the participants' models or weighted by their examples.
    **base
        The parameters of `StatefulStrategy`.

    Notes
    -----
    Clients keep nothing. To be evaluated, w is adapted by one full-gradient step of size alpha on
    the client's training data. The adapted models are evaluated and not kept:
    ``clients.personalise`` makes one of the global model, with ``lr=alpha, epochs=1,
    full_batch=True``.

    Examples
    --------
    >>> strategy = PerFedAvg(mode="hf", alpha=0.05, lr=0.1, fraction_train=0.2)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "PerFedAvg"
    paper: ClassVar = "Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv:2002.07948"
    kinds: ClassVar = {"adapted": "adapted by one step", "global": "one global model"}
    message_type: ClassVar = PerFedAvgInstruction
    upload = Upload("mean", stateless=True)

    mode: Literal["hf", "fo"] = "hf"
    alpha: StepSizeOrZero = 0.01
    lr: StepSize = 0.1
    local_steps: Count = 10
    delta: Positive | None = None
    weights: Weights = "uniform"

    @property
    def title(self) -> str:
        """The method's name as its paper writes it."""
        return f"Per-FedAvg ({self.mode})"

    def evaluate_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> dict[int, PerFedAvgEvaluation]:
        """Send w, to be evaluated as it is and adapted."""
        evaluation = PerFedAvgEvaluation.of(self, server_round, global_=self.state.model)
        return dict.fromkeys(client_ids, evaluation)

    def model(self, kind: str, client_id: int) -> Arrays | OnClient:
        """Return w; adapted models are made where the data are."""
        if kind == "adapted":
            return OnClient("Adapt the global model there: clients.personalise(...).")
        return super().model(kind, client_id)
