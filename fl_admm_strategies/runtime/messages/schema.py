"""Typed messages: one dataclass a method says what a client gets, and both halves use it.

    @dataclass(frozen=True)
    class FedProxInstruction(Instruction):
        model: Arrays
        lr: float
        names: list[str]

Fields that hold arrays are the groups of the message, in their order; all others are its settings,
under their names with dashes (``global_`` is "global"). An optional field that is None does not
travel. Fields that bear the name of one of the method's settings need not be filled:

    FedProxInstruction.of(self, server_round, model=self.state.model, names=[...])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, Self, get_args, get_type_hints

from numpy.typing import NDArray

from ...maths.blocks import Arrays
from ...maths.checks import check_positive, rules_of
from ..common.settings import HasSettings, parameters_of
from .records import (
    VERSIONS,
    ClientInstruction,
    Scalar,
    brief,
    names_setting,
    read_names,
    split_groups,
)


class _Field(NamedTuple):
    name: str
    key: str
    kind: Any
    optional: bool
    is_arrays: bool
    is_names: bool


@cache
def _fields_of(schema: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(schema)
    found = []
    for field in fields(schema):
        parts = [part for part in get_args(hints[field.name]) if part is not type(None)]
        optional = type(None) in get_args(hints[field.name])
        kind = parts[0] if optional else hints[field.name]
        key = field.name.rstrip("_").replace("_", "-")
        found.append(_Field(field.name, key, kind, optional, kind == Arrays, kind == list[str]))
    return tuple(found)


@cache
def _shared(schema: Any, method: Any) -> tuple[str, ...]:
    """Return the fields of a message that are settings of a method."""
    names = [one.name for one in _fields_of(schema)]
    return tuple(name for name in names if name in parameters_of(method))


@dataclass(frozen=True)
class Instruction:
    """Base of the messages to clients. Fields: `Arrays`, bool, int, float, str, list[str]."""

    @classmethod
    def of(cls, method: HasSettings, server_round: int, **given: Any) -> Self:
        """Return a method's message in a round: what is given, and the settings of the same name.

        Raises
        ------
        ValueError, TypeError
            If a schedule, such as a step size may be, has a bad value in this round.
        """
        schema: Any = cls
        kind: Any = type(method)
        values = {name: getattr(method, name) for name in _shared(schema, kind)} | given
        for name, value in values.items():
            if callable(value):
                rule = rules_of(kind).get(name)
                check = check_positive if rule is None else rule.check
                values[name] = value(server_round)
                check(f"{name} in round {server_round}", values[name])
        return cls(**values)

    def encode(self) -> ClientInstruction:
        """Return the message as groups of arrays and settings."""
        schema: Any = type(self)
        groups: dict[str, Arrays] = {}
        config: dict[str, Scalar] = {}
        for field in _fields_of(schema):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.is_arrays:
                groups[field.key] = value
            else:
                config[field.key] = (
                    names_setting(tuple(value)) if field.is_names else field.kind(value)
                )
        return ClientInstruction(groups, config)

    @classmethod
    def read(cls, sent: ClientInstruction) -> Self:
        """Return the message that became this instruction, such as ``reply.sent``.

        Raises
        ------
        ValueError
            As `decode`.
        """
        return cls.decode(sent.flat(), sent.full_config())

    @classmethod
    def decode(cls, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]) -> Self:
        """Read the message that a `NumPyClient` received.

        Raises
        ------
        ValueError
            If it is not a message of this kind; the error says what is missing or wrong.
        """
        schema: Any = cls
        groups = split_groups(parameters, config)
        values: dict[str, Any] = {}
        for field in _fields_of(schema):
            source: Mapping[str, Any] = groups if field.is_arrays else config
            if (value := source.get(field.key)) is None:
                if not field.optional:
                    what = "group of arrays" if field.is_arrays else "setting"
                    raise ValueError(
                        f"The message lacks the {what} {field.key!r} of {cls.__name__}: it is not "
                        f"from this method's strategy. {VERSIONS}"
                    )
                values[field.name] = None
            elif field.is_arrays:
                values[field.name] = value
            else:
                values[field.name] = _read(field, value)
        return cls(**values)


Instructions = Mapping[int, Instruction | ClientInstruction]
"""What clients are sent, by client."""


def _read(field: _Field, value: Any) -> Any:
    if field.is_names:
        return read_names(field.key, value)
    number = field.kind is float and isinstance(value, int) and not isinstance(value, bool)
    if type(value) is not field.kind and not number:
        raise ValueError(
            f"The message's {field.key} is {brief(repr(value))}, expected {field.kind.__name__}. "
            f"{VERSIONS}"
        )
    return field.kind(value)
