"""FedGiA's report: rounds and time to a small gradient, as the paper's Table III has them."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from fl_admm_strategies import FedGiA
from fl_admm_strategies.runtime.callbacks import StopRule

from ..problems import LinearProblem, Problem
from ..settings.tables import ReportSettings, Settings
from . import plots
from .base import Finished, MethodReport, ReportContent


class FedGiAReportSettings(ReportSettings):
    """The table ``[report]``: when the gradient is small."""

    tolerance: Annotated[float, Field(gt=0)] = 1e-9
    """The run ends at ||grad f||^2 <= n tolerance (30)."""


class FedGiAReport(MethodReport):
    """Rounds until the gradient is small, beside the paper's."""

    problems: ClassVar[type[Problem] | None] = LinearProblem
    settings: ClassVar[type[ReportSettings]] = FedGiAReportSettings

    def title(self, strategy: Any) -> str:
        """Return the name with H_i and k0, as Table III has it."""
        kind = "D" if strategy.hessian == "diagonal" else "G"
        return f"FedGiA_{kind}, k0={strategy.local_steps}"

    def stop_rule(self, strategy: Any, problem: Problem) -> StopRule:
        """Stop where the gradient is as small as in the paper."""
        rule: StopRule = strategy.gradient_tolerance(_own(problem.settings).tolerance)
        return rule

    def report(self, run: Finished) -> ReportContent:
        """Report CR and time beside the paper's, and draw how the gradient vanishes."""
        asked, strategy = _own(run.settings), run.strategy
        bound = run.problem.data.num_features * asked.tolerance
        last = strategy.run.record.result.train_metrics_clientapp[strategy.last_round]
        found = {name: last.get(name, math.nan) for name in ("objective", "squared-gradient")}
        rounds = strategy.communication_rounds if found["squared-gradient"] <= bound else None
        if curve := _gradients(strategy):
            plots.curves(
                {"‖∇f(x)‖²": curve},
                ylabel="‖∇f(x)‖² where the round starts",
                picture=run.picture("gradient.png"),
                levels={f"the run ends here: n·{asked.tolerance:g}": bound},
                log=True,
            )
        body = list(super().report(run).body)
        if rounds is None:
            advice = "give it more training.num-rounds, or a larger algorithm.t if f grows."
            body.append(f"**FedGiA did not get there:** {advice}")
        (kind,) = strategy.kinds.values()
        return ReportContent(
            cells={kind: {"cr": rounds, "time": run.seconds}},
            legend=(
                "CR: rounds of local work until ‖∇f‖² ≤ n·"
                f"{asked.tolerance:g} = {bound:.2g}. The model that is evaluated is one "
                "aggregation further. Time: with all messages and evaluations.",
            ),
            body=body,
            extra={name.replace("-", "_"): value for name, value in found.items()},
        )


def _own(settings: Settings) -> FedGiAReportSettings:
    assert isinstance(settings.report, FedGiAReportSettings)
    return settings.report


def _gradients(strategy: FedGiA) -> list[tuple[int, float]]:
    """Return ||grad f(x)||^2 by round, as far as it is known and can stand on a log axis."""
    means = strategy.run.record.result.train_metrics_clientapp
    found = ((server_round, metrics["squared-gradient"]) for server_round, metrics in means.items())
    # For the type checker: Flower's records may hold lists, this one does not.
    return [(r, value) for r, value in found if isinstance(value, float) and 0 < value < math.inf]
