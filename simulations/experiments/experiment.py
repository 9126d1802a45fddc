"""An experiment, read once: what is learned, the method that learns it, and those beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import Data, FederatedData, kind_of, load, without_clients
from ..methods import Federation, completed
from ..problems import Problem, problem_of
from ..reports import MethodReport, report_of
from ..settings.tables import Settings
from .loading import load_settings


@dataclass(frozen=True)
class RunConfig:
    """Which experiment to run, and where its files are.

    Attributes
    ----------
    experiment, profile, changes, seed
        As `load_settings` takes them.
    data_root : Path or None
        Where data sets lie; None for the default place.
    out : Path or None
        Folder of the results; None for a new one under ``runs/``.
    resume : bool
        Continue the run in that folder, where there is one.
    """

    experiment: str
    profile: str = ""
    changes: tuple[str, ...] = ()
    seed: int | None = None
    data_root: Path | None = None
    out: Path | None = None
    resume: bool = False


def read_run_config(raw: Mapping[str, Any]) -> RunConfig:
    """Read a Flower run configuration; its values are text and numbers only.

    ``set`` holds changes as ``"section.key=value"``, separated by semicolons; an empty text and the
    seed -1 stand for "not given".
    """
    seed = raw.get("seed", -1)
    changes = (change.strip() for change in str(raw.get("set", "")).split(";"))
    return RunConfig(
        experiment=str(raw.get("experiment", "")),
        profile=str(raw.get("profile", "")),
        changes=tuple(change for change in changes if change),
        seed=None if seed == -1 else seed,
        data_root=_path(raw.get("data-root")),
        out=_path(raw.get("out")),
        resume=bool(raw.get("resume", False)),
    )


def _path(value: object) -> Path | None:
    return Path(str(value)).expanduser() if value else None


@dataclass(frozen=True)
class Experiment:
    """An experiment whose settings and data are there and go together.

    Attributes
    ----------
    name : str
        That of its file.
    federation : Federation
        The algorithm over the problem.
    report : MethodReport
        The algorithm's.
    baselines : mapping of str to Federation
        The methods of ``[baselines]`` over the same problem.
    """

    name: str
    federation: Federation
    report: MethodReport
    baselines: Mapping[str, Federation]

    @property
    def problem(self) -> Problem:
        """What is learned."""
        return self.federation.problem

    @property
    def settings(self) -> Settings:
        """All of the file, with the changes."""
        return self.problem.settings


def load_experiment(config: RunConfig) -> Experiment:
    """Read the settings of a run, load its data and see that all goes together.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings or data are not usable, or a method refuses its settings.
    """
    settings = load_settings(
        config.experiment, profile=config.profile, changes=config.changes, seed=config.seed
    )
    if _has_other_data(config, settings):
        settings = settings.model_copy(update={"published": {}})
    problem = problem_with(settings, load_data(settings, config.data_root))
    report = report_of(type(settings.algorithm).builds, type(problem))
    federation = Federation(problem, settings.algorithm, settings.client)
    baselines = {name: baseline_of(problem, name) for name in settings.baselines.methods()}
    for method in (federation, *baselines.values()):
        method.strategy()  # what a constructor refuses is said now, not after the first run
    return Experiment(Path(config.experiment).stem, federation, report, baselines)


def _has_other_data(config: RunConfig, settings: Settings) -> bool:
    """Return whether a run has other data than the published numbers of its file are of.

    That is another data set, model or attack, by changes or by a profile without published numbers
    of its own; or the profile ``quick``, if that changes more than the report.
    """
    profile = settings.profiles.get(config.profile, {})
    keys = [change.strip() for change in config.changes]
    if not any(key.startswith("published") for key in profile):
        keys += profile
    short = config.profile == "quick" and not all(key.startswith("report.") for key in profile)
    return short or any(key.startswith(("data", "model", "attack")) for key in keys)


def load_data(settings: Settings, data_root: Path | None) -> Data:
    """Return the data of an experiment; errors are those of `load`."""
    return load(settings.data.name, settings.seed, data_root, **settings.data.options)


def problem_with(settings: Settings, data: Data) -> Problem:
    """Return what is learned from some data."""
    kind = problem_of(kind_of(settings.data.name))
    if settings.newcomers is None:
        return kind(settings, data)
    assert isinstance(data, FederatedData)  # which the methods with new clients learn from
    data, held_out = without_clients(data, settings.newcomers.share, settings.seed)
    problem = kind(settings, data)
    problem.newcomers = kind(settings.model_copy(update={"attack": None}), held_out)
    return problem


def baseline_of(problem: Problem, name: str) -> Federation:
    """Return a method of ``[baselines]`` over a problem."""
    settings = problem.settings
    table = settings.baselines.methods()[name]
    return Federation(problem, completed(table, settings.algorithm), table.client)
