"""Federated data sets of the experiments: ``load("digits-swap", seed=0)``."""

from .federated import ClientData as ClientData
from .federated import FederatedData as FederatedData
from .federated import without_clients as without_clients
from .ratings import RatingsData as RatingsData
from .registry import Data as Data
from .registry import kind_of as kind_of
from .registry import load as load
from .registry import options_of as options_of
from .tabular import TabularData as TabularData
