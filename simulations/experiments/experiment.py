"""An experiment, read once: what is learned, the method that learns it, and those beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..data import Data, FederatedData, kind_of, load, without_clients
from ..methods import Federation, completed
from ..problems import Problem, problem_of
from ..reports import MethodReport, report_of
from ..settings.tables import Settings
from .loading import changed_settings, load_settings
from .run_config import RunConfig


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
    unlike : tuple of str
        Why the published numbers are not of such a run, which leaves them out.
    """

    name: str
    federation: Federation
    report: MethodReport
    baselines: Mapping[str, Federation]
    unlike: tuple[str, ...] = ()

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
    unlike = _unlike_the_published(config, settings)
    if unlike:
        settings = settings.model_copy(update={"published": {}})
    problem = problem_with(settings, load_data(settings, config.data_root))
    report = report_of(type(settings.algorithm).builds, type(problem))
    federation = Federation(problem, settings.algorithm, settings.client, report.fixed)
    baselines = {name: baseline_of(problem, name) for name in settings.baselines.methods()}
    for method in (federation, *baselines.values()):
        method.strategy()  # what a constructor refuses is said now, not after the first run
    return Experiment(Path(config.experiment).stem, federation, report, baselines, unlike)


def _unlike_the_published(config: RunConfig, settings: Settings) -> tuple[str, ...]:
    """Return what a run has otherwise than the file whose published numbers it would show.

    That is data, model or attack, by changes or by a profile without such numbers of its own, and
    the profile ``quick``, if that changes more than the report.
    """
    if not settings.published:
        return ()
    before, profile = (load_settings(config.experiment, profile=p) for p in ("", config.profile))
    if profile.published != before.published:
        before = profile
    keys = changed_settings(before, settings)
    other = [key for key in keys if key.startswith(("data.", "model.", "attack."))]
    shortened = changed_settings(before, profile) if config.profile == "quick" else ()
    if any(not key.startswith("report.") for key in shortened):
        other.append("profile quick")
    return tuple(other)


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
