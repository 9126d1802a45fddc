"""A run in a process of its own, which the kill test ends and starts again until it is done."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from clients import client_app
from fl_admm_strategies import run_in_process
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.saving.checkpoints import Checkpoints
from fl_admm_strategies.runtime.saving.files import read_arrays
from tests.support.cases import NUM_CLIENTS, case_of
from tests.support.federation import client_fn_of, run_on_ray


def run(
    name: str, engine: str, num_rounds: int, every: int, folder: Path, ray_folder: Path
) -> None:
    """Start the run of a case, or continue what is left of it in the folder.

    The engines are "inprocess", "workers" (the same with two forked processes) and "ray". All
    processes of the run are in the session of this one, by which they can be found.
    """
    os.setsid()
    torch.set_num_threads(1)
    case = case_of(name)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        case.strategy(fraction_train=0.5, fraction_evaluate=0.5, seed=1).start(
            grid,
            case.initial_arrays(),
            num_rounds,
            checkpoint_dir=folder / "checkpoints",
            checkpoint_every=every,
            resume=True,
        )

    client_class = partial(case.client_class, state_dir=folder / "clients")
    clients = client_app(client_fn_of(client_class))
    if engine == "ray":
        run_on_ray(server_app, clients, NUM_CLIENTS, _temp_dir=str(ray_folder))
    else:
        run_in_process(server_app, clients, NUM_CLIENTS, workers=2 if engine == "workers" else 0)


def outcome(folder: Path) -> tuple[int, Arrays, list[dict[str, Any]]]:
    """Return the last round, the state of all sides and all that was measured of a folder's run.

    Without the bytes: after a restart the server sends, to be on the safe side, what a client may
    have lost.
    """
    last = Checkpoints(folder / "checkpoints").rounds()[-1]
    arrays, _ = read_arrays(folder / "checkpoints" / f"round-{last:06d}.safetensors")
    lines = (folder / "checkpoints" / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    for entry in history:
        del entry["traffic"]
    for client in (folder / "clients").glob("client-*"):
        held, _ = read_arrays(max(client.glob("round-*.safetensors")))
        arrays |= {f"{client.name}/{key}": array for key, array in held.items()}
    return last, arrays, history
