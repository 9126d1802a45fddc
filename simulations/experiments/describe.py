"""The settings of an experiment: their values, meanings and defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..data import loader_of, options_of
from ..settings.constructor import Built
from ..settings.section import Section
from ..settings.tables import Settings
from ..settings.wording import first_line, parameter_docs

_TABLES = ("data", "model", "training", "attack", "algorithm", "client", "report")


class Setting(NamedTuple):
    """A setting of an experiment.

    Attributes
    ----------
    key : str
        As ``--set`` takes it.
    value : Any
        The experiment's; None where none is given.
    default : Any
        The value where there is none.
    meaning : str
        From the docstrings.
    """

    key: str
    value: Any
    default: Any
    meaning: str


def settings_in(settings: Settings) -> Iterator[Setting]:
    """Yield every setting of an experiment, table by table."""
    yield from _of_table(settings, "", only=("seed",))
    for name in _TABLES:
        table = getattr(settings, name)
        if isinstance(table, Section):
            yield from _of_table(table, f"{name}.", without=("options",))
        if name == "data":
            yield from _options(settings)


def _of_table(
    table: Section, prefix: str, only: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> Iterator[Setting]:
    for name, field in type(table).model_fields.items():
        if name in without or (only and name not in only):
            continue
        key, value = f"{prefix}{field.alias}", getattr(table, name)
        if isinstance(value, Built):
            kind = getattr(value, "type", "a table")
            yield Setting(key, kind, kind, _meaning(field))
            yield from _of_table(value, f"{key}.", without=("type",))
        else:
            default = value if field.is_required() else field.get_default(call_default_factory=True)
            yield Setting(key, value, default, _meaning(field))


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("``", "")


def _options(settings: Settings) -> Iterator[Setting]:
    docs = parameter_docs(loader_of(settings.data.name))
    given = settings.data.options
    for name, default in options_of(settings.data.name).items():
        value = given.get(name, default)
        yield Setting(f"data.options.{name}", value, default, docs.get(name, ""))


def described(name: str, settings: Settings) -> RenderableType:
    """Lay out what an experiment is and everything that can be set; fits any terminal."""
    algorithm = settings.algorithm
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), f": {settings.title}"),
        Text(f"{settings.algorithm.name}: {first_line(type(algorithm).builds)}"),
        Text("\nChange a setting with --set KEY=VALUE, the seed with --seed as well.\n"),
    ]
    for setting in settings_in(settings):
        parts.append(_line(setting))
        if setting.meaning:
            parts.append(Padding(Text(setting.meaning, style="dim"), (0, 0, 0, 4)))
    compared = {
        name: table.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
        for name, table in settings.baselines.methods().items()
    }
    parts += _tables("Methods run for comparison", "[baselines]", compared)
    parts += _tables("Profiles", f"run {name} --profile PROFILE", settings.profiles)
    return Group(*parts)


def _line(setting: Setting) -> Text:
    other = setting.default != setting.value
    default = f"  (default: {_written(setting.default)})" if other else ""
    return Text.assemble((setting.key, "bold cyan"), f" = {_written(setting.value)}", default)


def _tables(
    title: str, where: str, tables: Mapping[str, Mapping[str, Any]]
) -> list[RenderableType]:
    if not tables:
        return []
    parts: list[RenderableType] = [Text.assemble("\n", (title, "bold"), f" ({where})")]
    for name, changes in tables.items():
        text = ", ".join(f"{key} = {_written(value)}" for key, value in changes.items())
        parts.append(Text(f"{name}: {text or 'the settings as they are'}"))
    return parts


def _written(value: Any) -> str:
    """Return a value as TOML and JSON write it; None has no TOML."""
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)
