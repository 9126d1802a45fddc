"""Checks of arguments, with one wording for all of them: "X is V, expected E."."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

_HEADROOM = 2**16  # terms that a sum of uploads may have before it overflows


def check_count(name: str, value: object, *, least: int) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {value!r}, expected an integer >= {least}.")
    if value < least:
        raise ValueError(f"{name} is {value}, expected an integer >= {least}.")


def check_above(name: str, value: object, bound: float) -> None:
    """Raise unless `value` is a finite number above `bound`."""
    number = _number(name, value, f"a number > {bound:g}")
    if not (math.isfinite(number) and number > bound):
        raise ValueError(f"{name} is {value}, expected a finite number > {bound:g}.")


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite number above 0."""
    check_above(name, value, 0)


def check_not_negative(name: str, value: object) -> None:
    """Raise unless `value` is a finite number of at least 0."""
    number = _number(name, value, "a number >= 0")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} is {value}, expected a finite number >= 0.")


def check_fraction(name: str, value: object, *, zero: bool) -> None:
    """Raise unless `value` is a number in (0, 1], or in [0, 1] with `zero`."""
    allowed = f"a number in {'[0' if zero else '(0'}, 1]"
    number = _number(name, value, allowed)
    if not (0 <= number <= 1) or (number == 0 and not zero):
        raise ValueError(f"{name} is {value}, expected {allowed}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, choices))}.")


def check_function(name: str, value: object) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}, expected a function.")


Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, check_not_negative]
Fraction = Annotated[float, partial(check_fraction, zero=False)]
"""In (0, 1]."""
Share = Annotated[float, partial(check_fraction, zero=True)]
"""In [0, 1]."""
Count = Annotated[int, partial(check_count, least=1)]
WholeNumber = Annotated[int, partial(check_count, least=0)]


class SettingRule(NamedTuple):
    """What a setting must pass, by its type.

    Attributes
    ----------
    check : callable
        ``check(name, value)`` raises ValueError or TypeError.
    optional : bool
        None will do as well.
    scheduled : bool
        A function will do as well; its values must pass `check`.
    """

    check: Callable[[str, Any], object]
    optional: bool = False
    scheduled: bool = False

    def __call__(self, name: str, value: object) -> None:
        """Raise ValueError or TypeError where a setting does not pass."""
        if not ((self.optional and value is None) or (self.scheduled and callable(value))):
            self.check(name, value)


def rule_of(annotation: Any) -> SettingRule:
    """Return what values of a type must pass.

    ``Annotated[float, check]`` has its own check, `Literal` and bool their choices. In a union one
    part may have a check, beside None and functions; of more parts anything will do.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    parts = get_args(annotation) if is_union else (annotation,)
    functions = [part for part in parts if get_origin(part) is Callable]
    checked = [part for part in parts if part is not NoneType and part not in functions]
    check = _check_of(checked[0]) if len(checked) == 1 else _anything
    return SettingRule(check, NoneType in parts, bool(functions))


def _anything(name: str, value: object) -> None:
    """Pass."""


def _check_of(annotation: Any) -> Callable[[str, Any], object]:
    if get_origin(annotation) is Annotated:
        check: Callable[[str, Any], object] = annotation.__metadata__[0]
        return check
    if get_origin(annotation) is Literal:
        return partial(check_choice, choices=get_args(annotation))
    return partial(check_choice, choices=(True, False)) if annotation is bool else _anything


@cache
def rules_of(kind: Any) -> Mapping[str, SettingRule]:
    """Return what each annotated field of a class must pass."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: rule_of(annotation) for name, annotation in hints.items()}


def check_fields(of: object) -> None:
    """Raise ValueError or TypeError where a field of a dataclass does not pass."""
    kind: Any = type(of)
    for name, rule in rules_of(kind).items():
        rule(name, getattr(of, name))


class Checked:
    """Base of dataclasses whose fields are checked by what they are annotated with."""

    def __post_init__(self) -> None:
        check_fields(self)


@cache
def largest_allowed(dtype: np.dtype[Any]) -> float:
    """Return how large a number of this type may be to be added up over the clients."""
    return float(np.finfo(np.result_type(dtype, np.float32)).max) / _HEADROOM


def in_range(array: NDArray[Any]) -> bool:
    """Return whether numbers are finite, and small enough for sums over the clients."""
    if array.dtype.kind != "f":
        return True
    most = largest_allowed(array.dtype)
    return bool(array.max(initial=0) <= most and array.min(initial=0) >= -most)


def listing(items: Sequence[object], most: int = 6) -> str:
    """Return the first items and how many there are, for a message."""
    shown = ", ".join(repr(item) for item in items[:most])
    return f"[{shown}{', ...' if len(items) > most else ''}] ({len(items)})"


def _number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}, expected {expected}.")
    return float(value)
