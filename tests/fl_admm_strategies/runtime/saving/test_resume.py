"""Saving a run and going on: a resumed run is the whole run, whatever happened to its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock, Timeout
from flwr.app import Array, ArrayRecord

from clients import client_app
from fl_admm_strategies import FLAME, InProcessGrid
from fl_admm_strategies.runtime.saving import files as runtime_files
from fl_admm_strategies.runtime.saving.files import DamagedFileError, read_arrays
from tests.support.checkpoints import (
    ROUNDS,
    Averaging,
    Killed,
    centrally,
    first,
    killer,
    measured,
    new_grid,
    new_strategy,
    start,
)
from tests.support.federation import assert_same_bits
from tests.support.refusals import Warned, refused


def go_on(folder: Path, num_rounds: int = ROUNDS, **changes: Any) -> Any:
    """Resume the run in a folder; return what was measured and the state."""
    strategy = new_strategy(**changes)
    result = start(
        strategy,
        num_rounds,
        state_dir=folder / "clients",
        checkpoint_dir=folder / "checkpoints",
        resume=True,
    )
    return measured(strategy, result), strategy.state_dict()


def assert_equal(actual: Any, expected: Any) -> None:
    assert actual[0] == expected[0]
    assert_same_bits(actual[1], expected[1])


def files(folder: Path) -> list[str]:
    own = {".lock", "history.jsonl"}
    return sorted(path.name for path in folder.iterdir() if path.name not in own)


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("round-*.safetensors"))


# --- A resumed run is the whole run -------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_ended_between_checkpoints_repeats_the_rounds_since_the_last(
    every: int, tmp_path: Path, whole: Any
) -> None:
    options: dict[str, Any] = {
        "state_dir": tmp_path / "clients",
        "checkpoint_dir": tmp_path / "checkpoints",
        "checkpoint_every": every,
    }
    with pytest.raises(Killed):
        start(new_strategy(), ROUNDS, on_round=killer(4), **options)
    strategy = new_strategy()
    seen: list[int] = []
    result = start(
        strategy, ROUNDS, resume=True, on_round=lambda number, _: seen.append(number), **options
    )
    assert seen == list(range(max(1, 4 // every * every), ROUNDS + 1))  # the last saved once more
    assert_equal((measured(strategy, result), strategy.state_dict()), whole)


# --- What is refused ----------------------------------------------------------------------------


def test_checkpoints_are_never_overwritten_by_a_run_that_does_not_resume(copy: Path) -> None:
    before = {path.name: path.read_bytes() for path in (copy / "checkpoints").iterdir()}
    with refused(ValueError, "round 4", "resume=True"):
        start(new_strategy(), 2, checkpoint_dir=copy / "checkpoints")
    assert {path.name: path.read_bytes() for path in (copy / "checkpoints").iterdir()} == before


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_files, "_WAIT", 0.1)
    with FileLock(tmp_path / ".lock"):  # no singleton, so as another process's
        for resume in (False, True):
            with refused(RuntimeError, "process"):
                start(new_strategy(), 4, checkpoint_dir=tmp_path, resume=resume)
        assert files(tmp_path) == []


def test_a_run_that_has_ended_leaves_the_folder_to_others(tmp_path: Path) -> None:
    strategy = new_strategy()
    start(strategy, 2, checkpoint_dir=tmp_path)
    lock_of_another_process = FileLock(tmp_path / ".lock")  # no singleton, so not this process's
    with lock_of_another_process.acquire(blocking=False):
        pass
    with pytest.raises(Killed):
        start(strategy, 4, checkpoint_dir=tmp_path, resume=True, on_round=killer(3))
    with pytest.raises(Timeout):
        lock_of_another_process.acquire(blocking=False)
    start(new_strategy(), 4, checkpoint_dir=tmp_path, resume=True)  # where it failed


@pytest.mark.parametrize(
    ("strategy", "arrays", "named"),
    [
        (FLAME(seed=1), first(), ["algorithm", "FedADMM", "FLAME"]),
        (new_strategy(seed=2), first(), ["seed", 1, 2]),
        (
            new_strategy(),
            ArrayRecord({"x": Array(np.zeros(4, np.float32))}),
            ["'x'", "float64 (3,)", "float32 (4,)"],
        ),
        (new_strategy(), ArrayRecord({"y": Array(np.zeros(3))}), ["'y'", "'x'"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference_named(
    strategy: Any, arrays: ArrayRecord, named: list[Any], copy: Path
) -> None:
    with refused(ValueError, *named):
        strategy.start(new_grid(), arrays, 6, checkpoint_dir=copy / "checkpoints", resume=True)


@pytest.mark.parametrize(
    ("num_clients", "error", "named"),
    [
        (3, TimeoutError, ["3 clients", 4, "[3]"]),
        (5, ValueError, ["[0, 1, 2, 3]", "[0, 1, 2, 3, 4]"]),
    ],
)
def test_another_federation_is_refused(num_clients, error, named, copy):
    app = client_app(lambda context: Averaging(context, None).to_client())
    grid, strategy = InProcessGrid(app, num_clients), new_strategy(node_timeout=0.1)
    with refused(error, *named):
        strategy.start(grid, first(), 6, checkpoint_dir=copy / "checkpoints", resume=True)


# --- Files --------------------------------------------------------------------------------------


def test_what_a_kill_left_behind_is_removed(copy: Path) -> None:
    (copy / "checkpoints" / "round-000005.safetensors.part").write_bytes(b"half")
    (copy / "checkpoints" / "notes.txt").write_text("mine")
    go_on(copy, 5)
    assert files(copy / "checkpoints") == [
        "notes.txt",
        *(f"round-00000{number}.safetensors" for number in (3, 4, 5)),
    ]


# --- Damage -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newest_checkpoint_cut_short_at_any_length_resumes(
    saved: Path, tmp_path: Path, whole: Any, warned: Warned, caplog: pytest.LogCaptureFixture
) -> None:
    data = newest(saved).read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        folder = tmp_path / str(length)
        shutil.copytree(saved, folder)
        (folder / "checkpoints" / newest(saved).name).write_bytes(data[:length])
        caplog.clear()
        assert_equal(go_on(folder), whole)
        assert len(warned()) == len(warned("round-000004.safetensors")) == 1
    for path in (folder / "checkpoints").glob("round-*"):
        path.write_bytes(b"")
    with refused(ValueError, "3 checkpoints"):
        go_on(folder)


@pytest.mark.slow
def test_clients_can_go_back_to_the_oldest_checkpoint(tmp_path: Path) -> None:
    # All train in every round, so a client that kept the last two rounds only could not.
    strategy = new_strategy(fraction_train=1.0)
    expected = measured(strategy, start(strategy, ROUNDS)), strategy.state_dict()
    folder: dict[str, Any] = {
        "state_dir": tmp_path / "clients",
        "checkpoint_dir": tmp_path / "checkpoints",
    }
    start(new_strategy(fraction_train=1.0), 4, **folder)
    for number in (3, 4):
        (tmp_path / "checkpoints" / f"round-{number:06d}.safetensors").write_bytes(b"")
    assert_equal(go_on(tmp_path, fraction_train=1.0), expected)


def test_every_flipped_bit_is_noticed(saved: Path, tmp_path: Path) -> None:
    data = bytearray(newest(saved).read_bytes())
    path = tmp_path / "round-000004.safetensors"
    read = read_arrays(newest(saved))[0]
    for position in np.random.default_rng(0).choice(8 * len(data), size=100, replace=False):
        data[position // 8] ^= 1 << position % 8
        path.write_bytes(data)
        try:
            arrays, _ = read_arrays(path)
        except DamagedFileError:
            pass
        else:  # a blank of the padding, or a key that nobody reads
            assert_same_bits(arrays, read)
        data[position // 8] ^= 1 << position % 8


def test_a_damaged_file_does_not_push_out_a_whole_one(copy: Path, whole: Any) -> None:
    # Round 4 is damaged and the run resumes from round 3; it saves every 5th round, and its first
    # checkpoint must not count the damaged one among the last two.
    newest(copy).write_bytes(b"")
    folders = {"state_dir": copy / "clients", "checkpoint_dir": copy / "checkpoints"}
    options = {"checkpoint_keep": 2, "checkpoint_every": 5, "resume": True}
    with pytest.raises(Killed):
        start(new_strategy(), 6, on_round=killer(5), **folders, **options)
    assert files(copy / "checkpoints") == ["round-000004.safetensors", "round-000005.safetensors"]
    assert_equal(go_on(copy), whole)


def test_central_evaluation_is_not_repeated(copy: Path) -> None:
    asked: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> Any:
        asked.append(server_round)
        return centrally(server_round, arrays)

    options: dict[str, Any] = {"checkpoint_dir": copy / "checkpoints", "resume": True}
    new_strategy().start(new_grid(copy / "clients"), first(), 6, evaluate_fn=evaluate, **options)
    assert asked == [5, 6]
    for name in ("checkpoint_every", "checkpoint_keep"):
        with refused(ValueError, name, 0):
            start(new_strategy(), 7, **options, **{name: 0})
    with refused(ValueError, "checkpoint_dir"):
        start(new_strategy(), 2, resume=True)
