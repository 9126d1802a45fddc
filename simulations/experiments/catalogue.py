"""The experiment files: which come with the app, and what a file holds before it is checked."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..settings.wording import unknown

EXPERIMENTS = Path(str(files("simulations"))) / "experiments"


def experiment_names() -> list[str]:
    """Return the names of the experiments that come with the app."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def read_experiment(experiment: str) -> dict[str, Any]:
    """Read the tables of an experiment, given by its name or as the path of a TOML file.

    Raises
    ------
    ValueError
        If there is no such experiment or file, or it is no TOML.
    """
    path = Path(experiment)
    if path.suffix != ".toml":
        names = experiment_names()
        if experiment not in names:
            raise unknown("experiment", experiment, names)
        path = EXPERIMENTS / f"{experiment}.toml"
    return read_toml(path, "experiment")


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read a TOML file; raise ValueError where there is none, which is said to be of a kind."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"there is no {kind} file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, nested without end
        raise ValueError(f"{path} is not a TOML file: {error}") from None
