"""Saving and loading an algorithm's state, a dataclass, without the algorithm's help.

Its fields are arrays, numbers, named arrays, dataclasses of these, what is kept by client
(`ByClient`), or structures of their own kind with ``state_arrays`` and ``load_state_arrays``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays, any_length, check_saved, prefixed, spec_of, under
from ...maths.checks import in_range, listing
from ...maths.clienttable import ByClient
from ..members.client_keys import read_keys

BASE = "base/"
"""Before the names of what a run saves itself."""

Saved = Mapping[str, NDArray[Any]]


def arrays_of(state: Any) -> dict[str, NDArray[Any]]:
    """Return a state as named arrays, ``FIELD`` or ``FIELD/NAME``; they may be views of it."""
    found: dict[str, NDArray[Any]] = {}
    for name, value in _fields(state):
        found |= _arrays_of_field(name, value)
    return found


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(state):
        yield field.name, getattr(state, field.name)


def _arrays_of_field(name: str, value: Any) -> dict[str, NDArray[Any]]:
    if isinstance(value, np.ndarray | bool | int | float):
        return {name: np.asarray(value)}
    return prefixed(f"{name}/", _parts(value))


def _parts(value: Any) -> dict[str, NDArray[Any]]:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "state_arrays"):
        arrays: dict[str, NDArray[Any]] = value.state_arrays()
        return arrays
    return arrays_of(value)


def _checks_itself(value: Any) -> bool:
    return bool(getattr(value, "self_checked", False))


def load_arrays(state: Any, saved: Saved, owner: str) -> None:
    """Put back what `arrays_of` returned of a state like this one.

    Raises
    ------
    ValueError
        If an array is missing or one too many, or has another shape or dtype; `owner` is whose
        state it is.
    """
    expected = {
        name: array
        for field, value in _fields(state)
        if not _checks_itself(value)
        for name, array in _arrays_of_field(field, value).items()
    }
    check_saved(saved, spec_of(expected))
    checked = tuple(f"{field}/" for field, value in _fields(state) if _checks_itself(value))
    if more := sorted(n for n in saved.keys() - expected.keys() if not n.startswith(checked)):
        raise ValueError(
            f"The saved state has {more}, which {owner} does not have here. Continue with the "
            "settings (such as `duals`) that the state was saved with, and the same version of "
            "fl-admm-strategies."
        )
    _load(state, saved)


def _load(state: Any, saved: Saved) -> None:
    for name, value in _fields(state):
        parts = under(f"{name}/", saved)
        if isinstance(value, np.ndarray):
            setattr(state, name, np.array(saved[name]))
        elif isinstance(value, bool | int | float):
            setattr(state, name, type(value)(saved[name]))
        elif isinstance(value, Mapping):
            setattr(state, name, {key: np.array(parts[key]) for key in value})
        elif is_dataclass(value):
            _load(value, parts)
        else:
            value.load_state_arrays(parts)


def check_base(saved: Saved, expected: Saved) -> None:
    """Raise ValueError unless a saved state has what that of every run has, whatever its clients.

    Parameters
    ----------
    saved : mapping
    expected : mapping
        What a run has, the names with `BASE` before them.
    """
    spec = spec_of(expected)
    rows = {name: spec[name] for name, array in expected.items() if array.ndim}
    check_saved(saved, spec | any_length(rows))
    read_keys(under(BASE, saved))
    known = saved[f"{BASE}client_ids"]
    if not len(known) or np.any(known[1:] <= known[:-1]):
        raise ValueError(f"The saved clients are {listing(known.tolist())}, not sorted ids.")
    if negative := [name for name in expected if np.any(saved[name] < 0)]:
        raise ValueError(f"The saved {negative} hold numbers below 0: no run has these.")


def parts_by_client(state: Any) -> list[ByClient]:
    """Return the fields of a state that hold something for every client."""
    return [value for _, value in _fields(state) if isinstance(value, ByClient)]


def is_finite(state: Any) -> bool:
    """Return whether a state's shared arrays are finite; rows of single clients are not read."""
    return all(_is_finite(value) for _, value in _fields(state))


def _is_finite(value: Any) -> bool:
    if isinstance(value, ByClient):
        return value.is_finite()
    if isinstance(value, np.ndarray):
        return in_range(value)
    if isinstance(value, Mapping):
        return all(map(in_range, value.values()))
    return is_finite(value) if is_dataclass(value) else True


def check_initial_arrays(arrays: Arrays) -> None:
    """Raise ValueError unless arrays are a model that a run can start from."""
    if not arrays:
        raise ValueError("The initial arrays are empty; give the model's parameters.")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"Array '{name}' has dtype {array.dtype}, expected real numbers.")
        if not np.isfinite(array).all():
            raise ValueError(f"Array '{name}' of the initial model holds NaN or infinity.")
