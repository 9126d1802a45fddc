"""What a run says about itself: its table, its files, and what is particular to a method."""

from __future__ import annotations

from fl_admm_strategies import FPFC, AsyncFPFC, FedGiA

from ..problems import Problem
from . import plots as plots
from .async_fpfc import AsyncFPFCReport
from .base import Finished as Finished
from .base import MethodReport as MethodReport
from .base import ReportContent as ReportContent
from .fedgia import FedGiAReport
from .files import Result as Result
from .files import as_json as as_json
from .files import row_of as row_of
from .files import write_result as write_result
from .files import write_text as write_text
from .fpfc import FPFCReport
from .pages import as_markdown as as_markdown
from .table import results_table as results_table

REPORTS: dict[type, type[MethodReport]] = {
    FPFC: FPFCReport,
    AsyncFPFC: AsyncFPFCReport,
    FedGiA: FedGiAReport,
}
"""The methods that have more to say than the standard report."""


def report_of(strategy: type, problem: type[Problem]) -> MethodReport:
    """Return the report of a method, or of the nearest one that it derives from, on such data."""
    report = next((REPORTS[owner] for owner in strategy.__mro__ if owner in REPORTS), MethodReport)
    serves = report.problems is None or issubclass(problem, report.problems)
    return report() if serves else MethodReport()
