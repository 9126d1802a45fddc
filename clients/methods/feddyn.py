"""The client of FedDyn; the strategy and the paper are in `fl_admm_strategies.FedDyn`."""

from __future__ import annotations

from fl_admm_strategies import FedDyn

from ..toolkit.round.proximal import ProximalClient


class FedDynClient(ProximalClient):
    """Client of `FedDyn`: E epochs from theta on its regularised loss.

    Parameters are those of `TorchClient`.
    """

    strategy = FedDyn
