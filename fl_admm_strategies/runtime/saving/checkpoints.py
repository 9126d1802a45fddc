"""The checkpoints of a run: a folder of files, the newest of which the run goes on from.

A checkpoint is the server's state. What was measured is in one file for the whole run, of which a
checkpoint says how far it went then; so a checkpoint costs the same in every round.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from filelock import BaseFileLock
from flwr.common import log
from numpy.typing import NDArray

from ...maths.checks import check_count
from .files import (
    PART,
    DamagedFileError,
    NotWrittenError,
    link_file,
    lock_folder,
    lock_of,
    make_folder,
    read_arrays,
    write_arrays,
)
from .history import FILE, Extent, History

_FORMAT = 7
_RECORD = "record"
_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")
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
    extent : Extent
        How far the history went.
    """

    path: Path
    server_round: int
    arrays: dict[str, NDArray[Any]]
    fingerprint: dict[str, Any]
    extent: Extent


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

    Attributes
    ----------
    history : History
        What was measured in the rounds of the run.

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
        self._locked: tuple[int, int] | None = None
        self.history = History(self.folder / FILE)

    def rounds(self) -> list[int]:
        """Return the rounds that there are checkpoints of, sorted."""
        names = (_CHECKPOINT.fullmatch(path.name) for path in self._files())
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
        without_history = None
        for server_round in reversed(rounds):
            path = self._path(server_round)
            try:
                checkpoint = _read(path)
            except DamagedFileError as error:
                log(WARNING, "Checkpoint %s is damaged (%s); trying the one before", path, error)
                continue
            try:
                self.history.open(checkpoint.extent)
            except DamagedFileError as error:
                log(
                    WARNING, "The history of %s is damaged (%s); trying the one before", path, error
                )
                without_history = without_history or checkpoint
                continue
            return checkpoint
        if without_history is not None:
            log(
                WARNING,
                "No checkpoint has its whole history: what was measured up to round "
                f"{without_history.server_round} is lost; the state is whole",
            )
            self.history.set_aside()
            return without_history
        if rounds:
            raise ValueError(
                f"None of the {len(rounds)} checkpoints in {self.folder} can be read, so there is "
                "nothing to resume from. Start anew with another checkpoint_dir."
            )
        return None

    def record(self, entry: Mapping[str, Any]) -> bool:
        """Add what was measured in a round to the history; return False if it is in it already."""
        if entry["round"] <= self.history.last_round:
            return False
        with self._writing():
            self.history.append(entry)
        return True

    def save(
        self,
        server_round: int,
        arrays: Mapping[str, NDArray[Any]],
        fingerprint: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; then remove what is older than the last `keep`."""
        with self._writing():
            self.history.flush()
            header = {
                "format": _FORMAT,
                "round": server_round,
                "history": self.history.extent,
                **fingerprint,
            }
            write_arrays(self._path(server_round), arrays, {_RECORD: json.dumps(header)})
        self._remove_old(server_round, self.keep)

    def _remove_old(self, server_round: int, keep: int) -> None:
        # A later round than this is a damaged one that the run was not resumed from.
        kept = [saved for saved in self.rounds() if saved <= server_round][-keep:]
        for path in self._files():
            old = path.suffix == ".safetensors" and path not in map(self._path, kept)
            if path.name.startswith("round-") and (old or path.suffix == PART):
                path.unlink()

    def finish(self, server_round: int, path: Path) -> None:
        """Once a run is over, give its last checkpoint, the server's state, a second name.

        The ones before are removed: what they were for has come to its end.
        """
        link_file(self._path(server_round), path)
        self._remove_old(server_round, 1)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """See that the folder is still this run's; say what is saved if the block cannot write."""
        if self._lock is None:
            make_folder(self.folder)
        elif lock_of(self.folder) != self._locked:
            raise RuntimeError(
                f"{self.folder} was removed, or replaced by another folder, while the run was "
                "saving its rounds in it, so the run ends. If you still have the old folder, put "
                "it back and go on with resume=True; else start anew."
            )
        try:
            yield
        except NotWrittenError as error:
            rounds = self.rounds()
            left = (
                f"The checkpoint of round {rounds[-1]} is whole: make room, and go on from it with "
                "resume=True."
                if rounds
                else "There is no checkpoint yet: make room and start anew."
            )
            raise NotWrittenError(f"{error}. {left}") from error

    def lock(self) -> None:
        """Keep other processes out of the folder until `unlock`; see `lock_folder`.

        Raises
        ------
        ValueError
            If a folder has the name of a checkpoint.
        """
        for path in self._files():
            if _CHECKPOINT.fullmatch(path.name) and path.is_dir():
                raise ValueError(
                    f"{path} is a folder, expected a checkpoint or nothing. Move it away, or give "
                    "another checkpoint_dir."
                )
        self._lock = lock_folder(self.folder).lock
        self._locked = lock_of(self.folder)

    def unlock(self) -> None:
        """Leave the folder to others: the run has ended."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _name(server_round: int) -> str:
    return f"round-{server_round:06d}.safetensors"


def _read(path: Path) -> Checkpoint:
    arrays, metadata = read_arrays(path)
    try:
        fingerprint = json.loads(metadata[_RECORD])
        if fingerprint.pop("format") != _FORMAT:
            raise DamagedFileError("it is of another version of fl-admm-strategies")
        server_round = fingerprint.pop("round")
        extent = Extent(*fingerprint.pop("history"))
        if path != path.with_name(_name(server_round)):
            raise DamagedFileError(f"it is of round {server_round}")
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"it is no checkpoint: {error!r}") from error
    return Checkpoint(path, server_round, arrays, fingerprint, extent)


def differences(saved: Mapping[str, Any], this: Mapping[str, Any]) -> list[str]:
    """Return in words where two fingerprints differ in algorithm, model or seed."""
    found = [
        f"its {key} is {saved.get(key)}, this run's {this[key]}"
        for key in ("algorithm", "seed")
        if saved.get(key) != this[key]
    ]
    before, now = saved.get("model", {}), this["model"]
    arrays = [
        f"its array '{name}' is {before.get(name, 'missing')}, this run's is "
        f"{now.get(name, 'missing')}"
        for name in {**now, **before}
        if before.get(name) != now.get(name)
    ]
    if len(arrays) > _SHOWN:
        arrays[_SHOWN:] = [f"and {len(arrays) - _SHOWN} more arrays"]
    return found + arrays
