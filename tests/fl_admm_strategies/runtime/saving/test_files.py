"""Files of arrays and checkpoints: what they hold comes back as it was, or is damage."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from safetensors.numpy import save, save_file

from fl_admm_strategies.runtime.saving.checkpoints import newest_in
from fl_admm_strategies.runtime.saving.files import link_file, read_arrays, write_arrays
from tests.support.refusals import refused


def test_a_file_has_its_name_only_once_it_is_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_arrays(path, {"a": np.zeros(3)})
    before, steps = path.read_bytes(), []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        assert (path.read_bytes() == before) == ("rename" not in steps)
        fsync(descriptor)

    def watched_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        assert path.read_bytes() == before
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_arrays(path, {"a": np.ones(3)})
    assert steps == ["file", "rename", "folder"]
    assert_array_equal(read_arrays(path)[0]["a"], np.ones(3))


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = {
        "scalar": np.array(3, np.uint64),
        "empty": np.zeros((0, 5), np.float32),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "strided": np.arange(10)[::3],
        "half": np.array([1.5, np.nan, np.inf], np.float16),
        "truth": np.array([True, False]),
        "big-endian": np.array([1, 2], ">i4"),
    }
    write_arrays(tmp_path / "x", arrays, {"run": "ü"})
    back, metadata = read_arrays(tmp_path / "x")
    assert metadata == {"run": "ü"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype.newbyteorder("=")
        assert_array_equal(back[name], array)


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_outlives_the_first(links, tmp_path, monkeypatch):
    def none_here(self: Path, target: Path) -> None:
        raise OSError("no links in this file system")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", none_here)
    first, second = tmp_path / "first", tmp_path / "second"
    for value in (1.0, 2.0):  # the second time it replaces what is there
        write_arrays(first, {"a": np.full(3, value)})
        link_file(first, second)
    link_file(first, second)
    assert first.samefile(second) == links
    first.unlink()
    assert_array_equal(read_arrays(second)[0]["a"], [2.0, 2.0, 2.0])
    assert list(tmp_path.iterdir()) == [second]


def a_checkpoint(**changes: Any) -> bytes:
    header = {"format": 8, "round": 4, "algorithm": "FedADMM"} | changes
    return save({"w": np.zeros(3)}, {"record": json.dumps(header)})


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
@example(b"")
@example(b"\x08\0\0\0\0\0\0\0{}      ")
@example(b"\xff" * 8 + b"{}")
@example(b"\x02\0\0\0\0\0\0\0{}")
@example(save({"w": np.zeros(3)}, {"record": "no JSON"}))
@example(a_checkpoint())
@example(save_file.__doc__.encode())  # type: ignore[union-attr]
def test_arbitrary_bytes_are_damage(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "c"
    folder.mkdir(exist_ok=True)
    (folder / "round-000004.safetensors").write_bytes(data)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        with refused(ValueError, "1 checkpoints"):
            newest_in(folder)
    finally:
        logging.getLogger("flwr").setLevel(logging.INFO)


@pytest.mark.parametrize("record", ["", "[]", '{"format": 3}', '{"format": 8}', None])
def test_a_whole_file_that_is_no_checkpoint_is_damage(record: str | None, tmp_path: Path) -> None:
    metadata = {} if record is None else {"record": record}
    write_arrays(tmp_path / "round-000001.safetensors", {"other": np.zeros(3)}, metadata)
    with refused(ValueError, "1 checkpoints"):
        newest_in(tmp_path)
