"""FedGiA's report: rounds and time to a small gradient, as the paper's Table III has them."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from fl_admm_strategies.runtime.callbacks import StopRule

from ..problems import LinearProblem, Problem
from ..settings.tables import ReportSettings
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
        asked: Any = problem.settings.report
        rule: StopRule = strategy.gradient_tolerance(asked.tolerance)
        return rule

    def report(self, run: Finished) -> ReportContent:
        """Report CR and time beside the paper's, and draw how the gradient vanishes."""
        asked: Any = run.settings.report
        tolerance, strategy = asked.tolerance, run.strategy
        bound = run.problem.data.num_features * tolerance
        means = strategy.run.record.result.train_metrics_clientapp
        last = means[strategy.last_round]
        found = {name: last.get(name, math.nan) for name in ("objective", "squared-gradient")}
        rounds = strategy.communication_rounds if found["squared-gradient"] <= bound else None
        plots.curves(
            {"‖∇f(x)‖²": [(r, metrics["squared-gradient"]) for r, metrics in means.items()]},
            ylabel="‖∇f(x)‖² where the round starts",
            picture=run.picture("gradient.png"),
            levels={f"the run ends here: n·{tolerance:g}": bound},
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
                f"{tolerance:g} = {bound:.2g}. The model that is evaluated is one "
                "aggregation further. Time: with all messages and evaluations.",
            ),
            body=body,
            extra={name.replace("-", "_"): value for name, value in found.items()},
        )
