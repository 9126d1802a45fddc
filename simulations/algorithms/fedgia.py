"""FedGiA in the app: its settings, and its report of CR and time as Table III has them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic import Field
from rich import box
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_limits

from clients import FedGiALinearClient, LeastSquares, Logistic, client_app
from clients.toolkit.curvature import FACTOR_CACHE, DataLoss
from fl_admm_strategies import FedGiA, InProcessGrid
from fl_admm_strategies.runtime.strategy import StopRule
from simulations.algorithms.base import Algorithm, Experiment
from simulations.data import TabularData
from simulations.report import METRICS, NONE, Metric, Report, Score

if TYPE_CHECKING:
    from simulations.settings import Settings

Hessian = Literal["diagonal", "gram"]


@dataclass(frozen=True)
class Row:
    """One run of the sweep, as a row of Table III.

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
        Of the run, in this process.
    """

    title: str
    hessian: Hessian
    local_steps: int
    objective: float
    squared_gradient: float
    cr: int | None
    seconds: float


class FedGiASettings(Algorithm):
    """The table ``[algorithm]`` of an experiment with FedGiA."""

    data_type: ClassVar[type] = TabularData

    name: Literal["fedgia"]
    hessian: Hessian = "diagonal"
    t: float | None = Field(default=None, gt=0)
    """sigma = t r/m; left out, Table II's: 0.15, or max(0.1, 8 ln(d)/n) for logistic regression."""
    local_steps: int = Field(default=5, ge=1)
    fraction_admm: float = Field(default=0.5, gt=0, le=1)
    duals: Literal["strategy", "client"] = "strategy"
    mu: float = Field(default=0.001, ge=0)
    reg_scaling: Literal["per_sample", "full"] = "per_sample"
    tolerance: float = Field(default=1e-9, gt=0)
    """Stop at ||grad f||^2 <= n tolerance (30)."""
    sweep: tuple[int, ...] = ()
    """Values of k0 to run both H_i at, after the experiment, for a table like the paper's."""

    @property
    def title(self) -> str:
        """The algorithm's name as the paper's Table III has it."""
        return f"FedGiA_{'D' if self.hessian == 'diagonal' else 'G'}, k0={self.local_steps}"

    def check(self, settings: Settings, data: Any) -> None:
        """Refuse settings that FedGiA has no use for, and sweeps of nothing."""
        super().check(settings, data)
        if settings.training.fraction_train != 1:
            raise ValueError(
                f"training.fraction-train is {settings.training.fraction_train:g}: all clients of "
                "FedGiA train in every round. Leave it out; algorithm.fraction-admm is the share "
                "in the ADMM group."
            )
        if settings.model is not None or settings.training.batch_size is not None:
            raise ValueError(
                "FedGiA has a linear model and full gradients here: leave [model] and "
                "training.batch-size out."
            )
        if any(steps < 1 for steps in self.sweep):
            raise ValueError(f"algorithm.sweep is {list(self.sweep)}, expected integers >= 1.")

    def strategy(self, settings: Settings, data: Any, **base: Any) -> FedGiA:
        """Build the strategy; the gradient is reported for the stop rule."""
        base.pop("fraction_train", None)
        return FedGiA(
            t=self.t or table_2(data),
            hessian=self.hessian,
            local_steps=self.local_steps,
            fraction_admm=self.fraction_admm,
            duals=self.duals,
            report_gradient=True,
            **base,
        )

    def initial_arrays(self, settings: Settings, data: Any) -> ArrayRecord:
        """Return x = 0."""
        return ArrayRecord({"x": Array(np.zeros(data.num_features))})

    def client(self, context: Context, settings: Settings, data: Any) -> FedGiALinearClient:
        """Build a client; it evaluates f_i, for which there are no samples but the training's."""
        own = _losses(data, self.mu, self.reg_scaling)[int(context.node_config["partition-id"])]
        return FedGiALinearClient(context, own, own)

    def metric(self, data: Any) -> Metric:
        """Return the objective."""
        return METRICS["objective"]

    def scores(self, data: Any, clients: Mapping[int, Mapping[str, float]]) -> dict[str, Score]:
        """Return f(x) = (1/m) sum_i f_i(x) of one evaluation round."""
        return {
            self.title: Score(mean=float(np.mean([m["global-loss"] for m in clients.values()])))
        }

    def stop_rule(self, experiment: Experiment) -> StopRule:
        """Stop where the gradient is as small as in the paper."""
        return cast(FedGiA, experiment.strategy).gradient_tolerance(self.tolerance)

    # ------------------------------------------------------------------------------------------
    # The report
    # ------------------------------------------------------------------------------------------

    def report(self, experiment: Experiment, out: Path) -> Report:
        """Report CR and time beside the paper's, and the sweep over k0 and both H_i."""
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = json.loads(lines[-1])["seconds"]
        own = self._row(cast(FedGiA, experiment.strategy), experiment.data, seconds)
        rows = [
            self._run(experiment, hessian, steps)
            for hessian in ("gram", "diagonal")
            for steps in self.sweep
        ]
        body = [_table(rows, experiment.settings)] if rows else []
        files = {}
        if len(self.sweep) > 1:
            _draw(rows, experiment.settings.title, out / "sweep.png")
            files["sweep.png"] = "CR and time over k0, for both H_i"
        bound = experiment.data.num_features * self.tolerance
        return Report(
            cells={own.title: {"cr": own.cr, "time": own.seconds}},
            legend=(
                "CR: rounds of local work until ‖∇f‖² ≤ n·"
                f"{self.tolerance:g} = {bound:.2g}. The model that is evaluated is one aggregation "
                "further. Time: with all messages and evaluations.",
                *(
                    ["The gradients that the stop rule needs are among the arrays sent."]
                    if self.hessian == "gram" or self.duals == "client"
                    else []
                ),
            ),
            body=(*body, self._summary(own, bound)),
            files=files,
            extra={"own": own, "sweep": rows},
        )

    def _row(self, strategy: FedGiA, data: TabularData, seconds: float) -> Row:
        found = strategy.diagnostics()
        small = found.squared_gradient <= data.num_features * self.tolerance
        return Row(
            title=self.title,
            hessian=self.hessian,
            local_steps=self.local_steps,
            objective=found.objective,
            squared_gradient=found.squared_gradient,
            cr=found.communication_rounds if small else None,
            seconds=seconds,
        )

    def _run(self, experiment: Experiment, hessian: Hessian, steps: int) -> Row:
        """Run the experiment with another H_i and k0 in this process, from the same start."""
        settings, data = experiment.settings, experiment.data
        variant = self.model_copy(update={"hessian": hessian, "local_steps": steps})
        strategy = variant.strategy(
            settings,
            data,
            min_available_nodes=len(data.clients),
            fraction_evaluate=0.0,
            seed=settings.seed,
        )
        app = client_app(
            lambda context: self.client(context, settings, data), num_clients=len(data.clients)
        )
        _losses.cache_clear()  # every row pays for its own factorisation
        FACTOR_CACHE.clear()
        began = time.monotonic()
        with InProcessGrid(app, 1) as grid:
            strategy.start(
                grid,
                experiment.arrays,
                num_rounds=settings.training.num_rounds,
                stop=strategy.gradient_tolerance(self.tolerance),
                progress=False,
            )
        return variant._row(strategy, data, time.monotonic() - began)

    def _summary(self, own: Row, bound: float) -> Text:
        """Say in two sentences what came out, for somebody who has not read the paper."""
        if own.cr is None:
            return Text.assemble(
                ("FedGiA did not get there", "bold red"),
                f": ‖∇f‖² is {own.squared_gradient:.2g}, the run was to end at {bound:.2g}.\n"
                "Give it more training.num-rounds, or a larger algorithm.t if the objective grows.",
            )
        return Text.assemble(
            (f"FedGiA found the minimum in {own.cr} rounds", "bold green"),
            f": f = {own.objective:.4f} with ‖∇f‖² = {own.squared_gradient:.1g}.\n"
            "A round is one gradient on every client and one message each way.",
        )


def table_2(data: TabularData) -> float:
    """Return Table II's t: sigma = t r/m."""
    if data.loss == "least-squares":
        return 0.15
    samples = sum(len(targets) for _, targets in data.clients)
    return max(0.1, 8 * math.log(samples) / data.num_features)


@lru_cache(maxsize=2)
def _losses(data: TabularData, mu: float, reg_scaling: Any) -> list[DataLoss]:
    """Return every client's f_i, once a process: the clients are made anew for every message."""
    # As with torch's: a sum's bits depend on how many threads share it, and engines differ there.
    threadpool_limits(1)
    if data.loss == "least-squares":
        return [LeastSquares(*own) for own in data.clients]
    return [Logistic(*own, mu=mu, reg_scaling=reg_scaling) for own in data.clients]


def _table(rows: Sequence[Row], settings: Settings) -> Table:
    """Lay the sweep out beside the published rows."""
    table = Table(
        title=Text("Both H_i: Gram (G) and diagonal (D)", style="bold"),
        caption=Text(
            "In this process. Time: without evaluations. In brackets: Table III, 64 clients, means "
            "of 20 trials, MATLAB on a laptop.",
            style="dim",
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("", min_width=16)
    for header in ("Objective", "", "CR", "", "Time s", ""):
        table.add_column(header, justify="right")
    for row in rows:
        published = settings.published.get(row.title)
        paper = {} if published is None else published.model_dump(exclude_none=True)
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


def _draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw CR and time over k0 for both H_i, as the paper's Fig. 2."""
    figure = Figure(figsize=(8.0, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    panels = figure.subplots(1, 2)
    for hessian, colour, line in (("gram", "#0072B2", "-"), ("diagonal", "#D55E00", "--")):
        own = sorted((row for row in rows if row.hessian == hessian), key=lambda r: r.local_steps)
        steps = [row.local_steps for row in own]
        style: dict[str, Any] = {"color": colour, "linestyle": line, "marker": "o", "markersize": 4}
        crs = [math.nan if row.cr is None else row.cr for row in own]
        panels[0].plot(steps, crs, label=hessian, **style)
        panels[1].plot(steps, [row.seconds for row in own], label=hessian, **style)
    for axes, label in zip(panels, ("CR (rounds)", "time (s)"), strict=True):
        axes.set_xlabel("k0, local steps")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, format="png", metadata={"Software": None})
