"""The client half of every algorithm: one `NumPyClient` each, over the solvers they share."""

from .app import client_app
from .curvature import LeastSquares, Logistic
from .fedadmm import FedADMMClient
from .fedapm import FedAPMClient
from .fedgia import FedGiAClient, FedGiALinearClient
from .fedmc_admm import FedMCADMMClient
from .flame import FLAMEClient
from .fpfc import FPFCClient
from .lp_proj import LpProjADMMClient
from .personalization import SplitInput, input_layers, output_layers, split_input
from .ratings import Ratings
from .torch_client import TorchClient, accuracy, rmse

__all__ = [
    "FLAMEClient",
    "FPFCClient",
    "FedADMMClient",
    "FedAPMClient",
    "FedGiAClient",
    "FedGiALinearClient",
    "FedMCADMMClient",
    "LeastSquares",
    "Logistic",
    "LpProjADMMClient",
    "Ratings",
    "SplitInput",
    "TorchClient",
    "accuracy",
    "client_app",
    "input_layers",
    "output_layers",
    "rmse",
    "split_input",
]
