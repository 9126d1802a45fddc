"""ADMM methods for personalised and clustered federated learning, as Flower strategies."""

from .fedadmm import FedADMM
from .fedgia import FedGiA
from .fpfc import FPFC
from .inprocess import InProcessGrid, run_in_process
from .legacy import LegacyStrategy
from .penalties import L1, MCP, SmoothedSCAD
from .strategy import StatefulStrategy

__all__ = [
    "FPFC",
    "L1",
    "MCP",
    "FedADMM",
    "FedGiA",
    "InProcessGrid",
    "LegacyStrategy",
    "SmoothedSCAD",
    "StatefulStrategy",
    "run_in_process",
]
