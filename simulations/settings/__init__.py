"""What an experiment file may say: tables of settings, most derived from constructors."""

from __future__ import annotations

from .constructor import Built, table_of
from .section import Section
from .tables import (
    AlgorithmTable,
    Baselines,
    BaselineTable,
    DataSettings,
    NewcomerSettings,
    PublishedRow,
    ReportSettings,
    Settings,
    TrainingSettings,
    published_rows,
    setting_of,
)

__all__ = [
    "AlgorithmTable",
    "BaselineTable",
    "Baselines",
    "Built",
    "DataSettings",
    "NewcomerSettings",
    "PublishedRow",
    "ReportSettings",
    "Section",
    "Settings",
    "TrainingSettings",
    "published_rows",
    "setting_of",
    "table_of",
]
