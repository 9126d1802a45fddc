"""The client half of every algorithm: one `NumPyClient` each, over the solvers they share."""

from .app import client_app
from .fedadmm import FedADMMClient
from .fpfc import FPFCClient
from .torch_client import TorchClient, accuracy, rmse

__all__ = ["FPFCClient", "FedADMMClient", "TorchClient", "accuracy", "client_app", "rmse"]
