"""What a run writes is its owner's alone, whatever wrote it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fl_admm_strategies.runtime.saving import files
from fl_admm_strategies.runtime.saving.files import (
    lock_folder,
    write_arrays,
)
from tests.support.checkpoints import new_strategy, start
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_run_saves_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "checkpoints"
    strategy = new_strategy()
    start(strategy, 2, state_dir=tmp_path / "clients", checkpoint_dir=folder)
    strategy.models().save(tmp_path / "models")
    with lock_folder(tmp_path / "other"):
        pass
    made = [*tmp_path.rglob("*"), *tmp_path.rglob(".lock")]
    assert {"history.jsonl", "models.json", "global.safetensors", ".lock"} <= {
        path.name for path in made
    }
    assert {mode(path) for path in made if path.is_dir()} == {0o700}
    assert {mode(path) for path in made if path.is_file()} == {0o600}


def test_a_writer_that_opens_the_file_for_all_does_not_stay_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # safetensors writes a file of its own and renames it; its mode is that of the version.
    def open_to_all(arrays: object, path: Path, metadata: object) -> None:
        save_file(arrays, path, metadata)  # type: ignore[arg-type]
        path.chmod(0o644)

    monkeypatch.setattr(files, "save_file", open_to_all)
    write_arrays(tmp_path / "x", {"a": np.zeros(3)})
    assert mode(tmp_path / "x") == 0o600


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_named_like_a_checkpoint_is_refused_by_name(resume: bool, tmp_path: Path) -> None:
    (tmp_path / "round-000009.safetensors").mkdir()
    with refused(ValueError, "round-000009.safetensors", "folder"):
        start(new_strategy(), 12, checkpoint_dir=tmp_path, resume=resume)
    (tmp_path / "round-000009.safetensors").rmdir()
    start(new_strategy(), 1, checkpoint_dir=tmp_path)  # the folder is not locked
