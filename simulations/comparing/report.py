"""What a comparison says: tables, pictures and the files for a paper."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fl_admm_strategies import __version__
from fl_admm_strategies.runtime.record import Traffic

from ..experiments.loading import checked
from ..methods import completed
from ..methods.measures import cost_to
from ..problems.scores import METRICS, Metric
from ..reports import write_text
from ..reports.base import NONE
from ..reports.plots import Picture
from ..settings.tables import given
from . import pages, pictures
from .compare import COMPARISON, Found, Outcome, headline
from .comparison import Comparison
from .pages import Code, Grid, Heading, Image, Paragraph, Part
from .statistics import LEVEL, Mean, mean_of, pairs_of, ranks_of, what_it_can_show

PAGE = "report.html"
_CHOSEN_BY = {
    "validation": "validation samples, which are never trained on,",
    "clients": "clients that are in no other run, a third",
}
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


def write_report(comparison: Comparison, outcomes: Sequence[Outcome], out: Path) -> Sequence[str]:
    """Write the page, the tables and the pictures of a comparison.

    Returns
    -------
    sequence of str
        The files.

    Raises
    ------
    RuntimeError
        If not one cell has numbers.
    """
    run = next((run for one in outcomes for run in one.finished), None)
    if run is None:
        failed = next(run["error"] for one in outcomes for run in one.runs)
        raise RuntimeError(f"no cell of the comparison has numbers; the first: {failed}")
    report = Report(comparison, outcomes, out, run)
    title, parts = report.title, report.parts()
    write_text(out / PAGE, pages.as_html(title, parts))
    write_text(out / "report.md", pages.as_markdown(title, parts))
    write_text(out / "tables.tex", pages.as_latex(parts))
    write_text(out / "cells.csv", report.cells_csv())
    write_text(out / "curves.csv", report.curves_csv())
    files = [PAGE, "report.md", "tables.tex", "cells.csv", "curves.csv"]
    return [*files, *(part.path.name for part in parts if isinstance(part, Image))]


class Report:
    """The parts of a report; `run` is any that has numbers."""

    def __init__(
        self, comparison: Comparison, outcomes: Sequence[Outcome], out: Path, run: Found
    ) -> None:
        self.comparison, self.outcomes, self.out, self.run = comparison, outcomes, out, run
        self.metric: Metric = METRICS[run["metric"]]
        self.seeds = comparison.all_seeds
        sign = -1 if self.metric.higher_is_better else 1
        self.with_numbers = sorted(
            (one for one in outcomes if one.finished),
            key=lambda one: sign * np.mean(self.scores(one)),
        )
        complete = [one for one in self.with_numbers if len(one.finished) == len(self.seeds)]
        # Tests need every seed of every method that they are about.
        self.tested = complete if len(complete) > 1 and len(self.seeds) > 1 else []
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        self.title = f"{len(comparison.methods)} methods on {run['data']}, {seeds}"

    def scores(self, outcome: Outcome, name: str = "mean") -> list[float]:
        """Return a number of the headline by seed, as it is shown."""
        scale = self.metric.scale
        return [
            math.nan if (value := headline(run)[name]) is None else scale * value
            for run in outcome.finished
        ]

    def parts(self) -> list[Part]:
        """Return all parts in order."""
        return [
            *self.what_was_run(),
            Heading("Results"),
            *(self.swept() if self.comparison.sweep else self.compared()),
            Heading("What each method did"),
            self.work(),
            *self.settings(),
            *self.failed(),
            *self.again(),
        ]

    def compared(self) -> Iterable[Part]:
        """Compare the methods where each is run in one way."""
        yield self.results()
        yield Paragraph(what_it_can_show(len(self.seeds), len(self.with_numbers)))
        yield from self.curves()
        yield from self.ranks()
        yield from self.differences()
        yield from self.fairness()
        yield from self.other_models()

    def swept(self) -> Iterable[Part]:
        """Show every method by the setting that was swept last, for each value of the others."""
        *others, last = self.comparison.sweep
        values = self.comparison.sweep[last]
        found = {one.label: one for one in self.with_numbers}
        for number, point in enumerate(product(*(self.comparison.sweep[key] for key in others))):
            at = dict(zip(others, point, strict=True))
            lines, rows = {}, []
            for alias in self.comparison.methods:
                row, means = [alias], np.full((len(self.seeds), len(values)), np.nan)
                for place, value in enumerate(values):
                    one = found.get(Outcome(alias, point={**at, last: value}).label)
                    if one is None:
                        row.append(NONE)
                        continue
                    scores = self.scores(one)
                    means[: len(scores), place] = scores
                    row.append(with_spread(self.metric, mean_of(scores)))
                rows.append(row)
                lines[alias] = list(range(len(values))), means
            where = "".join(f"{key} = {value}, " for key, value in at.items())
            yield Grid(
                f"{self.metric.header}, {where}by {last}: mean ± standard deviation over seeds, of "
                "each method's first kind of model.",
                ["method", *(f"{value}" for value in values)],
                rows,
            )
            name = f"sweep-{number}" if others else "sweep"
            picture = self.picture(name, f"{self.run['data']}, {where}by {last}")
            pictures.curves(
                lines,
                xlabel=last,
                ylabel=self.metric.axis,
                target=self.comparison.target,
                picture=picture,
                ticks=[str(value) for value in values],
            )
            yield Image(picture.path, "Mean over seeds; bands: one standard deviation.")

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
                f"{_CHOSEN_BY[comparison.select]} of the data of seed {self.seeds[0]}."
            )
        yield Paragraph(text)

    def results(self) -> Grid:
        """Return the table of the headline."""
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
            row += [_text(metric, _mean(self.scores(one, name))) for name in ("worst", "std")]
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
        costs = []
        for run in one.finished:
            means = {int(r): v for r, v in _curve(run) if v is not None}
            traffic = {int(r): Traffic(down, up) for r, down, up in run["traffic"]}
            cost = cost_to(target, self.metric, means, traffic, itemsize=1)
            if cost["target-rounds"] is not None:
                costs.append(cost)
        if not costs:
            return [NONE, NONE]
        reached = f" ({len(costs)}/{len(one.finished)})"
        return [
            f"{np.mean([cost['target-rounds'] for cost in costs]):.1f}{reached}",
            f"{np.mean([cost['target-mb'] for cost in costs]):.2f}",
        ]

    def picture(self, name: str, title: str) -> Picture:
        """Return a picture as PNG and PDF."""
        return Picture(self.out / f"{name}.png", title, pdf=True)

    def curves(self) -> Iterable[Part]:
        """Draw the metric by round."""
        lines = {}
        for one in self.with_numbers:
            by_seed = [[np.nan if v is None else v for _, v in _curve(run)] for run in one.finished]
            rounds = [int(r) for r, _ in _curve(one.finished[0])]
            lines[one.alias] = rounds, self.metric.scale * np.array(by_seed, dtype=np.float64)
        picture = self.picture("curves", f"{self.run['data']}: {self.metric.measure} by round")
        pictures.curves(
            lines, ylabel=self.metric.axis, target=self.comparison.target, picture=picture
        )
        yield Image(picture.path, "Mean over seeds by round; bands: one standard deviation.")

    def ranks(self) -> Iterable[Part]:
        """Rank the methods over the seeds."""
        if not self.tested:
            return
        names = [one.alias for one in self.tested]
        ranks = ranks_of([self.scores(one) for one in self.tested], self.metric.higher_is_better)
        yield Heading("Ranks")
        picture = self.picture("ranks", f"Mean ranks over {len(self.seeds)} seeds")
        pictures.critical_difference(names, ranks, picture=picture)
        test = (
            "Friedman's test needs three methods or more."
            if math.isnan(ranks.friedman)
            else f"Friedman's test that all methods are alike: p = {ranks.friedman:.3g}."
        )
        missing = [one.alias for one in self.outcomes if one not in self.tested]
        if missing:
            test += f" Left out, because seeds failed: {', '.join(missing)}."
        yield Paragraph(
            f"{test} Bars join methods whose mean ranks differ by less than the critical "
            f"difference {ranks.critical:.2f} of Nemenyi's test at the {100 * LEVEL:g} % level."
        )
        yield Image(picture.path, "Mean ranks, 1 the best, with the critical difference.")

    def differences(self) -> Iterable[Part]:
        """Compare every two methods."""
        if not self.tested:
            return
        pairs = pairs_of([self.scores(one) for one in self.tested], self.metric.higher_is_better)
        rows = [
            [
                f"{self.tested[pair.first].alias} – {self.tested[pair.second].alias}",
                f"{pair.difference.value:+.{self.metric.digits}f}",
                _bounds(pair.difference, f"+.{self.metric.digits}f"),
                f"{pair.wins}/{len(self.seeds)}",
                f"{pair.p:.3g}",
                f"{pair.holm:.3g}",
            ]
            for pair in pairs
        ]
        headers = ["pair", "Difference", "95 % interval", "Better on", "Wilcoxon p", "Holm p"]
        yield Heading("Paired differences")
        yield Grid(
            "Differences by seed: mean with its bootstrap interval, seeds on which the first is "
            "better, and Wilcoxon's signed-rank test, alone and adjusted for all pairs.",
            headers,
            rows,
        )

    def fairness(self) -> Iterable[Part]:
        """Draw the mean over clients against the spread over them."""
        points = {
            one.alias: (self.scores(one), self.scores(one, "std")) for one in self.with_numbers
        }
        if any(math.isnan(spread) for _, spreads in points.values() for spread in spreads):
            return
        picture = self.picture("fairness", "Mean and spread over the clients, a point a seed")
        spread = f"standard deviation over clients{' (%)' if self.metric.percent else ''}"
        pictures.fairness(points, xlabel=self.metric.axis, ylabel=spread, picture=picture)
        yield Heading("Fairness")
        yield Image(
            picture.path, "Each point is a seed. The lower, the more alike the clients are served."
        )

    def work(self) -> Grid:
        """Return what the methods computed and sent."""
        rows = []
        for one in self.with_numbers:
            runs = [_work_of(run) for run in one.finished]
            row = [one.label]
            for name, (_, scale, form) in _WORK.items():
                values = [done[name] for done in runs]
                row.append(NONE if None in values else f"{np.mean(values) / scale:{form}}")  # type: ignore[arg-type]
            rows.append(row)
        return Grid(
            "Of one run, averaged over seeds. Gradients: samples whose loss had its gradient "
            "computed in training, in all clients and rounds (a Hessian product is not counted, "
            "two losses of a sample are two). Passes: the same for one usable reply, over its "
            "client's samples. Clients trained: usable replies of all rounds; some methods train "
            "everybody in every round by definition. MB: arrays sent to train. Seconds of "
            "the processor.",
            ["method", *(header for header, _, _ in _WORK.values())],
            rows,
        )

    def other_models(self) -> Iterable[Part]:
        """List the models beside the headlines."""
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
            yield Heading("Other models of the same runs")
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
        yield Heading("Settings")
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
            yield Heading("Failed cells")
            yield Grid("The same command runs them again.", ["method", "seed", "why"], rows, 3)

    def again(self) -> Iterable[Part]:
        """Say how to make the report again."""
        yield Heading("Make it again")
        yield Paragraph(
            f"With fl-admm-strategies {__version__} and this file as {COMPARISON}; cells that are "
            "in the folder are not run again:"
        )
        yield Code(f"fl-admm compare {COMPARISON} --out {self.out.name}")
        yield Code(self.comparison.to_toml().strip())

    def cells_csv(self) -> str:
        """Return a line for every model of every cell, and for every cell that failed."""
        scored = ["model", "headline", "mean", "std", "worst", "best", "ari"]
        lines: list[list[Any]] = [[*self.keys(), *scored, *_WORK, "error"]]
        for one in self.outcomes:
            for run in one.runs:
                first = [one.alias, *one.point.values(), run["seed"]]
                if "error" in run:
                    lines.append([*first, *[""] * (len(scored) + len(_WORK)), run["error"]])
                    continue
                done = ["" if x is None else round(x, 4) for x in _work_of(run).values()]
                for place, (title, scores) in enumerate(run["models"].items()):
                    numbers = [scores[name] for name in ("mean", "std", "worst", "best")]
                    ari = scores["cells"].get("ari", "")
                    lines.append([*first, title, int(place == 0), *numbers, ari, *done, ""])
        return _csv(lines)

    def curves_csv(self) -> str:
        """Return a line for every round that was evaluated, of every model and cell."""
        lines: list[list[Any]] = [[*self.keys(), "model", "round", "mean"]]
        for one in self.outcomes:
            for run in one.finished:
                first = [one.alias, *one.point.values(), run["seed"]]
                for title, points in run["curves"].items():
                    lines += [[*first, title, r, mean] for r, mean in points]
        return _csv(lines)

    def keys(self) -> list[str]:
        """Return the columns that say which cell a line of a CSV file is of."""
        return ["method", *self.comparison.sweep, "seed"]


def _work_of(run: Found) -> dict[str, float | None]:
    """Return what a run computed and sent, by the names of `_WORK`."""
    passes = run.get("passes")
    down, up = (sum(moved[way] for moved in run["traffic"]) for way in (1, 2))
    sent = {"passes": None if passes is None else _mean(passes), "down": down, "up": up}
    return {name: sent[name] if name in sent else run[name] for name in _WORK}


def _ari(run: Found) -> float | None:
    """Return the ARI of a run's clusters, which stands beside its cluster models."""
    cells = [model["cells"] for model in run["models"].values()]
    return next((one["ari"] for one in cells if "ari" in one), None)


def _curve(run: Found) -> list[tuple[int, float | None]]:
    curve: list[tuple[int, float | None]] = run["curves"][next(iter(run["models"]))]
    return curve


def _csv(lines: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _text(metric: Metric, value: float) -> str:
    return NONE if math.isnan(value) else metric.text(value / metric.scale)


def with_spread(metric: Metric, mean: Mean) -> str:
    """Return a mean over seeds with its standard deviation, which one seed does not have."""
    deviation = "" if math.isnan(mean.std) else f" ± {_text(metric, mean.std)}"
    return _text(metric, mean.value) + deviation


def _interval(metric: Metric, mean: Mean) -> str:
    return _bounds(mean, f".{metric.digits}f")


def _bounds(mean: Mean, form: str) -> str:
    return NONE if math.isnan(mean.low) else f"{mean.low:{form}} to {mean.high:{form}}"
