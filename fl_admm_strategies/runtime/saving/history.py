"""What was measured in a run, in a file beside its checkpoints: a line of strict JSON a round.

NaN is null in it, and infinity the text "Infinity" or "-Infinity", as in Protocol Buffers' JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import writing

FILE = "history.jsonl"


class History:
    """An append-only file; what a killed run wrote after its last checkpoint is written over.

    Parameters
    ----------
    path : Path
        Of the file; its folder exists at the first `append`.

    Attributes
    ----------
    last_round : int
        The last round in it; -1 without any.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_round = -1
        self._size = 0  # bytes of the rounds up to the last

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a round's line."""
        line = json.dumps(_each(_strict, entry), separators=(",", ":")).encode() + b"\n"
        with writing(self.path), self.path.open("ab") as file:
            file.truncate(self._size)
            file.write(line)
        self.last_round = entry["round"]
        self._size += len(line)

    def flush(self) -> None:
        """Have what was appended on the disk."""
        if self._size:
            with writing(self.path), self.path.open("rb") as file:
                os.fsync(file.fileno())

    def open(self, last_round: int) -> None:
        """Go on after a round, or after the last one before it that can be read."""
        self.last_round, self._size = -1, 0
        for line, entry in self._lines():
            if entry["round"] > last_round:
                break
            self.last_round = entry["round"]
            self._size += len(line)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Read all rounds, one after another."""
        for _, entry in self._lines():
            if entry["round"] > self.last_round:
                break
            # What was not measured at all is None.
            yield {k: None if part is None else _each(_number, part) for k, part in entry.items()}

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Read the lines and what they hold, up to one that is damaged."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    return
                if not (line.endswith(b"\n") and isinstance(entry, dict) and "round" in entry):
                    return
                yield line, entry


def _each(change: Callable[[Any], Any], values: Any) -> Any:
    """Return nested dicts and lists with each of their values changed."""
    if isinstance(values, Mapping):
        return {key: _each(change, value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_each(change, value) for value in values]
    return change(values)


def _strict(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else json.dumps(value)


def _number(value: Any) -> Any:
    return math.nan if value is None else float(value) if isinstance(value, str) else value
