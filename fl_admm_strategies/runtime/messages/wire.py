"""Half precision on the wire: what travels is rounded; both sides keep and compute in full.

A message that is reduced has the settings ``wire-dtype``, to which the client reduces its upload,
and ``full-dtypes``, in which it gets what was reduced back. Who reads neither sees arrays of
float16, and may answer in full precision.

In full precision travel: integers and buffers (a batch norm's running variance may be anything),
handshakes, and the group `START`, from which both sides go on: were it rounded on one of them, they
would differ in the same direction for the rest of the run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...maths.blocks import Arrays

WireDtype = Literal["float16"] | None

WIRE_DTYPE, FULL_DTYPES = "wire-dtype", "full-dtypes"
START = "start"

_FULL = ("f4", "f8")


class OutOfRangeError(ValueError):
    """A number is beyond what the wire holds."""


def reduced(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return an array as it travels; integers, and what is no longer, stay as they are.

    What is not finite before stays so, and is refused where it arrives.

    Raises
    ------
    OutOfRangeError
        If a number is too large.
    """
    if array.dtype.str[1:] not in _FULL:
        return array
    with np.errstate(over="ignore"):
        short = array.astype(dtype)
    if np.isinf(short).any() and (over := np.isinf(short) & np.isfinite(array)).any():
        raise OutOfRangeError(
            f"'{name}' holds {array[over].flat[0]:.3g}, and {dtype} ends at "
            f"{np.finfo(dtype).max:.0f}. Give the strategy no wire_dtype."
        )
    return short


class Reduction:
    """Reduces the messages of a phase; an array that several clients get, only once.

    Parameters
    ----------
    dtype : str
    kept : collection of str
        Arrays that travel as they are.
    """

    def __init__(self, dtype: str, kept: Collection[str]) -> None:
        self._dtype = dtype
        self._kept = kept
        self._known: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    def __call__(self, groups: Mapping[str, Arrays]) -> tuple[dict[str, Arrays], dict[str, str]]:
        """Return the groups of a message as they travel, and the settings that say so."""
        short = {
            group: {
                name: array if group == START or name in self._kept else self._reduced(name, array)
                for name, array in arrays.items()
            }
            for group, arrays in groups.items()
        }
        full = [
            array.dtype.str[1:] if short[group][name] is not array else ""
            for group, arrays in groups.items()
            for name, array in arrays.items()
        ]
        return short, {
            WIRE_DTYPE: self._dtype,
            FULL_DTYPES: json.dumps(full, separators=(",", ":")),
        }

    def _reduced(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        if (known := self._known.get(id(array))) is None:
            known = self._known[id(array)] = (array, reduced(name, array, self._dtype))
        return known[1]


def restored(arrays: Sequence[NDArray[Any]], config: Mapping[str, Any]) -> Iterable[NDArray[Any]]:
    """Return the arrays of a message in full precision again, where they were reduced.

    Raises
    ------
    ValueError
        If the message's ``full-dtypes`` cannot be read.
    """
    if (text := config.get(FULL_DTYPES)) is None:
        return arrays
    try:
        full = json.loads(text)
        right = len(full) == len(arrays) and all(dtype in ("", *_FULL) for dtype in full)
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            f"The message's {FULL_DTYPES} are no JSON list of {len(arrays)} dtypes, one for each "
            "array. Server and client must use the same version of fl-admm-strategies."
        )
    return [
        array.astype(dtype) if dtype else array for dtype, array in zip(full, arrays, strict=True)
    ]
