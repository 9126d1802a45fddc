"""What a comparison says: tables, pictures and the files for a paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_admm_strategies import __version__

from ..experiments.loading import checked
from ..methods import completed
from ..problems.scores import METRICS, Metric
from ..reports import as_markdown, write_text
from ..reports.base import NONE
from ..reports.pages import Grid, Image, Part, code
from ..reports.plots import LINES, MARKERS, Picture, curves, legend_below
from ..settings.tables import given
from .compare import COMPARISON, Found, Outcome, main_scores
from .comparison import ComparisonPlan
from .statistics import LEVEL, Mean, mean_of, pairs_of, ranks_of, what_it_can_show

Lines = dict[str, list[tuple[float | str, float]]]
_WORK = {
    "gradients": ("Gradients", 1, ",.0f"),
    "passes": ("Passes", 1, ".1f"),
    "trained": ("Clients trained", 1, ",.0f"),
    "down": ("MB down", 1e6, ",.2f"),
    "up": ("MB up", 1e6, ",.2f"),
    "seconds": ("Seconds", 1, ",.1f"),
    "memory": ("RAM MB", 1e6, ",.0f"),
}
"""What a run computed and sent: header, unit and form."""


def write_report(comparison: ComparisonPlan, outcomes: Sequence[Outcome], out: Path) -> list[str]:
    """Write the page, the tables and the pictures of a comparison.

    Returns
    -------
    list of str
        The files.

    Raises
    ------
    RuntimeError
        If not one cell has numbers.
    """
    report = ComparisonReport(comparison, outcomes, out)
    parts = [f"# {report.title}", *report.parts()]
    texts = {
        "report.md": as_markdown(parts),
        "cells.csv": report.cells().to_csv(index=False),
        "curves.csv": report.rounds().to_csv(index=False),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [*texts, *(part.path.name for part in parts if isinstance(part, Image))]


class ComparisonReport:
    """The parts of a report.

    Raises
    ------
    RuntimeError
        If not one cell has numbers.
    """

    def __init__(self, comparison: ComparisonPlan, outcomes: Sequence[Outcome], out: Path) -> None:
        run = next((run for one in outcomes for run in one.finished), None)
        if run is None:
            failed = next(run["error"] for one in outcomes for run in one.runs)
            raise RuntimeError(f"no cell of the comparison has numbers; the first: {failed}")
        self.comparison, self.outcomes, self.out, self.run = comparison, outcomes, out, run
        self.metric: Metric = METRICS[run["metric"]]
        self.seeds = comparison.all_seeds
        self.with_numbers = sorted(
            (one for one in outcomes if one.finished),
            key=lambda one: np.mean(self.scores(one)),
            reverse=self.metric.higher_is_better,
        )
        complete = [one for one in self.with_numbers if len(one.finished) == len(self.seeds)]
        # Tests need every seed of every method that they are about.
        self.tested = complete if len(complete) > 1 and len(self.seeds) > 1 else []
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        number = len(comparison.methods)
        self.title = f"{number} method{'s' if number > 1 else ''} on {run['data']}, {seeds}"

    def scores(self, outcome: Outcome, name: str = "mean") -> list[float]:
        """Return a number of the main model by seed, as it is shown."""
        scale = self.metric.scale
        return [
            math.nan if (value := main_scores(run)[name]) is None else scale * value
            for run in outcome.finished
        ]

    def parts(self) -> list[Part]:
        """Return all parts in order."""
        return [
            *self.what_was_run(),
            "## Results",
            *(self.swept() if self.comparison.sweep else self.compared()),
            "## What each method did",
            self.work(),
            *self.settings(),
            *self.failed(),
            *self.again(),
        ]

    def compared(self) -> Iterable[Part]:
        """Compare the methods where each is run in one way."""
        yield self.results()
        yield what_it_can_show(len(self.seeds), len(self.with_numbers))
        lines: Lines = {
            one.alias: [
                (server_round, self.metric.scale * value)
                for run in one.finished
                for server_round, value in _curve(run)
            ]
            for one in self.with_numbers
        }
        title = f"{self.run['data']}: {self.metric.measure} by round"
        yield self.curves_of(lines, "curves", title, "communication round")
        if self.tested:
            yield from self.ranks()
            yield from self.differences()
        yield from self.fairness()
        yield from self.other_models()

    def swept(self) -> Iterable[Part]:
        """Show every method by the setting that was swept last, for each value of the others."""
        *others, last = self.comparison.sweep
        values = self.comparison.sweep[last]
        found = {one.label: self.scores(one) for one in self.with_numbers}
        for number, point in enumerate(product(*(self.comparison.sweep[key] for key in others))):
            at = dict(zip(others, point, strict=True))
            scores = {
                alias: [found.get(Outcome(alias, point={**at, last: v}).label, []) for v in values]
                for alias in self.comparison.methods
            }
            where = "".join(f"{key} = {value}, " for key, value in at.items())
            yield Grid(
                f"{self.metric.header}, {where}by {last}: mean ± standard deviation over seeds, of "
                "each method's first kind of model.",
                ["method", *map(str, values)],
                [
                    [alias, *(with_spread(self.metric, mean_of(x)) if x else NONE for x in row)]
                    for alias, row in scores.items()
                ],
            )
            lines: Lines = {
                alias: [(str(v), one) for v, x in zip(values, row, strict=True) for one in x]
                for alias, row in scores.items()
            }
            if any(lines.values()):
                name = f"sweep-{number}" if others else "sweep"
                yield self.curves_of(lines, name, f"{self.run['data']}, {where}by {last}", last)

    def curves_of(self, lines: Lines, name: str, title: str, xlabel: str) -> Image:
        """Draw the metric by what is on the x-axis."""
        picture, target = Picture(self.out / f"{name}.png", title), self.comparison.target
        levels = {} if target is None else {f"target: {target:g}": target}
        curves(lines, xlabel=xlabel, ylabel=self.metric.axis, levels=levels, picture=picture)
        return Image(picture.path, f"Mean over seeds by {xlabel}; bands: one standard deviation.")

    def what_was_run(self) -> Iterable[Part]:
        """Say data, rounds, tuning."""
        comparison, first = self.comparison, self.run
        seeds = ", ".join(map(str, self.seeds))
        text = (
            f"Data: {first['data']}, {first['num_clients']} clients, experiment "
            f"{comparison.experiment}{comparison.profile and ' ' + comparison.profile}, "
            f"{len(first['traffic']) and first['traffic'][-1][0]} rounds, seeds {seeds}. For one "
            "seed all methods have the same data, initial model, clients in each round, and "
            "batches. Nothing is chosen by the test samples."
        )
        for key, values in comparison.sweep.items():
            text += f" Run with each of {key} = {', '.join(map(str, values))}."
        if comparison.work is not None:
            text += (
                f" Local work: gradients worth {comparison.work:g} passes over a client's samples "
                "in a round, as near as whole epochs or steps of each method allow."
            )
        if comparison.tune:
            spaces = ", ".join(f"{key} in {space}" for key, space in comparison.tune.items())
            text += (
                f" Tuned: {spaces}; {comparison.budget} trials a method (Optuna, TPE), chosen by "
                "validation samples, which are never trained on, of the data of seed "
                f"{self.seeds[0]}."
            )
        yield text

    def results(self) -> Grid:
        """Return the table of each method's first kind of model."""
        metric, target = self.metric, self.comparison.target
        clustered = any(_ari(run) is not None for one in self.with_numbers for run in one.finished)
        headers = ["method", "model", metric.header, "95 % interval", "Std", "Worst 10 %"]
        headers += ["Std over clients", *(["ARI"] if clustered else [])]
        headers += [] if target is None else ["Rounds to target", "MB to target"]
        rows = []
        for one in self.with_numbers:
            mean = mean_of(self.scores(one))
            row = [one.alias, next(iter(one.finished[0]["models"])), _text(metric, mean.value)]
            row += [_interval(metric, mean), _text(metric, mean.std)]
            row += [_text(metric, np.mean(self.scores(one, name))) for name in ("worst", "std")]
            if clustered:
                ari = [value for run in one.finished if (value := _ari(run)) is not None]
                row.append(f"{np.mean(ari):.2f}" if ari else NONE)
            if target is not None:
                row += self.to_target(one, target)
            rows.append([*row, f"{len(one.finished)}/{len(self.seeds)}"])
        caption = (
            f"{metric.legend} Mean over seeds with its bootstrap interval; Std: standard deviation "
            "over seeds; Worst 10 % and Std over clients: of each seed, averaged."
        )
        if target is not None:
            caption += (
                f" Target {target:g}: rounds and megabytes (both ways) until the mean was as good, "
                "where evaluated, over the seeds that got there, and how many did."
            )
        return Grid(caption, [*headers, "Seeds"], rows, names=2)

    def to_target(self, one: Outcome, target: float) -> list[str]:
        """Return rounds and megabytes to the target, and on how many seeds it was reached."""
        sign = self.metric.scale * (1 if self.metric.higher_is_better else -1)
        reached = []
        for run in one.finished:
            good = [r for r, v in _curve(run) if sign * v >= sign * target / self.metric.scale]
            if good:
                sent = sum(down + up for r, down, up in run["traffic"] if r <= min(good))
                reached.append((min(good), sent / 1e6))
        if not reached:
            return [NONE, NONE]
        rounds, megabytes = np.mean(reached, axis=0)
        return [f"{rounds:.1f} ({len(reached)}/{len(one.finished)})", f"{megabytes:.2f}"]

    def ranks(self) -> Iterable[Part]:
        """Rank the methods over the seeds."""
        ranks = ranks_of([self.scores(one) for one in self.tested], self.metric.higher_is_better)
        test = (
            "Friedman's test needs three methods or more."
            if math.isnan(ranks.friedman)
            else f"Friedman's test that all methods are alike: p = {ranks.friedman:.3g}."
        )
        missing = [one.alias for one in self.outcomes if one not in self.tested]
        if missing:
            test += f" Left out, because seeds failed: {', '.join(missing)}."
        order = np.argsort(ranks.means, kind="stable")
        yield "## Ranks"
        yield Grid(
            f"{test} Nemenyi's test tells two methods apart at {100 * LEVEL:g} % where their mean "
            f"ranks differ by {ranks.critical:.2f}.",
            ["method", "Mean rank"],
            [[self.tested[k].alias, f"{ranks.means[k]:.2f}"] for k in order],
        )

    def differences(self) -> Iterable[Part]:
        """Compare every two methods."""
        pairs = pairs_of([self.scores(one) for one in self.tested], self.metric.higher_is_better)
        rows = [
            [
                f"{self.tested[pair.first].alias} – {self.tested[pair.second].alias}",
                f"{pair.difference.value:+.{self.metric.digits}f}",
                _interval(self.metric, pair.difference, sign="+"),
                f"{pair.wins}/{len(self.seeds)}",
                f"{pair.p:.3g}",
                f"{pair.holm:.3g}",
            ]
            for pair in pairs
        ]
        yield "## Paired differences"
        yield Grid(
            "Differences by seed: mean with its bootstrap interval, seeds on which the first is "
            "better, and Wilcoxon's signed-rank test, alone and adjusted for all pairs.",
            ["pair", "Difference", "95 % interval", "Better on", "Wilcoxon p", "Holm p"],
            rows,
        )

    def fairness(self) -> Iterable[Part]:
        """Draw the mean over clients against the spread over them."""
        spreads = [self.scores(one, "std") for one in self.with_numbers]
        if np.isnan(np.concatenate(spreads)).any():
            return
        title = "Mean and spread over the clients, a point a seed"
        picture = Picture(self.out / "fairness.png", title)
        figure, axes = picture.axes((8.0, 5.0))
        for k, one in enumerate(self.with_numbers):
            style: dict[str, Any] = {"color": LINES[k % len(LINES)], "alpha": 0.8}
            style["marker"] = MARKERS[k % len(MARKERS)]
            axes.scatter(self.scores(one), spreads[k], label=one.alias, **style)
        ylabel = f"standard deviation over clients{' (%)' if self.metric.percent else ''}"
        axes.set(xlabel=self.metric.axis, ylabel=ylabel)
        legend_below(figure, axes)
        picture.save(figure)
        yield "## Fairness"
        yield Image(
            picture.path, "Each point is a seed. The lower, the more alike the clients are served."
        )

    def work(self) -> Grid:
        """Return what the methods computed and sent."""
        rows = []
        for one in self.with_numbers:
            means = pd.DataFrame(map(_work_of, one.finished), dtype=float).mean()
            numbers = [
                NONE if math.isnan(means[key]) else f"{means[key] / unit:{form}}"
                for key, (_, unit, form) in _WORK.items()
            ]
            rows.append([one.label, *numbers])
        return Grid(
            "Of one run, averaged over seeds. Gradients: samples whose loss had its gradient "
            "computed in training, in all clients and rounds (a Hessian product is not counted, "
            "two losses of a sample are two). Passes: the same for one usable reply, over its "
            "client's samples. Clients trained: usable replies of all rounds; some methods train "
            "all clients in every round. MB: arrays sent to train. Seconds of the processor.",
            ["method", *(header for header, _, _ in _WORK.values())],
            rows,
        )

    def other_models(self) -> Iterable[Part]:
        """List the models beside the main ones."""
        rows = []
        for one in self.with_numbers:
            for title in list(one.finished[0]["models"])[1:]:
                values = [run["models"][title]["mean"] for run in one.finished]
                if None in values:
                    continue
                mean = mean_of(self.metric.scale * np.array(values, dtype=np.float64))
                numbers = [_text(self.metric, mean.value), _interval(self.metric, mean)]
                rows.append([one.label, title, *numbers])
        if rows:
            yield "## Other models of the same runs"
            headers = ["method", "model", self.metric.header, "95 % interval"]
            caption = "The tables and tests above are of each method's first kind of model."
            yield Grid(caption, headers, rows, names=2)

    def settings(self) -> Iterable[Part]:
        """Say what was set and chosen, and what choosing it cost."""
        rows = []
        for one in self.outcomes:
            method = self.comparison.method_of(one.alias)
            raw = self.comparison.raw_settings(one.alias, self.seeds[0], {}, one.point)
            settings = checked(raw, one.alias)
            table = completed(settings.baselines.methods()[method], settings.algorithm)
            shown = given(table, without=("client", *(k.replace("-", "_") for k in one.tuned)))
            shown += [f"client.{entry}" for entry in given(table.client)]
            chosen = ", ".join(f"{key} = {value:.4g}" for key, value in one.tuned.items())
            failed = sum("error" in trial for trial in one.trials)
            rows.append(
                [
                    one.label,
                    method,
                    ", ".join(shown) or "defaults",
                    chosen or NONE,
                    f"{len(one.trials)}" + (f" ({failed} failed)" if failed else ""),
                    f"{sum(trial.get('seconds', 0) for trial in one.trials):,.0f}",
                    f"{sum(trial.get('gradients') or 0 for trial in one.trials):,.0f}",
                ]
            )
        headers = ["method", "is", "settings", "chosen", "Trials", "Seconds", "Gradients"]
        yield "## Settings"
        yield Grid(
            "What is not a method's default, what tuning chose, and what choosing cost: trials, "
            "seconds, gradients.",
            headers,
            rows,
            names=4,
        )

    def failed(self) -> Iterable[Part]:
        """List the cells without numbers."""
        rows = [
            [one.label, str(run["seed"]), run["error"]]
            for one in self.outcomes
            for run in one.runs
            if "error" in run
        ]
        if rows:
            yield "## Failed cells"
            yield Grid("The same command runs them again.", ["method", "seed", "why"], rows, 3)

    def again(self) -> Iterable[Part]:
        """Say how to make the report again."""
        yield "## Make it again"
        yield (
            f"With fl-admm-strategies {__version__} and this file as {COMPARISON}; cells that are "
            "in the folder are not run again:"
        )
        yield code(f"fl-admm compare {COMPARISON} --out {self.out.name}")
        yield code(self.comparison.to_toml().strip())

    def cells(self) -> pd.DataFrame:
        """Return a line for every model of every cell, and for every cell that failed."""
        scored = ["mean", "std", "worst", "best"]
        lines: list[dict[str, Any]] = []
        for one in self.outcomes:
            for run in one.runs:
                line = {"method": one.alias, **one.point, "seed": run["seed"]}
                if "error" in run:
                    lines.append(line | {"error": run["error"]})
                    continue
                line |= {k: None if x is None else round(x, 4) for k, x in _work_of(run).items()}
                for place, (title, scores) in enumerate(run["models"].items()):
                    found = {name: scores[name] for name in scored}
                    found["ari"] = scores["cells"].get("ari")
                    lines.append({**line, "model": title, "headline": int(place == 0), **found})
        first = ["method", *self.comparison.sweep, "seed", "model", "headline"]
        return pd.DataFrame(lines, columns=[*first, *scored, "ari", *_WORK, "error"])

    def rounds(self) -> pd.DataFrame:
        """Return a line for every round that was evaluated, of every model and cell."""
        lines = [
            {**one.point, "method": one.alias, "seed": run["seed"]}
            | {"model": title, "round": server_round, "mean": mean}
            for one in self.outcomes
            for run in one.finished
            for title, points in run["curves"].items()
            for server_round, mean in points
        ]
        columns = ["method", *self.comparison.sweep, "seed", "model", "round", "mean"]
        return pd.DataFrame(lines, columns=columns)


def _work_of(run: Found) -> dict[str, Any]:
    """Return what a run computed and sent, by the names of `_WORK`."""
    passes = run.get("passes")
    down, up = (sum(moved[way] for moved in run["traffic"]) for way in (1, 2))
    sent = {"passes": passes and float(np.mean(passes)), "down": down, "up": up}
    return {name: (run | sent)[name] for name in _WORK}


def _ari(run: Found) -> float | None:
    """Return the ARI of a run's clusters, which stands beside its cluster models."""
    cells = [model["cells"] for model in run["models"].values()]
    return next((one["ari"] for one in cells if "ari" in one), None)


def _curve(run: Found) -> list[tuple[int, float]]:
    """Return the main model's mean by round, where it is finite."""
    curve = run["curves"][next(iter(run["models"]))]
    return [(server_round, value) for server_round, value in curve if value is not None]


def _text(metric: Metric, value: float | np.floating[Any]) -> str:
    return NONE if math.isnan(value) else metric.text(float(value) / metric.scale)


def with_spread(metric: Metric, mean: Mean) -> str:
    """Return a mean over seeds with its standard deviation, which one seed does not have."""
    deviation = "" if math.isnan(mean.std) else f" ± {_text(metric, mean.std)}"
    return _text(metric, mean.value) + deviation


def _interval(metric: Metric, mean: Mean, sign: str = "") -> str:
    form = f"{sign}.{metric.digits}f"
    return NONE if math.isnan(mean.low) else f"{mean.low:{form}} to {mean.high:{form}}"
