"""Federated data sets of the experiments: ``load("digits-swap", seed=0)``."""

from simulations.data.batching import full_batch, minibatches
from simulations.data.federated import ClientData, FederatedData, class_counts
from simulations.data.registry import DATASETS, load

__all__ = [
    "DATASETS",
    "ClientData",
    "FederatedData",
    "class_counts",
    "full_batch",
    "load",
    "minibatches",
]
