"""The client of LG-FedAvg; the strategy and the paper are in `fl_admm_strategies.LGFedAvg`."""

from __future__ import annotations

from fl_admm_strategies import LGFedAvg

from .fedsim import FedSimClient


class LGFedAvgClient(FedSimClient):
    """Client of `LGFedAvg`: `FedSimClient` with personal lower layers."""

    strategy = LGFedAvg
