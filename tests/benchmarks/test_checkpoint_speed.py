"""A checkpoint beside a plain write of the same bytes, flushed to the disk likewise.

Run with `pytest tests/benchmarks/test_checkpoint_speed.py --benchmark-enable`: 100 clients with
1,000,000 float32 parameters, 400 MB. Compare the two within a run. Nothing here asserts a time.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from fl_admm_strategies.runtime.saving.checkpoints import save
from fl_admm_strategies.runtime.saving.files import read_arrays

CLIENTS, PARAMETERS = 100, 1_000_000


def state(benchmark: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    clients = 1 if benchmark.disabled else CLIENTS  # that it runs is seen with one as well
    return {"state/omega": rng.random((clients, PARAMETERS), dtype=np.float32)}


def test_plain_write(benchmark: Any, tmp_path: Path) -> None:
    arrays = state(benchmark)

    def write() -> None:
        with (tmp_path / "plain").open("wb") as file:
            file.write(arrays["state/omega"].data)
            file.flush()
            os.fsync(file.fileno())

    benchmark.group = "400 MB"
    benchmark.pedantic(write, warmup_rounds=1, rounds=5)


def test_checkpoint(benchmark: Any, tmp_path: Path) -> None:
    arrays = state(benchmark)
    benchmark.group = "400 MB"
    benchmark.pedantic(save, args=(tmp_path, 1, arrays, {}, 1), warmup_rounds=1, rounds=5)


def test_read(benchmark: Any, tmp_path: Path) -> None:
    save(tmp_path, 1, state(benchmark), {}, 1)
    (path,) = tmp_path.iterdir()
    benchmark.group = "400 MB"
    benchmark.pedantic(read_arrays, args=(path,), warmup_rounds=1, rounds=5)
