"""The algorithms by the name that an experiment gives them, one file each."""

from simulations.algorithms.base import Algorithm, Experiment, TorchAlgorithm, local_problem
from simulations.algorithms.fedadmm import FedADMMSettings
from simulations.algorithms.fedapm import FedAPMSettings
from simulations.algorithms.fedgia import FedGiASettings
from simulations.algorithms.fedmc_admm import FedMCADMMSettings
from simulations.algorithms.flame import FLAMESettings
from simulations.algorithms.fpfc import FPFCSettings
from simulations.algorithms.lp_proj import LpProjADMMSettings

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fpfc": FPFCSettings,
    "fedadmm": FedADMMSettings,
    "fedapm": FedAPMSettings,
    "fedmc-admm": FedMCADMMSettings,
    "fedgia": FedGiASettings,
    "flame": FLAMESettings,
    "lp-proj-admm": LpProjADMMSettings,
}

__all__ = ["ALGORITHMS", "Algorithm", "Experiment", "TorchAlgorithm", "local_problem"]
