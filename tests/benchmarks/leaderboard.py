"""The leaderboard of docs/leaderboard: methods, tuned alike, on several problems over seeds.

Run with `python -m tests.benchmarks.leaderboard` in the repository, or name problems:
`python -m tests.benchmarks.leaderboard digits-two har --seeds 3 --methods local ditto`. Each
problem is a comparison, docs/leaderboard/PROBLEM.toml. The first seed of all problems comes first,
then the second, and so on. Every run becomes lines of PROBLEM.csv beside that file, one for each of
its models, and is not repeated: an interrupted command goes on. The pages are written from these
files; with `--seeds 0` nothing runs. Data files are read from $FL_ADMM_DATA.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from simulations.comparing import cell as cells
from simulations.comparing import comparison as comparisons
from simulations.comparing.compare import CELLS, Found, Outcome, compare, steps_of
from simulations.comparing.comparison import ComparisonPlan
from simulations.comparing.report import ComparisonReport, with_spread
from simulations.comparing.statistics import mean_of, ranks_of, what_it_can_show
from simulations.reports import as_markdown, write_text
from simulations.reports.base import NONE
from simulations.reports.pages import Grid, Part, code

FOLDER = Path("docs/leaderboard")
PROBLEMS = {
    "digits-two": "digits, two classes a client",
    "digits-swap": "digits, three labellings",
    "digits-dirichlet": "digits, Dirichlet 0.1",
    "housing-bodyfat": "Housing and Body fat, RMSE",
    "digits-alike": "digits, alike",
    "s1": "S1",
    "digits-rotated": "digits, rotated",
    "har": "HAR, a person a client",
    "mnist-cnn": "MNIST, CNN",
}
"""In the order in which they are run; RMSE for the regression, else accuracy in %."""
OF_A_FILE = ["alias", "seed", "error", "method", "form", "data", "num_clients", "metric"]
OF_A_FILE += ["gradients", "trained", "seconds", "memory"]
OF_A_MODEL = ["mean", "std", "worst", "best"]
FIELDS = ["file", *OF_A_FILE, "passes", "rounds", "down", "up", "model", *OF_A_MODEL, "ari"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's file, one for each model."""
    found = cells.read(path)
    if found is None:
        return []
    line = {"file": path.name, **{key: found.get(key) for key in OF_A_FILE}}
    if "error" in found:
        return [line]
    traffic = found["traffic"]
    line["rounds"] = traffic[-1][0]
    line["passes"] = np.mean(found["passes"]) if found.get("passes") else None
    line |= {way: sum(moved[k] for moved in traffic) for k, way in ((1, "down"), (2, "up"))}
    return [
        {
            **line,
            "model": title,
            **{key: scores[key] for key in OF_A_MODEL},
            "ari": scores["cells"].get("ari"),
        }
        for title, scores in found["models"].items()
    ]


def unpack(problem: str, folder: Path) -> None:
    """Write the files of the runs that a CSV file has, as far as they are not there."""
    file = FOLDER / f"{problem}.csv"
    if not file.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Found] = {}
    with file.open(encoding="utf-8", newline="") as opened:
        for text in csv.DictReader(opened):
            line = {key: _value(value) for key, value in text.items() if value}
            known = {key: line[key] for key in OF_A_FILE if key in line}
            run = runs.setdefault(text["file"], known)
            if "error" in run:
                continue
            last = line["rounds"]
            run["passes"] = [line["passes"]] if "passes" in line else None
            run["traffic"] = [(last, line["down"], line["up"])]
            ari = {"ari": line["ari"]} if "ari" in line else {}
            scores = {key: line.get(key) for key in OF_A_MODEL}
            run.setdefault("models", {})[text["model"]] = {**scores, "cells": ari}
            run.setdefault("curves", {})[text["model"]] = [(last, scores["mean"])]
    for name, run in runs.items():
        if not (folder / name).exists():
            write_text(folder / name, json.dumps(run) + "\n")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def outcome_of(comparison: ComparisonPlan, alias: str, folder: Path) -> Outcome:
    """Return what has come of a method so far: nothing before its tuning is over."""
    steps = steps_of(comparison, alias, None)
    wanted, outcome = next(steps), Outcome(alias)
    while True:
        found = [run for cell in wanted if (run := cells.read(cell.path(folder))) is not None]
        if wanted[0].on_validation and len(found) < len(wanted):
            return outcome
        try:
            wanted = steps.send(found)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def read(problem: str) -> ComparisonPlan:
    """Return a problem's comparison."""
    return comparisons.read(FOLDER / f"{problem}.toml", {})


def run(problem: str, methods: Sequence[str], seeds: int, work: Path, workers: int) -> None:
    """Run what is not there yet of the first seeds, and keep it as CSV."""
    whole = read(problem)
    part = whole.only([alias for alias in whole.methods if not methods or alias in methods])
    part = part.model_copy(update={"seeds": whole.all_seeds[:seeds]})
    unpack(problem, work / problem / CELLS)
    try:
        compare(part, work / problem, None, workers, lambda line: print(problem, line, flush=True))
    finally:
        save(problem, work / problem / CELLS)


def save(problem: str, folder: Path) -> None:
    """Write a problem's CSV file from the files of its runs."""
    lines = [line for path in sorted(folder.glob("*.json")) for line in lines_of(path)]
    with (FOLDER / f"{problem}.csv").open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


class Table:
    """What has come of a problem so far: the methods that have a run, over the seeds that ran."""

    def __init__(self, problem: str, folder: Path) -> None:
        unpack(problem, folder)
        self.problem, whole = problem, read(problem)
        every = [outcome_of(whole, alias, folder) for alias in whole.methods]
        outcomes = [one for one in every if one.runs]
        ran = {run["seed"] for one in outcomes for run in one.runs}
        seeds = tuple(seed for seed in whole.all_seeds if seed in ran)
        part = whole.only([one.alias for one in outcomes]).model_copy(update={"seeds": seeds})
        run = next((run for one in outcomes for run in one.finished), None)
        self.report = run and ComparisonReport(part, outcomes, folder)

    def page(self) -> str:
        """Return its page."""
        report, name = self.report, self.problem
        assert report is not None
        first = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
        command = f"python -m simulations compare docs/leaderboard/{name}.toml"
        fewest = min(len(one.finished) for one in report.with_numbers)
        parts: list[Part] = [
            first.removeprefix("# "),
            *report.what_was_run(),
            report.results(),
            what_it_can_show(fewest, len(report.with_numbers)),
            "## What each method did",
            report.work(),
            *report.other_models(),
            *report.settings(),
            *report.failed(),
            "## Again",
            "All of it, with tests and pictures, or one method's row:",
            code(f"{command} --out runs/{name}\n{command} ditto --out runs/{name}"),
        ]
        return as_markdown([f"# Leaderboard: {PROBLEMS[name]}", *parts])

    def means(self) -> dict[str, tuple[str, float]]:
        """Return the cell of each method for the table of all problems, and its rank's value."""
        report = self.report
        if report is None:
            return {}
        sign = 1 if report.metric.higher_is_better else -1
        found = {}
        for one in report.with_numbers:
            mean = mean_of(report.scores(one))
            text = f"{with_spread(report.metric, mean)} ({len(one.finished)})"
            found[one.alias] = text, sign * mean.value
        return found

    def work(self) -> dict[str, float]:
        """Return the gradients of each method, as a multiple of Local's."""
        report = self.report
        passes = {
            one.alias: np.mean([run["passes"] for run in one.finished])
            for one in (report.with_numbers if report else [])
        }
        return {alias: float(count / passes["local"]) for alias, count in passes.items()}


def overview(tables: Sequence[Table]) -> str:
    """Return the page of all problems."""
    found = {t.problem: means for t in tables if (means := t.means())}
    methods = sorted({alias for means in found.values() for alias in means})
    everywhere = [alias for alias in methods if all(alias in means for means in found.values())]
    ranks = ranks_of([[means[alias][1] for means in found.values()] for alias in everywhere], True)
    rank = dict(zip(everywhere, ranks.means, strict=True))
    of_problems = [table.work() for table in tables]
    local = {p: means["local"][1] for p, means in found.items() if "local" in means}
    rows = []
    for alias in sorted(methods, key=lambda alias: rank.get(alias, len(methods))):
        ahead = [means[alias][1] > local[p] for p, means in found.items() if alias in means]
        own = [found[p].get(alias, (NONE, 0.0))[0] for p in found]
        above = NONE if alias == "local" else f"{sum(ahead)}/{len(ahead)}"
        work = np.mean([of[alias] for of in of_problems if alias in of])
        mean_rank = f"{rank[alias]:.1f}" if alias in rank else NONE
        rows.append([alias, mean_rank, above, f"{work:.1f}", *own])
    links = [f"[{PROBLEMS[p]}]({p}.md)" for p in found]
    missing = [PROBLEMS[p] for p in PROBLEMS if p not in found]
    parts: list[Part] = [
        INTRODUCTION,
        Grid(CAPTION, ["method", "Mean rank", "Above Local", "Work", *links], rows),
        (
            f"Mean ranks of the {len(everywhere)} methods that have run on all {len(found)} "
            "problems. "
            f"Friedman's test that all are alike has p = {ranks.friedman:.2g}; two mean ranks less "
            f"than {ranks.critical:.1f} apart are no difference (Nemenyi, 5 %)."
            + (f" Not run yet: {'; '.join(missing)}." if missing else "")
        ),
        "## What is equal",
        EQUAL,
        "## Going on",
        GOING_ON,
        code("python -m tests.benchmarks.leaderboard --seeds 10 --workers 2"),
    ]
    return as_markdown(["# Leaderboard of personalised federated learning", *parts])


INTRODUCTION = """Methods tuned alike on several problems, with training alone (Local) beside
them. The figures were made with version 0.1.0. Nothing was chosen on test data.
[Which method?](../choosing-a-method.md) says what follows;
[Compare on your data](../compare.md) makes the same for yours."""
CAPTION = """Test accuracy in % (Housing and Body fat: RMSE): the mean over the clients of the
model that a client would use; mean ± deviation over seeds, in brackets how many. **A row of one
seed ranks nothing.** "Above Local": problems on which the mean is better. "Work": gradients, as a
multiple of Local's, averaged over the problems."""
EQUAL = """For one seed all methods have the same data, initial model, clients and batches; 50
rounds of one epoch (S1, Housing and Body fat: ten steps of the full gradient), everybody in
each. The step size of every method is the best of the same four, drawn by Optuna, on validation
samples of the first seed. All other settings are the defaults or, where a method has none (the
number of groups of IFCA, thresholds), those in the problem's file: a method with a setting that
matters as much as the step size, such as Ditto's `lam`, can do better, by five points on one of two
problems that were tried and 22 on the other ([tuned as well](own-settings.md)). Local work
differs by definition: each problem's page has the gradients, bytes and seconds."""
GOING_ON = """Each problem is a comparison file beside this page, and every run a line of the
CSV of the same name, so that nothing is run twice. With ten seeds of all methods it is 2,800
runs, of one to four seconds of the processor on the digits, two on the regression and three to
seven on HAR (Per-FedAvg 25), ten to twenty on the CNN and S1. `--seeds 0` writes the pages only;
the extra `compare` has to be installed."""


def main() -> None:
    """Run what is not there yet, and write the pages."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("problems", nargs="*", help="without, all")
    parser.add_argument("--methods", nargs="+", default=[], help="without, all of the problem")
    parser.add_argument("--seeds", type=int, default=10, help="the first so many; 0: pages only")
    parser.add_argument("--work", type=Path, default=Path("runs/leaderboard"))
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    for seeds in range(1, given.seeds + 1):
        for problem in given.problems or PROBLEMS:
            run(problem, given.methods, seeds, given.work, given.workers)
    with TemporaryDirectory() as folder:
        tables = [Table(problem, Path(folder) / problem) for problem in PROBLEMS]
    for table in tables:
        if table.report is not None:
            write_text(FOLDER / f"{table.problem}.md", table.page())
    write_text(FOLDER / "README.md", overview(tables))


if __name__ == "__main__":
    main()
