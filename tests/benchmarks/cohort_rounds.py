"""Rounds of very many clients that hardly compute, packed on a few nodes: what the messages cost.

    PYTHONPATH=. python tests/benchmarks/cohort_rounds.py  # the table of docs/scaling.md
    PYTHONPATH=. python tests/benchmarks/cohort_rounds.py --engine ray --clients 5000 --numbers 1000

Prints a line for every measurement, each of which runs in a process of its own: the median seconds
of a round after the first; in-process also the processor's seconds, which another job on the
machine changes less, and the peak of the memory above that before the run, as a multiple of a
round's uploads. A method that keeps vectors for each client on the server counts these as well.
Flower's own FedAvg has a node for each client. Nothing here asserts a time; the load of the machine
is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

import flwr.serverapp.strategy as flowers
import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from clients import client_app
from fl_admm_strategies import FedADMM, FedAvg, run_in_process
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.support.federation import run_on_ray

ROUNDS = 5  # after the first

# Engine, method, clients, numbers of each, nodes, fraction.
TABLE: list[tuple[str, str, int, int, int, float]] = [
    ("inprocess", "mean", 10_000, 1_000, 4, 1.0),
    ("inprocess", "fedadmm", 10_000, 1_000, 4, 1.0),
    ("ray", "mean", 10_000, 1_000, 4, 1.0),
    ("ray", "fedadmm", 10_000, 1_000, 4, 1.0),
    ("inprocess", "mean", 10_000, 10_000, 4, 1.0),
    ("inprocess", "fedadmm", 10_000, 10_000, 4, 1.0),
    ("inprocess", "mean", 100_000, 1_000, 4, 0.01),
    ("inprocess", "fedadmm", 100_000, 1_000, 4, 0.01),
    ("inprocess", "flower", 1_000, 1_000, 1_000, 1.0),
    ("ray", "flower", 1_000, 1_000, 1_000, 1.0),
]


STRATEGIES: dict[str, Any] = {
    "mean": FedAvg,
    "fedadmm": FedADMM,  # an anchor for each client down, two vectors for each on the server
}


class Trivial(NumPyClient):
    """A client that adds a number of its own to what it gets."""

    def __init__(self, context: Context) -> None:
        self.own = np.float32(1e-4 * int(context.node_config["partition-id"]))

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        return [parameters[0] + self.own], 10, {"loss": 0.5, **made_by("FedADMM")}


def flowers_app() -> ClientApp:
    """Return the same client for Flower's FedAvg."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = np.float32(1e-4 * int(context.node_config["partition-id"]))
        array = message.content.array_records["arrays"]["w"].numpy() + own
        content = {
            "arrays": ArrayRecord({"w": Array(array)}),
            "metrics": MetricRecord({"num-examples": 10, "loss": 0.5}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def measure(
    engine: str, method: str, clients: int, numbers: int, nodes: int, fraction: float, rounds: int
) -> dict[str, float]:
    """Run a federation; return the medians of a round in seconds, and megabytes."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    times: list[tuple[float, float]] = []
    before: list[float] = []
    server = ServerApp()

    def note(server_round: int, arrays: ArrayRecord) -> None:
        times.append((time.perf_counter(), time.process_time()))

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        before.append(peak())
        strategy: Any
        if method == "flower":
            while len(list(grid.get_node_ids())) < clients:  # it would begin with fewer
                time.sleep(0.1)
            strategy = flowers.FedAvg(fraction_train=fraction, fraction_evaluate=0.0)
        else:
            strategy = STRATEGIES[method](fraction_train=fraction, fraction_evaluate=0.0)
        start = ArrayRecord({"w": Array(np.zeros(numbers, np.float32))})
        strategy.start(grid, start, rounds + 1, evaluate_fn=note)

    app = flowers_app() if method == "flower" else client_app(Trivial, num_clients=clients)
    if engine == "inprocess":
        run_in_process(server, app, nodes)
    else:
        run_on_ray(server, app, nodes)
    each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)][1:]
    return {
        "seconds": median(wall for wall, _ in each),
        "processor": median(processor for _, processor in each),
        "megabytes": peak() - before[0],
        "uploads": max(round(fraction * clients), 1) * numbers * 4 / 1e6,
        "load": os.getloadavg()[0],
    }


def peak() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def in_its_own_process(case: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Return what `measure` does."""
    command = [sys.executable, __file__, "--one", json.dumps([*case, rounds])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["inprocess", "ray"], default="inprocess")
    parser.add_argument("--method", choices=[*STRATEGIES, "flower"], default="mean")
    parser.add_argument("--clients", type=int, help="known clients; without, the whole table")
    parser.add_argument("--numbers", type=int, default=1_000, help="of each client's model")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the clients in a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
        return
    cases = TABLE
    if given.clients:
        nodes = given.clients if given.method == "flower" else given.nodes
        one = given.engine, given.method, given.clients, given.numbers, nodes, given.fraction
        cases = [one]
    print("engine    method   clients numbers nodes sampled  round s  processor s  memory   load")
    for case in cases:
        engine, method, clients, numbers, nodes, fraction = case
        found = in_its_own_process(case, given.rounds)
        here = engine == "inprocess"
        processor = f"{found['processor']:11.3f}" if here else " " * 11
        memory = f"{found['megabytes'] / found['uploads']:6.1f} x" if here else " " * 8
        print(
            f"{engine:9} {method:8} {clients:7} {numbers:7} {nodes:5} {fraction:7.0%} "
            f"{found['seconds']:8.3f} {processor} {memory} {found['load']:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
