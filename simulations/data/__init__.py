"""Federated data sets of the experiments: ``load("digits-swap", seed=0)``."""

from __future__ import annotations

from .batching import full_batch
from .federated import ClientData, FederatedData, class_counts, without_newcomers
from .ratings import RatingsClient, RatingsData
from .registry import DATASETS, Data, kind_of, load, loader_of, options_of
from .tabular import TabularData

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
    "kind_of",
    "load",
    "loader_of",
    "options_of",
    "without_newcomers",
]
