"""The checkpoints of a run: a folder of files, the newest of which the run goes on from.

A checkpoint is the server's state, in ``round-000012.safetensors`` and its like. What was measured
is in one file for the whole run (`History`), so that a checkpoint costs the same in every round.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from numpy.typing import NDArray

from .files import PART, DamagedFileError, link_file, read_arrays, write_arrays

_FORMAT = 8
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
    """

    path: Path
    server_round: int
    arrays: dict[str, NDArray[Any]]
    fingerprint: dict[str, Any]


def path_of(folder: Path, server_round: int) -> Path:
    """Return the file of a round's checkpoint."""
    return folder / f"round-{server_round:06d}.safetensors"


def rounds_in(folder: Path) -> list[int]:
    """Return the rounds that there are checkpoints of, sorted."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("round-*"))
    return sorted(int(name[1]) for name in names if name)


def newest_in(folder: Path) -> Checkpoint:
    """Return the newest checkpoint that can be read.

    Raises
    ------
    ValueError
        If none can.
    """
    rounds = rounds_in(folder)
    for server_round in reversed(rounds):
        path = path_of(folder, server_round)
        try:
            return _read(path, server_round)
        except DamagedFileError as error:
            log(WARNING, "Checkpoint %s is damaged (%s); trying the one before", path, error)
    raise ValueError(
        f"None of the {len(rounds)} checkpoints in {folder} can be read, so there is nothing to "
        "resume from. Start anew with another checkpoint_dir."
    )


def _read(path: Path, server_round: int) -> Checkpoint:
    arrays, metadata = read_arrays(path)
    try:
        fingerprint = json.loads(metadata[_RECORD])
        found = fingerprint.pop("format"), fingerprint.pop("round")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"it is no checkpoint: {error!r}") from error
    if found != (_FORMAT, server_round):
        raise DamagedFileError(
            f"it is of (format, round) {found}, expected {_FORMAT, server_round}"
        )
    return Checkpoint(path, server_round, arrays, fingerprint)


def save(
    folder: Path,
    server_round: int,
    arrays: Mapping[str, NDArray[Any]],
    fingerprint: Mapping[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint; then remove what is older than the last `keep`."""
    header = {"format": _FORMAT, "round": server_round, **fingerprint}
    write_arrays(path_of(folder, server_round), arrays, {_RECORD: json.dumps(header)})
    _remove_old(folder, server_round, keep)


def finish(folder: Path, server_round: int, path: Path) -> None:
    """Once a run is over, give its last checkpoint, the server's state, a second name.

    The ones before are removed: what they were for has come to its end.
    """
    link_file(path_of(folder, server_round), path)
    _remove_old(folder, server_round, 1)


def _remove_old(folder: Path, server_round: int, keep: int) -> None:
    # A later round than this is a damaged one that the run was not resumed from.
    rounds = [saved for saved in rounds_in(folder) if saved <= server_round]
    kept = {path_of(folder, saved) for saved in rounds[-keep:]}
    for path in folder.glob("round-*"):
        if path.suffix in (".safetensors", PART) and path not in kept:
            path.unlink()


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
