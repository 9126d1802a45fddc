"""The run configuration: what `flwr run` passes to both sides of the app."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..settings.wording import unknown


@dataclass(frozen=True)
class RunConfig:
    """Which experiment to run, and where its files are.

    Attributes
    ----------
    experiment, profile, changes, seed
        As `load_settings` takes them.
    data_root : Path or None
        Where data sets lie; None for the default place.
    out : Path or None
        Folder of the results; None for a new one under ``runs/``.
    resume : bool
        Continue the run in that folder, where there is one.
    """

    experiment: str
    profile: str = ""
    changes: tuple[str, ...] = ()
    seed: int | None = None
    data_root: Path | None = None
    out: Path | None = None
    resume: bool = False


def read_run_config(raw: Mapping[str, Any]) -> RunConfig:
    """Read a Flower run configuration; its values are text and numbers only.

    ``set`` holds changes as ``"section.key=value"``, separated by semicolons; an empty text and the
    seed -1 stand for "not given".

    Raises
    ------
    ValueError
        If a key is unknown.
    """
    known = ["data-root", "experiment", "out", "profile", "resume", "seed", "set"]
    for key in raw:
        if key not in known:
            raise unknown("key of the run configuration", key, known)
    seed = raw.get("seed", -1)
    changes = (change.strip() for change in str(raw.get("set", "")).split(";"))
    return RunConfig(
        experiment=str(raw.get("experiment", "")),
        profile=str(raw.get("profile", "")),
        changes=tuple(change for change in changes if change),
        seed=None if seed == -1 else seed,
        data_root=_path(raw.get("data-root")),
        out=_path(raw.get("out")),
        resume=bool(raw.get("resume", False)),
    )


def _path(value: object) -> Path | None:
    return Path(str(value)).expanduser() if value else None
