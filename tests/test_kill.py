"""A run that is killed at any moment and resumed gives the bits of one that never was."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients import client_app
from fl_admm_strategies import InProcessGrid
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.saving.checkpoints import rounds_in
from fl_admm_strategies.runtime.saving.files import read_arrays
from tests.support.cases import NUM_CLIENTS, case_of
from tests.support.federation import assert_same_bits, client_fn_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks processes")

CASES = [
    ("FPFC", 0),
    ("AsyncFPFC", 0),
    ("FedMC-ADMM-client-duals", 0),
    ("FedAPM-client-duals", 0),
    ("FedAPM-client-duals", 2),
]
"""A case, and in how many worker processes its clients run."""

# With what the first round of training would import; what does not exist is passed over.
PRELOAD = ["tests.test_kill", "torch._dynamo", "fl_admm_strategies.maths.pairs.kernels_numba"]

NUM_ROUNDS, EVERY = 8, 2  # rounds from checkpoint to checkpoint


def live(name: str, workers: int, folder: Path) -> None:
    """Start the run of a case, or continue what is left of it in the folder."""
    torch.set_num_threads(1)
    case = case_of(name)
    client_class = partial(case.client_class, state_dir=folder / "clients")
    app = client_app(client_fn_of(client_class))
    with InProcessGrid(app, NUM_CLIENTS, workers=workers) as grid:
        case.strategy(fraction_train=0.5, fraction_evaluate=0.5, seed=1).start(
            grid,
            case.initial_arrays(),
            NUM_ROUNDS,
            checkpoint_dir=folder / "checkpoints",
            checkpoint_every=EVERY,
            resume=True,
        )


def outcome(folder: Path) -> tuple[int, Arrays, list[dict[str, Any]]]:
    """Return the last round, the state of all sides and all that was measured of a folder's run.

    Without the bytes: after a restart the server sends, to be on the safe side, what a client may
    have lost.
    """
    last = rounds_in(folder / "checkpoints")[-1]
    arrays, _ = read_arrays(folder / "checkpoints" / f"round-{last:06d}.safetensors")
    lines = (folder / "checkpoints" / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    for entry in history:
        del entry["traffic"]
    for client in (folder / "clients").glob("client-*"):
        held, _ = read_arrays(max(client.glob("round-*.safetensors")))
        arrays |= {f"{client.name}/{key}": array for key, array in held.items()}
    return last, arrays, history


def newest(folder: Path) -> int:
    return max(rounds_in(folder / "checkpoints"), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_few_kills(name: str, workers: int, tmp_path: Path) -> None:
    """Each kill comes at a random moment after another checkpoint, the first before any."""
    # A fork of a server that has imported everything, which takes longer than a run.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOAD)
    rng = np.random.default_rng()

    def life(folder: Path) -> Any:
        process = processes.Process(target=live, args=(name, workers, folder))
        process.start()
        return process

    whole, killed = life(tmp_path / "whole"), tmp_path / "killed"
    whole.join()
    assert whole.exitcode == 0
    for checkpoints in range(3):
        process = life(killed)
        while process.is_alive() and newest(killed) < EVERY * checkpoints:
            process.join(0.005)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
    last = life(killed)
    last.join()
    assert last.exitcode == 0
    (rounds, arrays, history), (all_rounds, state, record) = map(
        outcome, (killed, tmp_path / "whole")
    )
    assert rounds == all_rounds == NUM_ROUNDS
    assert_same_bits(arrays, state)
    assert history == record
