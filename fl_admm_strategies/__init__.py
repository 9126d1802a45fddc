"""ADMM methods for personalised and clustered federated learning, as Flower strategies."""

from .algorithms.cfl import CFL
from .algorithms.ditto import Ditto, DittoInstruction
from .algorithms.fedadmm import FedADMM, FedADMMInstruction
from .algorithms.fedala import FedALA, FedALAEvaluation, FedALAInstruction
from .algorithms.fedalt import FedAlt, FedAltInstruction
from .algorithms.fedapm import FedAPM, FedAPMEvaluation, FedAPMInstruction
from .algorithms.fedavg import FedAvg, FedAvgInstruction
from .algorithms.fedcp import FedCP, FedCPInstruction
from .algorithms.fedgia import FedGiA, FedGiAInstruction, FedGiAQuestion
from .algorithms.fedmavg import FedMAvg, FedMAvgInstruction
from .algorithms.fedmc_admm import FedMCADMM, FedMCInstruction
from .algorithms.fedmgs import FedMGS, FedMGSInstruction
from .algorithms.fedprox import FedProx, FedProxInstruction
from .algorithms.fedrod import FedRoD, FedRoDInstruction
from .algorithms.fedsim import FedSim, FedSimInstruction
from .algorithms.flame import FLAME, FLAMEEvaluation, FLAMEInstruction
from .algorithms.fpfc.async_fpfc import AsyncFPFC
from .algorithms.fpfc.fpfc import FPFC
from .algorithms.fpfc.path import LambdaPath
from .algorithms.fpfc.types import FPFCEvaluation, FPFCInstruction
from .algorithms.ifca import IFCA, IFCAEvaluation, IFCAInstruction
from .algorithms.lg_fedavg import LGFedAvg, LGFedAvgInstruction
from .algorithms.local import Local, LocalInstruction
from .algorithms.localsgd import LocalSGD, LocalSGDInstruction
from .algorithms.lp_proj import LpProjADMM, LpProjInstruction
from .algorithms.lp_proj_sgd import LpProj, LpProjSGDInstruction
from .algorithms.pacfl import PACFL, PACFLQuestion
from .algorithms.perfedavg import PerFedAvg, PerFedAvgEvaluation, PerFedAvgInstruction
from .algorithms.pfedme import (
    PFedMe,
    PFedMeInstruction,
    PFedMeMatched,
    PFedMeMatchedInstruction,
)
from .algorithms.shared.base import OwnModelEvaluation
from .algorithms.shared.clustered import ClusterInstruction
from .algorithms.shared.completion import FedMCFactors, initial_item_factors
from .algorithms.shared.split import SplitEvaluation
from .hosting.inprocess import InProcessGrid, run_in_process
from .hosting.legacy import LegacyStrategy
from .maths.penalties import L1, MCP, SmoothedSCAD
from .maths.regularizers import L1Norm, SquaredL2
from .maths.schedules import GrowingEpochs, RandomDelay, RandomEpochs, StepDecay
from .runtime.messages.schema import Instruction
from .runtime.messages.stamp import made_by
from .runtime.models import Models, load_models
from .runtime.sampled import SampledStrategy
from .runtime.strategy import StatefulStrategy

__all__ = [
    "CFL",
    "FLAME",
    "FPFC",
    "IFCA",
    "L1",
    "MCP",
    "PACFL",
    "AsyncFPFC",
    "ClusterInstruction",
    "Ditto",
    "DittoInstruction",
    "FLAMEEvaluation",
    "FLAMEInstruction",
    "FPFCEvaluation",
    "FPFCInstruction",
    "FedADMM",
    "FedADMMInstruction",
    "FedALA",
    "FedALAEvaluation",
    "FedALAInstruction",
    "FedAPM",
    "FedAPMEvaluation",
    "FedAPMInstruction",
    "FedAlt",
    "FedAltInstruction",
    "FedAvg",
    "FedAvgInstruction",
    "FedCP",
    "FedCPInstruction",
    "FedGiA",
    "FedGiAInstruction",
    "FedGiAQuestion",
    "FedMAvg",
    "FedMAvgInstruction",
    "FedMCADMM",
    "FedMCFactors",
    "FedMCInstruction",
    "FedMGS",
    "FedMGSInstruction",
    "FedProx",
    "FedProxInstruction",
    "FedRoD",
    "FedRoDInstruction",
    "FedSim",
    "FedSimInstruction",
    "GrowingEpochs",
    "IFCAEvaluation",
    "IFCAInstruction",
    "InProcessGrid",
    "Instruction",
    "L1Norm",
    "LGFedAvg",
    "LGFedAvgInstruction",
    "LambdaPath",
    "LegacyStrategy",
    "Local",
    "LocalInstruction",
    "LocalSGD",
    "LocalSGDInstruction",
    "LpProj",
    "LpProjADMM",
    "LpProjInstruction",
    "LpProjSGDInstruction",
    "Models",
    "OwnModelEvaluation",
    "PACFLQuestion",
    "PFedMe",
    "PFedMeInstruction",
    "PFedMeMatched",
    "PFedMeMatchedInstruction",
    "PerFedAvg",
    "PerFedAvgEvaluation",
    "PerFedAvgInstruction",
    "RandomDelay",
    "RandomEpochs",
    "SampledStrategy",
    "SmoothedSCAD",
    "SplitEvaluation",
    "SquaredL2",
    "StatefulStrategy",
    "StepDecay",
    "initial_item_factors",
    "load_models",
    "made_by",
    "run_in_process",
]
