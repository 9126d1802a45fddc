"""FedGiA's report: rounds and time to a small gradient, as the paper's Table III has them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from rich.table import Table
from rich.text import Text

from clients.toolkit.solving.curvature import FACTOR_CACHE
from fl_admm_strategies import FedGiA
from fl_admm_strategies.runtime.callbacks import StopRule

from ..data import TabularData
from ..methods import grid_of, run_method
from ..problems import LinearProblem, Problem
from ..settings.tables import ReportSettings, Settings
from . import plots
from .base import NONE, Finished, MethodReport, Report
from .table import small_table

Hessian = Literal["diagonal", "gram"]


class FedGiAReportSettings(ReportSettings):
    """The table ``[report]``: when the gradient is small, and a sweep."""

    tolerance: Annotated[float, Field(gt=0)] = 1e-9
    """The run ends at ||grad f||^2 <= n tolerance (30)."""
    sweep: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of k0 to run both H_i at, after the experiment, for a table like the paper's."""


@dataclass(frozen=True)
class Row:
    """One run, as a row of Table III.

    Attributes
    ----------
    title : str
    hessian : {'diagonal', 'gram'}
    local_steps : int
        k0.
    objective, squared_gradient : float
        f(x) and ||grad f(x)||^2 at the last round's x.
    cr : int or None
        Rounds of local work that led there; None where the gradient was not small enough by then.
    seconds : float
        Of the run.
    """

    title: str
    hessian: Hessian
    local_steps: int
    objective: float
    squared_gradient: float
    cr: int | None
    seconds: float


class FedGiAReport(MethodReport):
    """Rounds until the gradient is small, beside the paper's, for several k0 and both H_i."""

    problems: ClassVar[type[Problem] | None] = LinearProblem
    settings: ClassVar[type[ReportSettings]] = FedGiAReportSettings
    fixed: ClassVar[Mapping[str, Any]] = {"report_gradient": True}
    left_out: ClassVar[frozenset[str]] = frozenset({"t"})

    def defaults(self, problem: Problem) -> dict[str, Any]:
        """Return Table II's t."""
        return {"t": table_2(problem.data)}

    def title(self, strategy: Any) -> str:
        """Return the name with H_i and k0, as Table III has it."""
        return _title(strategy)

    def stop_rule(self, strategy: Any, problem: Problem) -> StopRule:
        """Stop where the gradient is as small as in the paper."""
        rule: StopRule = strategy.gradient_tolerance(_own(problem.settings).tolerance)
        return rule

    def report(self, run: Finished) -> Report:
        """Report CR and time beside the paper's, and the sweep over k0 and both H_i."""
        asked, strategy = _own(run.settings), run.strategy
        row = _row(strategy, run.problem, run.seconds)
        rows = [
            _run(run, hessian, steps) for hessian in ("gram", "diagonal") for steps in asked.sweep
        ]
        body = [_table(rows, run.settings)] if rows else []
        bound = run.problem.data.num_features * asked.tolerance
        files = {}
        if curve := _gradients(strategy):
            plots.curves(
                {"‖∇f(x)‖²": curve},
                ylabel="‖∇f(x)‖² where the round starts",
                picture=run.picture("gradient.png"),
                levels={f"the run ends here: n·{asked.tolerance:g}": bound},
                log=True,
            )
            files["gradient.png"] = "how the gradient vanishes"
        if len(asked.sweep) > 1:
            _draw_sweep(rows, run.picture("sweep.png", "rounds and time over k0"))
            files["sweep.png"] = "CR and time over k0, for both H_i"
        (kind,) = strategy.kinds.values()
        return Report(
            cells={kind: {"cr": row.cr, "time": row.seconds}},
            legend=(
                "CR: rounds of local work until ‖∇f‖² ≤ n·"
                f"{asked.tolerance:g} = {bound:.2g}. The model that is evaluated is one "
                "aggregation further. Time: with all messages and evaluations.",
                *(
                    ["The gradients that the stop rule needs are among the arrays sent."]
                    if strategy.hessian == "gram" or strategy.duals == "client"
                    else []
                ),
            ),
            body=(*body, _summary(row, bound)),
            files=files,
            extra={"own": row, "sweep": rows},
        )


def _own(settings: Settings) -> FedGiAReportSettings:
    assert isinstance(settings.report, FedGiAReportSettings)
    return settings.report


def _title(strategy: FedGiA) -> str:
    return f"FedGiA_{'D' if strategy.hessian == 'diagonal' else 'G'}, k0={strategy.local_steps}"


def _row(strategy: FedGiA, problem: Problem, seconds: float) -> Row:
    found = strategy.diagnostics()
    bound = problem.data.num_features * _own(problem.settings).tolerance
    return Row(
        title=_title(strategy),
        hessian=strategy.hessian,
        local_steps=strategy.local_steps,
        objective=found.objective,
        squared_gradient=found.squared_gradient,
        cr=found.communication_rounds if found.squared_gradient <= bound else None,
        seconds=seconds,
    )


def _run(run: Finished, hessian: Hessian, steps: int) -> Row:
    """Run the experiment with another H_i and k0 in this process, from the same start."""
    # Every row pays for its own factorisation: the losses are made anew, and the cache is empty.
    problem = LinearProblem(run.settings, run.problem.data)
    FACTOR_CACHE.clear()
    federation = replace(run.federation, problem=problem)
    strategy = federation.strategy(hessian=hessian, local_steps=steps, fraction_evaluate=0.0)
    began = time.monotonic()
    with grid_of(federation, 1) as grid:
        run_method(
            problem,
            strategy,
            grid,
            run.arrays,
            num_rounds=run.settings.training.num_rounds,
            stop=strategy.gradient_tolerance(_own(run.settings).tolerance),
            progress=False,
        )
    return _row(strategy, problem, time.monotonic() - began)


def _summary(row: Row, bound: float) -> Text:
    """Return two sentences on the outcome, for a reader who has not read the paper."""
    if row.cr is None:
        return Text.assemble(
            ("FedGiA did not get there", "bold red"),
            f": ‖∇f‖² is {row.squared_gradient:.2g}, the run was to end at {bound:.2g}.\n"
            "Give it more training.num-rounds, or a larger algorithm.t if the objective grows.",
        )
    return Text.assemble(
        (f"FedGiA found the minimum in {row.cr} rounds", "bold green"),
        f": f = {row.objective:.4f} with ‖∇f‖² = {row.squared_gradient:.1g}.\n"
        "A round is one gradient on every client and one message each way.",
    )


def table_2(data: TabularData) -> float:
    """Return Table II's t: sigma = t r/m."""
    if data.loss == "least-squares":
        return 0.15
    samples = sum(len(targets) for _, targets in data.clients)
    return max(0.1, 8 * math.log(samples) / data.num_features)


def _table(rows: Sequence[Row], settings: Settings) -> Table:
    """Lay the sweep out beside the published rows."""
    headers = ("Objective", "", "CR", "", "Time s", "")
    table = small_table("Both H_i: Gram (G) and diagonal (D)", "", *headers)
    table.caption_justify = "left"
    table.caption = Text(
        "In this process. Time: without evaluations. In brackets: Table III, 64 clients, means of "
        "20 trials, MATLAB on a laptop.",
        style="dim",
    )
    for row in rows:
        paper = settings.published.get(row.title, {})
        table.add_row(
            f"  {row.title}",
            f"{row.objective:.4f}",
            _published(paper.get("objective")),
            NONE if row.cr is None else f"{row.cr}",
            _published(paper.get("cr")),
            f"{row.seconds:.2f}",
            _published(paper.get("time")),
        )
    return table


def _published(value: float | None) -> str:
    return "" if value is None else f" ({value:g})"


def _gradients(strategy: FedGiA) -> list[tuple[int, float]]:
    """Return ||grad f(x)||^2 by round, as far as it is known and can stand on a log axis."""
    means = strategy.run.record.result.train_metrics_clientapp
    found = ((server_round, metrics["squared-gradient"]) for server_round, metrics in means.items())
    # For the type checker: Flower's records may hold lists, this one does not.
    return [(r, value) for r, value in found if isinstance(value, float) and 0 < value < math.inf]


def _draw_sweep(rows: Sequence[Row], picture: plots.Picture) -> None:
    """Draw CR and time over k0 for both H_i, as the paper's Fig. 2."""
    import pandas as pd
    import seaborn as sns
    from matplotlib.ticker import MaxNLocator

    names = ["H", "k0, local steps", "CR (rounds)", "time (s)"]
    points = [(row.hessian, row.local_steps, row.cr, row.seconds) for row in rows]
    frame = pd.DataFrame(points, columns=names).astype({names[2]: float})
    figure, panels = picture.axes((8.0, 4.0), 1, 2)
    for axes, name in zip(panels, names[2:], strict=True):
        looks = {"style": "H", "markers": True, "palette": plots.COLOURS[:2]}
        sns.lineplot(frame, x=names[1], y=name, hue="H", ax=axes, **looks)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    picture.save(figure)
