"""`state_on_disk`: what is kept by client in files, with the same bits and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients import FedADMMClient, client_app
from fl_admm_strategies import FedADMM
from fl_admm_strategies.maths import clienttable
from fl_admm_strategies.maths.clienttable import ClientTable
from fl_admm_strategies.runtime.saving import files
from fl_admm_strategies.runtime.saving.files import DamagedFileError, read_arrays, write_arrays
from tests.support.federation import WatchedGrid, assert_same_bits, client_fn_of, initial_arrays
from tests.support.refusals import refused


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Keep columns of any size on disk; return how many were mapped."""
    monkeypatch.setattr(clienttable, "ON_DISK_FROM", 0)
    made: list[Any] = []
    memmap = np.memmap
    monkeypatch.setattr(np, "memmap", lambda *a, **k: made.append(1) or memmap(*a, **k))
    return lambda: len(made)


def run(rounds: int, folder: Path | None = None, **options: Any) -> FedADMM:
    strategy = FedADMM(lr=0.2, fraction_train=0.5, seed=1, state_on_disk=folder)
    grid = WatchedGrid(client_app(client_fn_of(FedADMMClient)), 4)
    strategy.start(grid, initial_arrays(), rounds, progress=False, **options)
    return strategy


def test_a_run_has_the_same_bits_and_resumes(tmp_path, mapped, monkeypatch):
    in_memory = run(4)
    assert mapped() == 0
    folder, saved = tmp_path / "new" / "state", tmp_path / "saved"
    run(2, folder, checkpoint_dir=saved)
    assert mapped() > 0
    assert [*folder.iterdir()] == []  # files without a name: nothing is left after a kill
    monkeypatch.setattr(files, "MAPPED_FROM", 0)
    resumed = run(4, folder, checkpoint_dir=saved, resume=True)
    assert_same_bits(resumed.state_dict(), in_memory.state_dict())


def test_clients_come_and_go(tmp_path: Path, mapped: Callable[[], int]) -> None:
    tables = [ClientTable(u=np.arange(3.0), pi=np.zeros(3)) for _ in range(2)]
    tables[1].keep_in(tmp_path)
    for table in tables:
        table.insert({1: {}, 4: {"pi": np.full(3, 2.0)}, 7: {}})
        table[7].pi += 1
        table.insert({2: {"u": np.ones(3)}})
        table.remove([4])
        table.load_state_arrays({n: a.copy() for n, a in table.state_arrays().items()})
    assert mapped() == 8
    assert_same_bits(*(table.state_arrays() for table in tables))
    assert tables[1].column("pi").tolist() == [[0] * 3, [0] * 3, [1] * 3]
    assert type(tables[1].column("pi")) is np.ndarray


def test_a_small_column_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "memmap", None)
    table = ClientTable(u=np.zeros(3))
    table.keep_in(tmp_path)
    table.insert({1: {}})


def test_a_disk_without_room_is_a_sentence(tmp_path, mapped, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with refused(OSError, tmp_path, 4):
        run(1, tmp_path)
    file = tmp_path / "file"
    file.touch()
    with refused(ValueError, "state_on_disk", file / "state"):
        run(1, file / "state")


def test_a_mapped_file_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAPPED_FROM", 0)
    kinds = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    arrays |= {"none": np.zeros((0, 3)), "one": np.array(3.5)}
    path = tmp_path / "x.safetensors"
    write_arrays(path, arrays, {"run": "7"})
    found, metadata = read_arrays(path)
    assert metadata == {"run": "7"}
    assert_same_bits(found, arrays)
    found["f8"][0] = 9  # a copy, on writing
    assert_same_bits(read_arrays(path)[0], arrays)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with refused(DamagedFileError, "content"):
        read_arrays(path)
