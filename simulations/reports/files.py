"""The files of a run: strict JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .result import Result, total_traffic


def plain(value: Any) -> Any:
    """Return a value as what strict JSON can hold.

    Dataclasses and mappings become dictionaries, arrays and sequences lists, numpy scalars numbers,
    paths strings. Numbers that are not finite become None: JSON has no NaN.

    Raises
    ------
    TypeError
        If the value is of no such kind.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(
        f"cannot write a {type(value).__name__} ({value!r}) as JSON; give numbers, strings, "
        "mappings, sequences, arrays or dataclasses of these."
    )


def write_metrics_line(file: TextIO, record: Mapping[str, Any]) -> None:
    """Append one round to ``metrics.jsonl`` and flush it, so that a killed run keeps its rounds.

    Parameters
    ----------
    file : TextIO
        The open file.
    record : Mapping[str, Any]
        ``{"round": int, "train": {...}, "evaluate": {...}, "clients": {...}}``; see `plain` for
        what the values may be.
    """
    file.write(json.dumps(plain(record), allow_nan=False) + "\n")
    file.flush()


def write_result(path: str | Path, result: Result) -> None:
    """Write a result as strict JSON, two spaces deep.

    The fields are those of `Result`, but the metric is its key, the traffic is summed up, and the
    fields of ``extra`` stand beside the others.
    """
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    extra = fields.pop("extra")
    del fields["note"], fields["legend"]
    fields |= {"metric": result.metric.key, "traffic": total_traffic(result.traffic)}
    text = json.dumps(plain(fields | extra), allow_nan=False, indent=2, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")
