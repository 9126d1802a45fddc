"""The checkpoints of a run: a folder of files, the newest of which the run goes on from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from filelock import BaseFileLock
from flwr.common import log
from numpy.typing import NDArray

from ..maths.checks import check_count
from .files import PART, DamagedFileError, lock_folder, make_folder, read_arrays, write_arrays

_FORMAT = 3
_RECORD = "record"
_SHOWN = 5  # differences in an error


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes
    ----------
    path : Path
        Where it was read.
    server_round : int
        The last round in it.
    arrays : dict of str to ndarray
        The server's state.
    fingerprint : dict
        Which run it is of.
    history : list of dict
        What was measured, one entry a round.
    """

    path: Path
    server_round: int
    arrays: dict[str, NDArray[Any]]
    fingerprint: dict[str, Any]
    history: list[dict[str, Any]]


class Checkpoints:
    """The checkpoints of one run in a folder: ``round-000012.safetensors`` and its like.

    Parameters
    ----------
    folder : str or Path
        Made if it is missing when it is locked.
    every : int (default: 1)
        Save every so many rounds.
    keep : int (default: 3)
        How many to keep; the others are there for the case that the newest is damaged.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1, keep: int = 3) -> None:
        check_count("checkpoint_every", every, least=1)
        check_count("checkpoint_keep", keep, least=1)
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self._lock: BaseFileLock | None = None
        self._history = bytearray()  # a line of JSON for every round, encoded once
        self._recorded = -1

    def rounds(self) -> list[int]:
        """Return the rounds that there are checkpoints of, sorted."""
        names = (re.fullmatch(r"round-(\d+)\.safetensors", p.name) for p in self._files())
        return sorted(int(name[1]) for name in names if name)

    def _files(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []

    def _path(self, server_round: int) -> Path:
        return self.folder / _name(server_round)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be read, None where there is none at all.

        Raises
        ------
        ValueError
            If there are checkpoints and all of them are damaged.
        """
        rounds = self.rounds()
        for server_round in reversed(rounds):
            path = self._path(server_round)
            try:
                checkpoint, text = _read(path)
            except DamagedFileError as error:
                log(WARNING, "Checkpoint %s is damaged (%s); trying the one before", path, error)
                continue
            self._history, self._recorded = bytearray(text), checkpoint.server_round
            return checkpoint
        if rounds:
            raise ValueError(
                f"None of the {len(rounds)} checkpoints in {self.folder} can be read, so there is "
                "nothing to resume from. Start anew with another checkpoint_dir."
            )
        return None

    def record(self, entry: Mapping[str, Any]) -> bool:
        """Add what was measured in a round to the history; return False if it is in it already."""
        if entry["round"] <= self._recorded:
            return False
        self._history += json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._recorded = entry["round"]
        return True

    def save(
        self,
        server_round: int,
        arrays: Mapping[str, NDArray[Any]],
        fingerprint: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; then remove what is older than the last `keep`."""
        make_folder(self.folder)  # should somebody have removed it
        header = json.dumps({"format": _FORMAT, "round": server_round, **fingerprint}).encode()
        record = np.frombuffer(header + b"\n" + self._history, dtype=np.uint8)
        write_arrays(self._path(server_round), {**arrays, _RECORD: record})
        # A later round than this is a damaged one that the run was not resumed from.
        kept = [saved for saved in self.rounds() if saved <= server_round][-self.keep :]
        for path in self._files():
            old = path.suffix == ".safetensors" and path not in map(self._path, kept)
            if path.name.startswith("round-") and (old or path.suffix == PART):
                path.unlink()

    def lock(self) -> None:
        """Keep other processes out of the folder until `unlock`; see `lock_folder`."""
        self._lock = lock_folder(self.folder).lock

    def unlock(self) -> None:
        """Leave the folder to others: the run has ended."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _name(server_round: int) -> str:
    return f"round-{server_round:06d}.safetensors"


def _is_header(header: dict[str, Any]) -> bool:
    types = {"algorithm": str, "seed": int, "model": dict, "settings": dict, "run": str}
    return all(type(header[key]) is kind for key, kind in types.items())


def _is_entry(entry: dict[str, Any]) -> bool:
    """Return whether this is what was measured in a round, as `record` gets it."""
    train, evaluate = ({} if entry[k] is None else entry[k] for k in ("train", "evaluate"))
    traffic = [0, 0] if entry["traffic"] is None else entry["traffic"]
    means = [*train.values(), *evaluate.values(), *entry["result"]]
    return (
        type(entry["round"]) is int
        and [type(number) for number in traffic] == [int, int]
        and all(re.fullmatch("[0-9]{1,20}", client) for client in [*train, *evaluate])
        and len(entry["result"]) == 3
        and all(_is_metric(value) for mean in means for value in mean.values())
    )


def _is_metric(value: object) -> bool:
    """Return whether a `MetricRecord` may hold a value: a number, or a list of them."""
    numbers = value if isinstance(value, list) else [value]
    return all(type(number) in (int, float) for number in numbers)


def _read(path: Path) -> tuple[Checkpoint, bytes]:
    """Return a checkpoint, and its history as it is written."""
    arrays, _ = read_arrays(path)
    try:
        header, _, text = arrays.pop(_RECORD).tobytes().partition(b"\n")
        fingerprint = json.loads(header)
        if fingerprint.pop("format") != _FORMAT:
            raise DamagedFileError("it is of another version of fl-admm-strategies")
        server_round = fingerprint.pop("round")
        history = [json.loads(line) for line in text.splitlines()]
        if not (_is_header(fingerprint) and path == path.with_name(_name(server_round))):
            raise DamagedFileError("its header is not that of a checkpoint of this round")
        if not all(map(_is_entry, history)):
            raise DamagedFileError("its history is not that of a run")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"it is no checkpoint: {error!r}") from error
    return Checkpoint(path, server_round, arrays, fingerprint, history), text


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return in words where two fingerprints differ in algorithm, model or seed."""
    found = [
        f"its {key} is {saved.get(key)}, this run's {own[key]}"
        for key in ("algorithm", "seed")
        if saved.get(key) != own[key]
    ]
    before, now = saved.get("model", {}), own["model"]
    arrays = [
        f"its array '{name}' is {before.get(name, 'missing')}, this run's is "
        f"{now.get(name, 'missing')}"
        for name in {**now, **before}
        if before.get(name) != now.get(name)
    ]
    if len(arrays) > _SHOWN:
        arrays[_SHOWN:] = [f"and {len(arrays) - _SHOWN} more arrays"]
    return found + arrays
