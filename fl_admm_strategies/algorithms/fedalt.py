"""FedAlt: a model of which a part is personal; clients train their part first, then the shared one.

    minimise  sum_i alpha_i f_i(u, v_i)

`FedSim` trains both at once. The personal parts v_i never leave their clients.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated Learning with Partial Model
Personalization", ICML 2022, arXiv:2204.03809: Algorithms 1 and 2; see docs/methods/fedalt.md. The
client is `clients.FedAltClient`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..maths.blocks import Pattern
from ..maths.checks import Count
from ..maths.schedules import StepSize
from .shared.split import SplitInstruction, SplitStrategy


@dataclass(frozen=True)
class FedAltInstruction(SplitInstruction):
    """What a client gets: u, and how to train v_i, then u_i."""

    personal_lr: float
    personal_epochs: int


class FedAlt(SplitStrategy):
    """Federated learning with a personal part of the model, trained in turn (FedAlt).

    Parameters
    ----------
    personal : str or None
        Regular expression searched in the names of the arrays: v_i, which stays with the clients
        and may have other shapes on each of them. `clients.input_layers`, `output_layers` and
        `split_input` write it. None: nothing is personal, which is FedAvg.
    personal_lr : float or callable, optional
        eta_v, the step size of the personal part. By default `lr`.
    personal_epochs : int, optional
        tau_v, its local epochs. By default `local_epochs`.
    **base
        The parameters of `SplitStrategy`.

    Notes
    -----
    As with `FedAPM`, v_i^0 is what the client's own model holds when it is built, and the global
    model has the shared arrays only.

    Examples
    --------
    >>> strategy = FedAlt(output_layers(model, 1), lr=0.1, fraction_train=0.3)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=300)
    """

    method: ClassVar = "FedAlt"
    paper: ClassVar = "Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, ICML 2022, arXiv:2204.03809"
    message_type: ClassVar = FedAltInstruction

    personal: Pattern | None = field(kw_only=False)
    personal_lr: StepSize | None = None
    personal_epochs: Count | None = None

    def shared_fields(self, server_round: int) -> dict[str, Any]:
        """Return u, and how v_i is trained."""
        epochs = self.personal_epochs or self.local_epochs
        own = {"personal_lr": self.personal_lr or self.lr, "personal_epochs": epochs}
        return super().shared_fields(server_round) | own
