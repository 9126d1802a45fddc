"""Federated data sets of the experiments: ``load("digits-swap", seed=0)``."""

from .federated import ClientData as ClientData
from .federated import FederatedData as FederatedData
from .federated import Samples as Samples
from .federated import with_validation as with_validation
from .federated import without_clients as without_clients
from .ratings import ClientRatings as ClientRatings
from .ratings import RatingsData as RatingsData
from .registry import DATASETS as DATASETS
from .registry import Data as Data
from .registry import kind_of as kind_of
from .registry import load as load
from .registry import loader_of as loader_of
from .registry import options_of as options_of
from .tabular import TabularData as TabularData
