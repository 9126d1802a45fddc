"""ADMM methods for personalised and clustered federated learning, as Flower strategies."""

from .algorithms.base import OwnModelEvaluation
from .algorithms.ditto import Ditto, DittoInstruction
from .algorithms.fedadmm import FedADMM, FedADMMInstruction
from .algorithms.fedapm import FedAPM, FedAPMEvaluation, FedAPMInstruction
from .algorithms.fedgia import FedGiA, FedGiAInstruction, FedGiAQuestion
from .algorithms.fedmc_admm import FedMCADMM, FedMCFactors, FedMCInstruction, initial_item_factors
from .algorithms.fedprox import FedProx, FedProxInstruction
from .algorithms.flame import FLAME, FLAMEEvaluation, FLAMEInstruction
from .algorithms.fpfc import FPFC, FPFCEvaluation, FPFCInstruction
from .algorithms.local import Local, LocalInstruction
from .algorithms.lp_proj import LpProjADMM, LpProjInstruction
from .hosting.inprocess import InProcessGrid, run_in_process
from .hosting.legacy import LegacyStrategy
from .maths.penalties import L1, MCP, SmoothedSCAD
from .maths.regularizers import L1Norm, SquaredL2
from .maths.schedules import StepDecay
from .runtime.maker import made_by
from .runtime.models import Models, load_models
from .runtime.sampled import SampledStrategy
from .runtime.schema import Instruction
from .runtime.strategy import StatefulStrategy

__all__ = [
    "FLAME",
    "FPFC",
    "L1",
    "MCP",
    "Ditto",
    "DittoInstruction",
    "FLAMEEvaluation",
    "FLAMEInstruction",
    "FPFCEvaluation",
    "FPFCInstruction",
    "FedADMM",
    "FedADMMInstruction",
    "FedAPM",
    "FedAPMEvaluation",
    "FedAPMInstruction",
    "FedGiA",
    "FedGiAInstruction",
    "FedGiAQuestion",
    "FedMCADMM",
    "FedMCFactors",
    "FedMCInstruction",
    "FedProx",
    "FedProxInstruction",
    "InProcessGrid",
    "Instruction",
    "L1Norm",
    "LegacyStrategy",
    "Local",
    "LocalInstruction",
    "LpProjADMM",
    "LpProjInstruction",
    "Models",
    "OwnModelEvaluation",
    "SampledStrategy",
    "SmoothedSCAD",
    "SquaredL2",
    "StatefulStrategy",
    "StepDecay",
    "initial_item_factors",
    "load_models",
    "made_by",
    "run_in_process",
]
