"""ADMM methods for personalised and clustered federated learning, as Flower strategies."""

from .algorithms.cfl import CFL
from .algorithms.ditto import Ditto
from .algorithms.fedadmm import FedADMM
from .algorithms.fedala import FedALA
from .algorithms.fedals import FedALS
from .algorithms.fedalt import FedAlt
from .algorithms.fedapm import FedAPM
from .algorithms.fedavg import FedAvg, FedAvgFT
from .algorithms.fedcp import FedCP
from .algorithms.feddyn import FedDyn
from .algorithms.fedease import FedEASE, initial_item_weights
from .algorithms.fedgia import FedGiA
from .algorithms.fedmavg import FedMAvg
from .algorithms.fedmc_admm import FedMCADMM
from .algorithms.fedmgs import FedMGS
from .algorithms.fedprox import FedProx
from .algorithms.fedrod import FedRoD
from .algorithms.fedsim import FedSim
from .algorithms.flame import FLAME
from .algorithms.fpfc.async_fpfc import AsyncFPFC
from .algorithms.fpfc.fpfc import FPFC
from .algorithms.fpfc.path import LambdaPath
from .algorithms.ifca import IFCA
from .algorithms.lg_fedavg import LGFedAvg
from .algorithms.local import Local
from .algorithms.localsgd import LocalSGD
from .algorithms.lp_proj import LpProjADMM
from .algorithms.lp_proj_sgd import LpProj
from .algorithms.pacfl import PACFL
from .algorithms.perfedavg import PerFedAvg
from .algorithms.pfedme import PFedMe, PFedMeMatched
from .algorithms.scaffold import SCAFFOLD
from .algorithms.shared.completion import initial_item_factors
from .hosting.inprocess import InProcessGrid, run_in_process
from .hosting.legacy import LegacyServer
from .maths.penalties import L1, MCP, SmoothedSCAD
from .maths.regularizers import L1Norm, SquaredL2
from .maths.schedules import GrowingEpochs, RandomDelay, RandomEpochs, StepDecay
from .runtime.messages.schema import Instruction
from .runtime.messages.stamp import made_by
from .runtime.models import Models, load_models
from .runtime.privacy import ClientDP
from .runtime.stopping import EarlyStopping, KeepBest
from .runtime.strategy import StatefulStrategy

__version__ = "0.2.0"

__all__ = [
    "CFL",
    "FLAME",
    "FPFC",
    "IFCA",
    "L1",
    "MCP",
    "PACFL",
    "SCAFFOLD",
    "AsyncFPFC",
    "ClientDP",
    "Ditto",
    "EarlyStopping",
    "FedADMM",
    "FedALA",
    "FedALS",
    "FedAPM",
    "FedAlt",
    "FedAvg",
    "FedAvgFT",
    "FedCP",
    "FedDyn",
    "FedEASE",
    "FedGiA",
    "FedMAvg",
    "FedMCADMM",
    "FedMGS",
    "FedProx",
    "FedRoD",
    "FedSim",
    "GrowingEpochs",
    "InProcessGrid",
    "Instruction",
    "KeepBest",
    "L1Norm",
    "LGFedAvg",
    "LambdaPath",
    "LegacyServer",
    "Local",
    "LocalSGD",
    "LpProj",
    "LpProjADMM",
    "Models",
    "PFedMe",
    "PFedMeMatched",
    "PerFedAvg",
    "RandomDelay",
    "RandomEpochs",
    "SmoothedSCAD",
    "SquaredL2",
    "StatefulStrategy",
    "StepDecay",
    "initial_item_factors",
    "initial_item_weights",
    "load_models",
    "made_by",
    "run_in_process",
]
