"""LG-FedAvg: every client learns its own features, and all share the layers above them.

It is FedSim with the lower layers personal. Liang, Liu, Ziyin, Salakhutdinov, Morency, "Think
Locally, Act Globally: Federated Learning with Local and Global Representations", NeurIPS 2019
workshop, arXiv:2001.01523: Algorithm 1; see docs/methods/lg-fedavg.md. The client is
`clients.LGFedAvgClient`.
"""

from __future__ import annotations

from typing import ClassVar

from .fedsim import FedSim


class LGFedAvg(FedSim):
    """Federated learning with local features and a global head (LG-FedAvg).

    Parameters
    ----------
    personal : str or None
        Regular expression searched in the names of the arrays: the lower layers, which stay with
        the clients. `clients.input_layers(model, n)` writes it. None: nothing is personal, which
        is FedAvg.
    **base
        The parameters of `FedSim`.

    Examples
    --------
    >>> strategy = LGFedAvg(input_layers(model, 1), lr=0.1)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)
    """

    method: ClassVar = "LGFedAvg"
    paper: ClassVar = (
        "Liang, Liu, Ziyin, Salakhutdinov, Morency, NeurIPS 2019 workshop, arXiv:2001.01523"
    )
    title = "LG-FedAvg"
