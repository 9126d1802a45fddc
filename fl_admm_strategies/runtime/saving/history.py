"""What was measured in a run, in a file beside its checkpoints: a line of strict JSON a round.

NaN is null in it, and infinity the text "Infinity" or "-Infinity", as in Protocol Buffers' JSON.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .files import DamagedFileError, private, writing

FILE = "history.jsonl"


class Extent(NamedTuple):
    """How far a history goes, as a checkpoint says it.

    Attributes
    ----------
    size : int
        In bytes.
    checksum : int
        The CRC-32 of these.
    """

    size: int
    checksum: int


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
        self.extent = Extent(0, 0)
        self.last_round = -1
        self._is_damaged = False

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a round's line."""
        if self._is_damaged:
            self.path.replace(self.path.with_name(f"{self.path.name}.damaged"))
            self._is_damaged = False
        line = json.dumps(_each(_strict, entry), separators=(",", ":")).encode() + b"\n"
        begin, checksum = self.extent
        with writing(self.path, begin + len(line)), open(self.path, "ab", opener=private) as file:
            file.truncate(begin)
            file.write(line)
        self.last_round = entry["round"]
        self.extent = Extent(begin + len(line), zlib.crc32(line, checksum))

    def flush(self) -> None:
        """Have what was appended on the disk."""
        if self.extent.size:
            with writing(self.path, self.extent.size), self.path.open("rb") as file:
                os.fsync(file.fileno())

    def open(self, extent: Extent) -> None:
        """Go on after what a checkpoint refers to.

        Raises
        ------
        DamagedFileError
            If the file does not hold it; the history is empty then.
        """
        self.extent, self.last_round = Extent(0, 0), -1
        begin, checksum, last_round = 0, 0, -1
        try:
            for line in _lines(self.path, extent.size):
                checksum = zlib.crc32(line, checksum)
                last_round = json.loads(line)["round"]
                begin += len(line)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DamagedFileError(f"{self.path.name} cannot be read: {error!r}") from error
        if (begin, checksum) != extent:
            raise DamagedFileError(f"{self.path.name} is not what was written to it")
        self.extent, self.last_round = extent, last_round

    def entries(self) -> Iterator[dict[str, Any]]:
        """Read all rounds, one after another."""
        for line in _lines(self.path, self.extent.size):
            yield _parsed(line)

    def set_aside(self) -> None:
        """Begin an empty one; what there is goes on under another name."""
        self.extent, self.last_round = Extent(0, 0), -1
        self._is_damaged = self.path.exists()


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


def _parsed(line: bytes) -> dict[str, Any]:
    """Return a round's entry, of which what was not measured at all is None."""
    return {
        key: None if part is None else _each(_number, part)
        for key, part in json.loads(line).items()
    }


def _lines(path: Path, size: int) -> Iterator[bytes]:
    """Read the lines of the first `size` bytes of a file, which need not exist for none."""
    if size:
        with path.open("rb") as file:
            while size > 0 and (line := file.readline(size)):
                size -= len(line)
                yield line
