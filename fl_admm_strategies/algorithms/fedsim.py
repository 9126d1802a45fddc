"""FedSim: a model of which a part is personal; clients train both parts at once.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated Learning with Partial Model
Personalization", ICML 2022, arXiv:2204.03809: Algorithms 1 and 3; see docs/methods/fedalt.md. With
the upper layers personal it is FedPer. The client is `clients.FedSimClient`.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from ..maths.blocks import Pattern
from .shared.split import SplitStrategy


class FedSim(SplitStrategy):
    """Federated learning with a personal part of the model, trained at the same time (FedSim).

    Parameters
    ----------
    personal : str or None
        Regular expression searched in the names of the arrays: v_i, which stays with the clients,
        as in `FedAlt`.
    **base
        The parameters of `SplitStrategy`.
    """

    method: ClassVar = "FedSim"
    paper: ClassVar = "Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, ICML 2022, arXiv:2204.03809"

    personal: Pattern | None = field(kw_only=False)
