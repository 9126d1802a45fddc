"""ADMM methods for personalised and clustered federated learning, as Flower strategies."""

from .algorithms.ditto import Ditto
from .algorithms.fedadmm import FedADMM
from .algorithms.fedapm import FedAPM
from .algorithms.fedgia import FedGiA
from .algorithms.fedmc_admm import FedMCADMM, initial_item_factors
from .algorithms.fedprox import FedProx
from .algorithms.flame import FLAME
from .algorithms.fpfc import FPFC
from .algorithms.local import Local
from .algorithms.lp_proj import LpProjADMM
from .hosting.inprocess import InProcessGrid, run_in_process
from .hosting.legacy import LegacyStrategy
from .maths.penalties import L1, MCP, SmoothedSCAD
from .maths.regularizers import L1Norm, SquaredL2
from .maths.schedules import StepDecay
from .runtime.maker import made_by
from .runtime.sampled import SampledStrategy
from .runtime.strategy import StatefulStrategy

__all__ = [
    "FLAME",
    "FPFC",
    "L1",
    "MCP",
    "Ditto",
    "FedADMM",
    "FedAPM",
    "FedGiA",
    "FedMCADMM",
    "FedProx",
    "InProcessGrid",
    "L1Norm",
    "LegacyStrategy",
    "Local",
    "LpProjADMM",
    "SampledStrategy",
    "SmoothedSCAD",
    "SquaredL2",
    "StatefulStrategy",
    "StepDecay",
    "initial_item_factors",
    "made_by",
    "run_in_process",
]
