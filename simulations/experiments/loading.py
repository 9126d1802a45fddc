"""From a TOML file to `Settings`: which tables it must have, and what is wrong with it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationError, create_model

from fl_admm_strategies.runtime.common import settings as common

from ..data import kind_of
from ..methods import tables as methods
from ..problems import problem_of
from ..reports import report_of
from ..settings.section import SettingError
from ..settings.tables import Baselines, Settings
from ..settings.wording import unknown
from .catalogue import read_experiment


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
        ``"algorithm.lr=0.1"``.
    seed : int, optional
        In place of the experiment's.

    Raises
    ------
    ValueError
        If the experiment, profile or a key does not exist, a value is out of range, or tables do
        not go together. The message lists every mistake that can be seen at once.
    """
    return checked(raw_settings(experiment, profile, changes, seed), experiment)


def raw_settings(
    experiment: str, profile: str, changes: Sequence[str], seed: int | None
) -> dict[str, Any]:
    """Return the tables of an experiment with changes, unchecked; see `load_settings`."""
    raw = read_experiment(experiment)
    if profile:
        profiles = raw.get("profiles")
        if not isinstance(profiles, dict) or profile not in profiles:
            known = sorted(profiles) if isinstance(profiles, dict) else []
            raise unknown(f"profile of {experiment}", profile, known)
        if not isinstance(profiles[profile], dict):
            raise ValueError(f"profiles.{profile} of {experiment}: is no table of changes")
        for key, value in profiles[profile].items():
            change(raw, key, value)
    for one in changes:
        change(raw, *key_and_value(one))
    if seed is not None:
        raw["seed"] = seed
    return raw


def checked(raw: dict[str, Any], experiment: str) -> Settings:
    """Return the settings that tables are; errors are those of `load_settings`."""
    kind = _settings_type(raw)
    try:
        settings = kind.model_validate(raw)
    except ValidationError as error:
        raise ValueError(explained(f"experiment {experiment!r}", error)) from None
    _check(settings)
    return settings


def changed_settings(before: Settings, now: Settings) -> list[str]:
    """Return what differs between two experiments in all that the algorithm's run depends on.

    Returns
    -------
    list of str
        Dotted key, the value now and, in brackets, that of before.
    """
    from pandas import json_normalize  # here: takes time

    parts = {"seed", "data", "model", "training", "algorithm", "client", "attack", "report"}
    tables: list[dict[str, str | None]] = []
    for one in (before, now):
        table = json_normalize(one.model_dump(by_alias=True, exclude_none=True, include=parts))
        tables.append({str(key): str(value) for key, value in table.iloc[0].items()})
    return common.changed_settings(*tables)


# --------------------------------------------------------------------------------------------------
# The file
# --------------------------------------------------------------------------------------------------


def change(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of the tables of a file."""
    *sections, last = key.split(".")
    table: Any = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{key!r}: {section!r} is a value, not a section")
    table[last] = value


def key_and_value(text: str) -> tuple[str, Any]:
    """Read ``"section.key=value"``; errors as `load_settings`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not section.key=value, e.g. algorithm.lr=0.1")
    return key.strip(), _toml_value(value.strip())


def key_and_values(text: str) -> tuple[str, list[Any]]:
    """Read ``"section.key=value,value"``; errors as `load_settings`."""
    key, _, values = text.partition("=")
    return key.strip(), [key_and_value(f"{key}={value}")[1] for value in values.split(",")]


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


# --------------------------------------------------------------------------------------------------
# Which tables it must have
# --------------------------------------------------------------------------------------------------


class _Unclear(Settings):
    """Settings of a file that does not say which data set or method it is about: refused."""

    algorithm: dict[str, Any]  # type: ignore[assignment]


def _settings_type(raw: dict[str, Any]) -> type[Settings]:
    """Return `Settings` with the tables that the file's data set and methods ask for."""
    algorithm, data, compared = (raw.get(key) for key in ("algorithm", "data", "baselines"))
    if not isinstance(algorithm, dict):
        return _Unclear
    if "name" not in algorithm:
        raise ValueError(f"algorithm.name: is missing. Known: {', '.join(methods.METHODS)}.")
    strategy = methods.strategy_named(str(algorithm["name"]))
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return _Unclear
    names = tuple(compared) if isinstance(compared, dict) else ()
    return _tables(str(algorithm["name"]), strategy, data["name"], names)


@lru_cache
def _tables(name: str, strategy: type, data: str, baselines: tuple[str, ...]) -> type[Settings]:
    problem = problem_of(kind_of(data))
    report = report_of(strategy, problem)
    client = methods.client_table(_client_of("algorithm", name, strategy, data), problem)
    table = methods.algorithm_table(strategy)
    compared: dict[str, Any] = {}
    for other in baselines:
        one = methods.strategy_named(other, "baseline")
        learner = _client_of("baseline", other, one, data)
        kind = methods.baseline_table(one, learner, problem)
        # A name with a colon is a class of the user's own, whose underscores stay.
        compared[other.replace("-", "_")] = kind, Field(alias=other)
    listed = create_model("Baselines", __base__=Baselines, **compared)
    fields: dict[str, Any] = {
        "model": ((problem.model_table or dict[str, Any]) | None, None),
        "algorithm": (table, ...),
        "client": (client, methods.default_of(client)),
        "report": (report.settings, report.settings()),
        "baselines": (listed, ... if compared else listed()),
    }
    return create_model("Settings", __base__=Settings, **fields)


def _client_of(what: str, name: str, strategy: type, data: str) -> type:
    """Return a method's client, or say that it does not learn from such data."""
    kind = kind_of(data)
    if (client := methods.client_of(strategy, problem_of(kind))) is None:
        others = " or ".join(other.__name__ for other in methods.data_of(strategy)) or "nothing"
        raise ValueError(
            f"data set {data!r} is {kind.__name__}, {what} {name!r} learns from {others}: use "
            f"another data set or another {what}."
        )
    return client


def _check(settings: Settings) -> None:
    """Refuse tables that are right alone but not together."""
    problem_of(kind_of(settings.data.name)).check(settings)
    if settings.newcomers is not None and not hasattr(settings.algorithm.builds, "newcomers"):
        raise ValueError(
            f"[newcomers] is given, but new clients cannot join {settings.algorithm.name!r} after "
            "its run: that is for 'fpfc'. Leave the table out."
        )


# --------------------------------------------------------------------------------------------------
# What is wrong with it
# --------------------------------------------------------------------------------------------------


def explained(what: str, error: ValidationError) -> str:
    """Return what is wrong with the tables of a file, one mistake a line."""
    lines = [f"The settings of {what} are not usable:"]
    for mistake in error.errors():
        # Without the tags of tables among others, which are no keys.
        key = ".".join(str(part) for part in mistake["loc"] if not str(part).startswith("<"))
        if mistake["type"] == "missing":
            lines.append(f"  {key}: is missing")
        elif mistake["type"] == "value_error":
            sentence = mistake["ctx"]["error"]
            separator = "." if isinstance(sentence, SettingError) else ": "
            lines.append("  " + f"{key}{separator}{sentence}".lstrip(".: "))
        else:
            expected = mistake["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            lines.append(f"  {key} is {mistake['input']!r}, expected {expected}.")
    return "\n".join(lines)
