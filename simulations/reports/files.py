"""The files of a run: strict JSON."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import to_json

from fl_admm_strategies.runtime.saving.files import replacing

from .result import Result, total_traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON, where numbers that are not finite are null.

    Dataclasses and mappings become objects, arrays, sets and sequences lists, paths strings.

    Raises
    ------
    PydanticSerializationError
        If the value is of no such kind.
    """
    return to_json(value, indent=indent, inf_nan_mode="null", fallback=_plain).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot write a {type(value).__name__} ({value!r}) as JSON.")


def write_result(path: str | Path, result: Result) -> None:
    """Write a result as strict JSON, two spaces deep.

    The fields are those of `Result`, but the metric is its key, the traffic is summed up, and the
    fields of ``extra`` stand beside the others.
    """
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    extra = fields.pop("extra")
    del fields["legend"]
    fields |= {"metric": result.metric.key, "traffic": total_traffic(result.traffic)}
    write_text(Path(path), as_json(fields | extra, indent=2) + "\n")


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
