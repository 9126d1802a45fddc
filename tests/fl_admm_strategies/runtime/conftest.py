"""A saved run for the tests of checkpoints and histories, and the same never interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import ROUNDS, measured, new_strategy, start


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 4 rounds: `checkpoints` and `clients`."""
    folder = tmp_path_factory.mktemp("saved")
    start(new_strategy(), 4, state_dir=folder / "clients", checkpoint_dir=folder / "checkpoints")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, to damage and to continue."""
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def whole() -> Any:
    strategy = new_strategy()
    return measured(strategy, start(strategy, ROUNDS)), strategy.state_dict()
