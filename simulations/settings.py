"""What an experiment is: a TOML file of settings, checked before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, create_model

from .algorithms import ALGORITHMS, Algorithm
from .baselines import BaselineSettings
from .config import RunConfig
from .data import load
from .data.registry import unknown
from .section import Section

EXPERIMENTS = Path(str(files("simulations"))) / "experiments"


class DataSettings(Section):
    """Which data set, and its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class ModelSettings(Section):
    """Which model, and how its common initial weights are drawn."""

    name: str
    init: str = "pytorch"


class TrainingSettings(Section):
    """How the federation runs."""

    num_rounds: int = Field(ge=1)
    fraction_train: float = Field(default=1.0, gt=0, le=1)
    evaluate_every: int = Field(default=10, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    """Mini-batch size; left out, clients take full-gradient steps."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Rounds from one checkpoint to the next, which ``--resume`` continues from."""
    client_state: Literal["context", "folder"] = "context"
    """Where clients keep what is theirs alone: in Flower's context, which ends with the run, or in
    the results folder, so that a resumed run gives the same bits."""


class PublishedRow(Section):
    """A row of a published table; shares in percent, deviations over the paper's seeds."""

    acc: float | None = None
    acc_std: float | None = None
    rmse: float | None = None
    rmse_std: float | None = None
    objective: float | None = None
    num: float | None = None
    ari: float | None = None
    f1: float | None = None
    f1_std: float | None = None
    auc: float | None = None
    auc_std: float | None = None
    cr: float | None = None
    """Rounds of communication."""
    time: float | None = None
    """Seconds, on the authors' machine."""
    cost: float | None = None
    """Parameters sent, both ways."""


class Settings(Section):
    """An experiment, complete and checked."""

    title: str
    """One line for `python -m simulations list`."""
    seed: int = Field(default=0, ge=0)
    data: DataSettings
    model: ModelSettings | None = None
    """Left out where the algorithm has no PyTorch model."""
    training: TrainingSettings
    algorithm: Algorithm
    baselines: BaselineSettings | None = None
    """What to run on the same data for comparison."""
    published: dict[str, PublishedRow] = Field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Named sets of changes, e.g. a short `quick` run: dotted key = value."""

    def to_toml(self) -> str:
        """Return the settings as a file that `load_settings` reads back."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True))


def experiment_names() -> list[str]:
    """Return the names of the experiments that come with the app."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def load_settings(
    experiment: str, *, profile: str = "", changes: Sequence[str] = (), seed: int | None = None
) -> Settings:
    """Read an experiment and apply changes to it.

    Parameters
    ----------
    experiment : str
        The name of an experiment, or the path of a TOML file.
    profile : str
        One of the experiment's profiles; empty for none.
    changes : sequence of str
        ``"section.key=value"``, the value as TOML (a bare word is text), e.g.
        ``"algorithm.lam=1.0"``.
    seed : int, optional
        In place of the experiment's.

    Raises
    ------
    ValueError
        If the experiment, profile or a key does not exist, or a value is out of range. The message
        lists every mistake.
    """
    raw = _read(experiment)
    if profile:
        profiles = raw.get("profiles")
        if not isinstance(profiles, dict) or profile not in profiles:
            known = sorted(profiles) if isinstance(profiles, dict) else []
            raise unknown(f"profile of {experiment}", profile, known)
        if not isinstance(profiles[profile], dict):
            raise ValueError(f"profiles.{profile} of {experiment}: is no table of changes")
        for key, value in profiles[profile].items():
            _change(raw, key, value)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not section.key=value, e.g. algorithm.lam=1.0")
        _change(raw, key.strip(), _toml_value(text.strip()))
    if seed is not None:
        raw["seed"] = seed
    try:
        return _settings_type(raw).model_validate(raw)
    except ValidationError as error:
        raise ValueError(_explain(experiment, error)) from None


def _settings_type(raw: dict[str, Any]) -> type[Settings]:
    """Return `Settings` with the algorithm that the file names in place of any."""
    table = raw.get("algorithm")
    if not isinstance(table, dict):
        return Settings  # whose validation says what is wrong
    if "name" not in table:
        raise ValueError(f"algorithm.name: is missing. Known: {', '.join(ALGORITHMS)}.")
    if (name := str(table["name"])) not in ALGORITHMS:
        raise unknown("algorithm", name, list(ALGORITHMS))
    return _with_algorithm(ALGORITHMS[name])


@lru_cache
def _with_algorithm(algorithm: type[Algorithm]) -> type[Settings]:
    return create_model("Settings", __base__=Settings, algorithm=(algorithm, ...))


def load_experiment(config: RunConfig) -> tuple[Settings, Any]:
    """Read the settings of a run, load its data and see that they go together.

    Raises
    ------
    ValueError, FileNotFoundError
        If settings or data are not usable.
    """
    settings = load_settings(
        config.experiment, profile=config.profile, changes=config.changes, seed=config.seed
    )
    data = load(settings.data.name, settings.seed, config.data_root, **dict(settings.data.options))
    settings.algorithm.check(settings, data)
    return settings, data


def changed_settings(before: Settings, now: Settings) -> dict[str, str]:
    """Return what differs between two experiments in seed, data, model, training and algorithm.

    Returns
    -------
    dict of str to str
        By dotted key, the value now and, in brackets, that of before.
    """
    parts = {"seed", "data", "model", "training", "algorithm"}
    old, new = (
        dict(_flat(one.model_dump(by_alias=True, exclude_none=True, include=parts)))
        for one in (before, now)
    )
    return {
        key: f"{new.get(key, 'not given')} (was {old.get(key, 'not given')})"
        for key in {**new, **old}
        if new.get(key) != old.get(key)
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(experiment: str) -> dict[str, Any]:
    path = Path(experiment)
    if path.suffix != ".toml":
        names = experiment_names()
        if experiment not in names:
            raise unknown("experiment", experiment, names)
        path = EXPERIMENTS / f"{experiment}.toml"
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"there is no experiment file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, nested without end
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def _change(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    table: Any = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{key!r}: {section!r} is a value, not a section")
    table[last] = value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _explain(experiment: str, error: ValidationError) -> str:
    lines = [f"The settings of experiment {experiment!r} are not usable:"]
    for mistake in error.errors():
        key = ".".join(str(part) for part in mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            lines.append(f"  {key}: there is no such setting")
        elif mistake["type"] == "missing":
            lines.append(f"  {key}: is missing")
        else:
            lines.append(f"  {key}: {mistake['msg']}, given {mistake['input']!r}")
    return "\n".join(lines)


def published_rows(settings: Settings) -> Mapping[str, Mapping[str, float]]:
    """Return the published numbers as the report takes them."""
    return {method: row.model_dump(exclude_none=True) for method, row in settings.published.items()}
