"""What a run says about itself: its table, its files, and what is particular to a method."""

from __future__ import annotations

from fl_admm_strategies import FLAME, FPFC, AsyncFPFC, FedAPM, FedGiA
from fl_admm_strategies.algorithms.shared.clustered import ClusteredStrategy
from fl_admm_strategies.algorithms.shared.completion import CompletionStrategy

from ..problems import Problem
from . import plots
from .async_fpfc import AsyncFPFCReport
from .base import Finished, MethodReport, Report
from .clustered import ClusteredReport
from .completion import CompletionReport
from .fedapm import FedAPMReport
from .fedgia import FedGiAReport
from .files import plain, write_metrics_line, write_result, write_text
from .flame import FLAMEReport
from .fpfc import FPFCReport
from .result import Result, row_of
from .table import results_table

REPORTS: dict[type, type[MethodReport]] = {
    FPFC: FPFCReport,
    AsyncFPFC: AsyncFPFCReport,
    ClusteredStrategy: ClusteredReport,
    FedAPM: FedAPMReport,
    FLAME: FLAMEReport,
    CompletionStrategy: CompletionReport,
    FedGiA: FedGiAReport,
}
"""The methods that have more to say than the standard report."""


def report_of(strategy: type, problem: type[Problem]) -> MethodReport:
    """Return the report of a method, or of the nearest one that it derives from, on such data."""
    report = next((REPORTS[owner] for owner in strategy.__mro__ if owner in REPORTS), MethodReport)
    serves = report.problems is None or issubclass(problem, report.problems)
    return report() if serves else MethodReport()


__all__ = [
    "REPORTS",
    "Finished",
    "MethodReport",
    "Report",
    "Result",
    "plain",
    "plots",
    "report_of",
    "results_table",
    "row_of",
    "write_metrics_line",
    "write_result",
    "write_text",
]
