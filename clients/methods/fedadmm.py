"""The client of FedADMM; the strategy and the paper are in `fl_admm_strategies.FedADMM`."""

from __future__ import annotations

from fl_admm_strategies import FedADMM

from ..toolkit.round.proximal import ProximalClient


class FedADMMClient(ProximalClient):
    """Client of `FedADMM`: E epochs on its loss, pulled towards w - pi_i/rho.

    Parameters are those of `TorchClient`.
    """

    strategy = FedADMM
