"""ADMM methods for personalised and clustered federated learning, as Flower strategies."""

from .fedadmm import FedADMM
from .fedapm import FedAPM
from .fedgia import FedGiA
from .fedmc_admm import FedMCADMM, initial_item_factors
from .flame import FLAME
from .fpfc import FPFC
from .inprocess import InProcessGrid, run_in_process
from .legacy import LegacyStrategy
from .lp_proj import LpProjADMM
from .penalties import L1, MCP, SmoothedSCAD
from .regularizers import L1Norm, SquaredL2
from .strategy import StatefulStrategy

__all__ = [
    "FLAME",
    "FPFC",
    "L1",
    "MCP",
    "FedADMM",
    "FedAPM",
    "FedGiA",
    "FedMCADMM",
    "InProcessGrid",
    "L1Norm",
    "LegacyStrategy",
    "LpProjADMM",
    "SmoothedSCAD",
    "SquaredL2",
    "StatefulStrategy",
    "initial_item_factors",
    "run_in_process",
]
