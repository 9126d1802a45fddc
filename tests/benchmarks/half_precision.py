"""What half precision on the wire saves, and costs: the table of docs/scaling.md.

Run with `python -m tests.benchmarks.half_precision` in the repository (a minute), or name some
methods or another task of `defaults` (`cnn` is the network of Flower's quickstart, and takes long).
Ten clients with scikit-learn's digits and an MLP, ten rounds, every method with its defaults.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord

from clients import FedADMMClient, FLAMEClient, client_app
from fl_admm_strategies import FLAME, FedADMM, InProcessGrid

from .defaults import CLIENTS, METHODS, ROUNDS, SEED, TASKS, Task, client_of

CASES: dict[str, tuple[Callable[[Task], Any], Any]] = {
    **{name: case for name, case in METHODS.items() if name != "Local"},
    "FedADMM, duals on clients": (lambda task: FedADMM(duals="client", seed=SEED), FedADMMClient),
    "FLAME, duals on clients": (lambda task: FLAME(duals="client", seed=SEED), FLAMEClient),
}


def measure(name: str, method: str, wire_dtype: str | None) -> tuple[float, float, float, float]:
    """Return kB a client and round down and up, and accuracy and loss at the end."""
    make, client_class = CASES[method]
    task = TASKS[name]
    strategy = make(task)
    strategy.wire_dtype = wire_dtype
    app = client_app(partial(client_of, name, client_class))
    first = ArrayRecord(task.initial(client_class).state_dict())
    with InProcessGrid(app, CLIENTS) as grid:
        result = strategy.start(grid, first, num_rounds=ROUNDS, evaluate_every=ROUNDS)
    kind, metrics = next(iter(strategy.kinds)), result.evaluate_metrics_clientapp[ROUNDS]
    last = strategy.traffic[ROUNDS]  # in the first rounds clients are sent where to start
    down, up = (np.array([last.down, last.up]) / CLIENTS / 1e3).tolist()
    return down, up, 100 * float(metrics[f"{kind}-score"]), float(metrics[f"{kind}-loss"])


def main(chosen: Sequence[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    print("| method | down | up | accuracy | loss | down | up | accuracy | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    task = next((name for name in TASKS if name in chosen), "mlp")
    for method in [name for name in CASES if name in chosen] or CASES:
        cells = [
            f"{down:.3g} | {up:.3g} | {share:.1f} | {loss:.3f}"
            for down, up, share, loss in (
                measure(task, method, dtype) for dtype in (None, "float16")
            )
        ]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
