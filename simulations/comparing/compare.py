"""A comparison from its start to its numbers: what is run when, and what is there already."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from clients.toolkit.solving.steps import take_steps
from fl_admm_strategies.runtime.saving.files import lock_folder

from ..problems.scores import METRICS
from ..reports import write_text
from . import cell as cells
from .cell import Cell
from .comparison import ComparisonPlan, optuna
from .workers import Workers

AT_ONCE = 5
"""Trials that are drawn together; constant, so that the number of workers changes no choice."""


COMPARISON = "comparison.toml"
CELLS = "cells"

_GAUGE = 3
"""Rounds, of which the last counts: FedALA learns its first weights, for long, in the second."""
Found = dict[str, Any]
"""What a cell's file holds."""
Say = Callable[[str], None]


@dataclass
class Outcome:
    """What came of a method, at a point of what is swept.

    Attributes
    ----------
    alias : str
    tuned : dict
        The settings that tuning chose.
    trials : list of Found
        The runs of its tuning.
    runs : list of Found
        One a seed; ``error`` says why one has no numbers.
    point : dict
        The values of the swept settings.
    """

    alias: str
    tuned: dict[str, float | int] = field(default_factory=dict)
    trials: list[Found] = field(default_factory=list)
    runs: list[Found] = field(default_factory=list)
    point: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The alias with the point."""
        return ", ".join([self.alias, *(f"{key}={value}" for key, value in self.point.items())])

    @property
    def finished(self) -> list[Found]:
        """The runs that have numbers."""
        return [run for run in self.runs if "error" not in run]


def main_scores(found: Found) -> Any:
    """Return the scores of the model that a run's method is judged by: the first of its kinds."""
    return next(iter(found["models"].values()))


def compare(
    comparison: ComparisonPlan,
    out: Path,
    data_root: Path | None,
    most: int | None,
    say: Say,
) -> list[Outcome]:
    """Run all that a comparison needs and that is not in its folder.

    Parameters
    ----------
    comparison : ComparisonPlan
    out : Path
        The folder; ``cells`` in it has a file for every run.
    data_root : Path or None
    most : int or None
        The most worker processes; None for the number of cores.
    say : callable
        Takes a line of progress.

    Raises
    ------
    RuntimeError
        If the comparison in the folder is still going on, or Optuna is missing.
    """
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    with lock_folder(out / CELLS):
        write_text(out / COMPARISON, comparison.to_toml())
        return _Schedule(comparison, out / CELLS, most or os.cpu_count() or 1, say).run(data_root)


Batch = Generator[list[Cell], list[Found], Outcome]


def steps_of(
    comparison: ComparisonPlan,
    alias: str,
    data_root: Path | None,
    point: dict[str, Any] | None = None,
) -> Batch:
    """Yield the cells that a method needs next, are sent what they found; return the outcome."""
    outcome, seeds = Outcome(alias, point=point or {}), comparison.all_seeds

    def cell(
        seed: int, tuned: dict[str, float | int], trial: bool = False, gauge: bool = False
    ) -> Cell:
        raw = comparison.raw_settings(alias, seed, {**outcome.tuned, **tuned}, outcome.point)
        if gauge:
            raw["training"]["num-rounds"] = _GAUGE
        method = comparison.method_of(alias)
        return Cell(alias, method, raw, bool(comparison.tune), trial, data_root)

    if comparison.work is not None and (names := comparison.lengths_of(alias)):
        found = yield [cell(seeds[0], dict.fromkeys(names, n), gauge=True) for n in (1, 2)]
        wrong = next((one["error"] for one in found if "error" in one), None)
        if not wrong and not found[0]["passes"]:
            wrong = "work is given, but gradients are counted in models of PyTorch alone."
        if wrong:
            outcome.runs = [{"alias": alias, "seed": seed, "error": wrong} for seed in seeds]
            return outcome
        once, twice = (one["passes"][-1] for one in found)
        if twice > once:  # else no setting makes its clients train for longer: FedGiA's
            length = max(1, 1 + round((comparison.work - once) / (twice - once)))
            outcome.tuned = dict.fromkeys(names, length)
    if spaces := comparison.spaces_of(alias):
        sampler = optuna().samplers.TPESampler(seed=seeds[0])
        study = optuna().create_study(direction="maximize", sampler=sampler)
        states, left = optuna().trial.TrialState, comparison.budget
        while left:
            trials = [study.ask(spaces) for _ in range(min(AT_ONCE, left))]
            left -= len(trials)
            found = yield [cell(seeds[0], trial.params, True) for trial in trials]
            for trial, one in zip(trials, found, strict=True):
                outcome.trials.append({**one, "tuned": trial.params})
                state = states.FAIL if "error" in one else states.COMPLETE
                study.tell(trial, _value(one), state)
        try:
            outcome.tuned |= study.best_params
        except ValueError:
            last = next(one["error"] for one in reversed(outcome.trials) if "error" in one)
            why = f"every trial of the tuning failed; the last: {last}"
            outcome.runs = [{"alias": alias, "seed": seed, "error": why} for seed in seeds]
            return outcome
    outcome.runs = yield [cell(seed, {}) for seed in seeds]
    return outcome


def _value(found: Found) -> float | None:
    if "error" in found:
        return None
    sign = 1 if METRICS[found["metric"]].higher_is_better else -1
    return sign * float(main_scores(found)["mean"])


class _Schedule:
    """Has the methods' cells run side by side, each cell once; a method waits for its own only."""

    def __init__(self, comparison: ComparisonPlan, folder: Path, most: int, say: Say) -> None:
        self.comparison, self.folder, self.say = comparison, folder, say
        self.pool, self.runs = Workers(), ThreadPoolExecutor(most)
        self.lock = Lock()
        self.futures: dict[Path, Future[Found]] = {}
        self.done = 0

    def run(self, data_root: Path | None) -> list[Outcome]:
        """Run all; return the outcomes in the order of the comparison."""
        steps = [
            steps_of(self.comparison, alias, data_root, point)
            for alias, point in product(self.comparison.methods, self.comparison.points)
        ]
        with self.runs, ThreadPoolExecutor(len(steps)) as methods:
            try:
                return [*methods.map(partial(take_steps, perform=self._found), steps)]
            except BaseException:
                self.runs.shutdown(wait=False, cancel_futures=True)
                self.pool.stop()
                raise

    def _found(self, batch: Sequence[Cell]) -> list[Found]:
        """Wait for the next cells of a method."""
        with self.lock:
            for cell in batch:
                path = cell.path(self.folder)
                # Two trials may have the same settings, and two points where a method lacks what is
                # swept.
                if path not in self.futures:
                    self.futures[path] = self.runs.submit(self._run, path, cell)
        return [self.futures[cell.path(self.folder)].result() for cell in batch]

    def _run(self, path: Path, cell: Cell) -> Found:
        """Return what a cell found, of its file if there is one with numbers."""
        found, how = cells.read(path), " (there already)"
        if found is None or "error" in found:
            path.unlink(missing_ok=True)
            failure, how = self.pool.run(path, cells.work, cell), ""
            found = cells.read(path)
            if found is None or (failure and "error" not in found):
                error = failure or "it wrote no file."
                found = {"alias": cell.alias, "seed": cell.seed, "error": error}
        what = "trial" if cell.on_validation else f"seed {cell.seed}"
        with self.lock:
            self.done += 1
            self.say(f"{self.done} {cell.alias}, {what}: {_in_short(found)}{how}")
        return found


def _in_short(found: Found) -> str:
    if "error" in found:
        return f"failed: {found['error']}"
    metric = METRICS[found["metric"]]
    return f"{metric.text(main_scores(found)['mean'], unit=True)} in {found['seconds']:.1f} s"
