"""Federated data sets of the experiments: ``load("digits-swap", seed=0)``."""

from simulations.data.batching import full_batch, minibatches
from simulations.data.federated import ClientData, FederatedData, class_counts
from simulations.data.ratings import RatingsClient, RatingsData
from simulations.data.registry import DATASETS, Data, load
from simulations.data.tabular import TabularData

__all__ = [
    "DATASETS",
    "ClientData",
    "Data",
    "FederatedData",
    "RatingsClient",
    "RatingsData",
    "TabularData",
    "class_counts",
    "full_batch",
    "load",
    "minibatches",
]
