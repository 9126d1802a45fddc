"""Which parameters of a test are for the fast suite: those with a structure of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def fast(only: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters of which all but some are tested by the slow tests.

    Parameters
    ----------
    only : collection
        The values, or the names of those that have one, of the fast tests.
    values : iterable
    """
    values = [*values]
    names = [getattr(value, "name", value) for value in values]
    unknown = [one for one in only if one not in names]
    assert not unknown, f"{unknown} are none of {names}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if name in only else pytest.mark.slow,
            id=name if isinstance(name, str) else None,
        )
        for name, value in zip(names, values, strict=True)
    ]
