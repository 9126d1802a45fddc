"""Methods: found by name, their settings derived from their constructors, built and run."""

from __future__ import annotations

from .federation import Federation, History, grid_of, run_here, run_method
from .names import CLIENTS, METHODS, client_of, data_of, strategy_named
from .tables import (
    algorithm_table,
    baseline_table,
    client_table,
    completed,
    default_of,
)

__all__ = [
    "CLIENTS",
    "METHODS",
    "Federation",
    "History",
    "algorithm_table",
    "baseline_table",
    "client_of",
    "client_table",
    "completed",
    "data_of",
    "default_of",
    "grid_of",
    "run_here",
    "run_method",
    "strategy_named",
]
