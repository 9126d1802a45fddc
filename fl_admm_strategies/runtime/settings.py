"""The settings of a strategy, read from its constructor: for the log, for resuming, for the app."""

from __future__ import annotations

import inspect
import re
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class's constructor by name, its own first.

    What the constructor passes on as ``**base`` are the parameters of the class it derives from.
    """
    found: dict[str, inspect.Parameter] = {}
    for owner in kind.__mro__:
        if "__init__" not in vars(owner):
            continue
        own = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        passed_on = any(p.kind is p.VAR_KEYWORD for p in own)
        found |= {p.name: p for p in own if p.kind is not p.VAR_KEYWORD and p.name not in found}
        if not passed_on:
            break
    return found


def settings_of(subject: object) -> dict[str, Any]:
    """Return an object's settings: its constructor's parameters, kept under their own names."""
    return {name: getattr(subject, name) for name in parameters_of(type(subject))}


def as_text(value: Any) -> str | None:
    """Return a setting as text that is the same in every process.

    None for a function and the like, of which nothing but its address is known. A schedule that is
    a dataclass, such as `StepDecay`, has a text.
    """
    text = repr(value) if not isinstance(value, str) else value
    return None if _ADDRESS.search(text) else text


def changed_settings(before: dict[str, str | None], now: dict[str, str | None]) -> list[str]:
    """Return in words which settings differ, or cannot be compared, between two runs."""
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, "not given"), now.get(name, "not given")
        if old is None or new is None:
            found.append(f"{name} is a function, which cannot be compared with the saved run's")
        elif old != new:
            found.append(f"{name} {new} (was {old})")
    return found
