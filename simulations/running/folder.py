"""The results folder of a run: where it is, what is in it, and which run may go on in it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from fl_admm_strategies.runtime.saving.files import lock_folder

from ..experiments.loading import changed_settings, load_settings
from ..settings.tables import Settings

SETTINGS = "experiment.toml"
CHECKPOINTS = "checkpoints"
RESULT = "result.json"
STATE = "state.safetensors"


def metrics_file(baseline: str = "") -> str:
    """Return the name of a method's `History`; without a name that of the experiment's."""
    return f"metrics-{baseline}.jsonl" if baseline else "metrics.jsonl"


def results_folder(wanted: Path | None, name: str, settings: Settings, *, resume: bool) -> Path:
    """Make the folder of a run, or find that of the run to resume.

    Parameters
    ----------
    wanted : Path or None
        None for a new folder under ``runs/``, or to resume the last run there that has not ended.
    name : str
        The experiment's.
    settings : Settings
    resume : bool

    Raises
    ------
    ValueError
        If there can be no such folder, or it has something in it that is not to be resumed, or the
        run to resume has another seed, other data, another model or another algorithm.
    RuntimeError
        If the run in the folder is still going on.
    """
    if resume and wanted is None:
        started = sorted(Path("runs").glob(f"{name}-[0-9]*"), key=lambda p: p.stat().st_mtime)
        unfinished = [folder for folder in started if not (folder / RESULT).exists()]
        wanted = unfinished[-1] if unfinished else None
    try:
        return _new_folder(name) if wanted is None else _folder(wanted, settings, resume)
    except OSError as error:
        raise ValueError(
            f"the results folder {wanted or 'runs'} cannot be used: {error.strerror}. Give a "
            "folder to write to as --out."
        ) from None


def _folder(wanted: Path, settings: Settings, resume: bool) -> Path:
    if not resume and wanted.exists() and any(wanted.iterdir()):
        raise ValueError(
            f"the results folder {wanted} is not empty; give another --out, or --resume to "
            "continue the run in it"
        )
    fixed = ("seed ", "algorithm.name ", "data.", "model.")
    if other := [change for change in changes_in(wanted, settings) if change.startswith(fixed)]:
        raise ValueError(
            f"{wanted} is of another run: {'; '.join(other)}. Resume it with the --profile, "
            "--set and --seed that it was started with, or give another --out, or leave "
            "--resume out to start a new run."
        )
    wanted.mkdir(parents=True, exist_ok=True)
    if resume:
        with lock_folder(wanted / CHECKPOINTS):
            pass  # no process runs in it, which is better known before an engine is started
    return wanted


def _new_folder(name: str) -> Path:
    folder = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    return folder


def changes_in(folder: Path, settings: Settings) -> list[str]:
    """Return how settings differ from those of the run in a folder; empty where there is none."""
    path = folder / SETTINGS
    return changed_settings(load_settings(str(path)), settings) if path.exists() else []
