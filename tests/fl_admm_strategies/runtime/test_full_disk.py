"""What becomes of a run whose files cannot be written."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, RecordDict

from clients.toolkit.round.memory import Memory
from fl_admm_strategies.runtime.saving.files import NotWrittenError, write_arrays
from tests.support.cases import CHEAP, grid_of
from tests.support.federation import Mean, assert_same_runs
from tests.support.refusals import refused

WIDE = ArrayRecord({"w": Array(np.ones(2_500, np.float32))})  # 10 kB
OnRound = Callable[[int, Mapping[str, float]], None]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes: then a write fails, part way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(folder: Path, num_rounds: int, on_round: OnRound | None = None) -> Mean:
    strategy = Mean(seed=1)
    with grid_of(CHEAP) as grid:
        strategy.start(
            grid, WIDE, num_rounds, on_round=on_round, checkpoint_dir=folder, resume=True
        )
    return strategy


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "file"), [(8_000, "round-000003.safetensors"), (900, "history.jsonl")]
)
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(limit, file, tmp_path):
    with ExitStack() as until_there_is_room:

        def fill(server_round: int, _: Mapping[str, float]) -> None:
            if server_round == 2:  # which is saved by then
                until_there_is_room.enter_context(largest_file(limit))

        with refused(NotWrittenError, tmp_path / file, "File too large", "round 2", "resume=True"):
            run(tmp_path, 5, fill)
    assert names(tmp_path) == ["history.jsonl", *(f"round-00000{r}.safetensors" for r in (1, 2))]
    assert_same_runs(run(tmp_path, 5), run(tmp_path / "whole", 5))


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    with largest_file(100), refused(NotWrittenError, "No round is saved"):
        run(tmp_path, 2)


def test_a_client_that_cannot_keep_its_state_says_so_and_has_the_last(tmp_path: Path) -> None:
    context = Context(1, 2, {"partition-id": 3}, RecordDict(), {})
    memory = Memory(context, tmp_path)
    memory.keep({"server-round": 1, "version": 0}, {"u": np.zeros(5_000)})
    with largest_file(8_000), refused(NotWrittenError, "client-3/round-000002.safetensors"):
        memory.keep({"server-round": 2, "version": 1}, {"u": np.ones(5_000)})
    assert names(tmp_path / "client-3") == ["round-000001.safetensors"]
    held = memory.recall({"version": 1})
    assert held is not None
    np.testing.assert_array_equal(held["u"], np.zeros(5_000))


def test_an_interrupt_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_arrays(tmp_path / "x", {"a": np.zeros(3)})
    assert names(tmp_path) == []
