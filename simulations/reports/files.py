"""The files of a run: strict JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from fl_admm_strategies.runtime.saving.files import NotWrittenError, replacing, writing

from .result import Result, total_traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    Raises
    ------
    NotWrittenError
        If the line could not be written; the file is closed then.
    """
    line = json.dumps(plain(record), allow_nan=False) + "\n"
    try:
        with writing(Path(file.name), len(line)):
            file.write(line)
            file.flush()
    except NotWrittenError:
        with suppress(OSError):  # of the same reason
            file.close()
        raise


def write_result(path: str | Path, result: Result) -> None:
    """Write a result as strict JSON, two spaces deep.

    The fields are those of `Result`, but the metric is its key, the traffic is summed up, and the
    fields of ``extra`` stand beside the others.
    """
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    extra = fields.pop("extra")
    del fields["note"], fields["legend"]
    fields |= {"metric": result.metric.key, "traffic": total_traffic(result.traffic)}
    text = json.dumps(plain(fields | extra), allow_nan=False, indent=2, ensure_ascii=False) + "\n"
    write_text(Path(path), text)


def write_figure(path: Path, figure: Figure, metadata: Mapping[str, None]) -> None:
    """Write a figure, in the format of the path's ending, as a whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], metadata=metadata)
    _write(path, picture.getvalue())


def write_text(path: Path, text: str) -> None:
    """Write a text file, as a whole or not at all."""
    _write(path, text.encode())


def _write(path: Path, content: bytes) -> None:
    with replacing(path, len(content)) as part:
        part.write_bytes(content)
