"""The client half of every method: one `NumPyClient` each, over the solvers they share."""

from .methods.ditto import DittoClient
from .methods.fedadmm import FedADMMClient
from .methods.fedapm import FedAPMClient
from .methods.fedgia import FedGiAClient, FedGiALinearClient
from .methods.fedmc_admm import FedMCADMMClient
from .methods.fedprox import FedProxClient
from .methods.flame import FLAMEClient
from .methods.fpfc import FPFCClient
from .methods.local import LocalClient
from .methods.lp_proj import LpProjADMMClient
from .methods.sgd import SGDClient
from .toolkit.app import answer, client_app
from .toolkit.base import MethodClient
from .toolkit.curvature import LeastSquares, Logistic
from .toolkit.objective import LocalObjective
from .toolkit.personalization import SplitInput, input_layers, output_layers, split_input
from .toolkit.ratings import Ratings
from .toolkit.torch_client import MeanMetric, TorchClient, accuracy, rmse

__all__ = [
    "DittoClient",
    "FLAMEClient",
    "FPFCClient",
    "FedADMMClient",
    "FedAPMClient",
    "FedGiAClient",
    "FedGiALinearClient",
    "FedMCADMMClient",
    "FedProxClient",
    "LeastSquares",
    "LocalClient",
    "LocalObjective",
    "Logistic",
    "LpProjADMMClient",
    "MeanMetric",
    "MethodClient",
    "Ratings",
    "SGDClient",
    "SplitInput",
    "TorchClient",
    "accuracy",
    "answer",
    "client_app",
    "input_layers",
    "output_layers",
    "rmse",
    "split_input",
]
