"""Rounds of very many clients that hardly compute, packed on a few nodes: what the messages cost.

    PYTHONPATH=. python tests/benchmarks/cohort_rounds.py  # the table of docs/scaling.md
    PYTHONPATH=. python tests/benchmarks/cohort_rounds.py --engine ray --clients 5000 --numbers 1000
    PYTHONPATH=. python tests/benchmarks/cohort_rounds.py --plot docs/scaling.png  # its picture

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
import math
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
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


# What the picture has: engine, method, and how many clients at most.
CURVES = {
    ("inprocess", "mean"): ("in-process, four nodes", 100_000),
    ("ray", "mean"): ("Ray, four nodes", 100_000),
    ("inprocess", "flower"): ("in-process, Flower's FedAvg, a node each", 1_000),
    ("ray", "flower"): ("Ray, Flower's FedAvg, a node each", 1_000),
}


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


def draw(file: Path, rounds: int) -> None:
    """Draw the seconds and the memory of a round over the number of clients, for each engine."""
    import matplotlib.pyplot as plt

    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (engine, method), (label, most) in CURVES.items():
        sizes = [10**power for power in range(1, 6) if 10**power <= most]
        found = []
        for clients in sizes:
            nodes = clients if method == "flower" else min(4, clients)
            case = (engine, method, clients, 1_000, nodes, 1.0)
            found.append(in_its_own_process(case, rounds))
            print(label, clients, found[-1], flush=True)
        style = "--" if method == "flower" else "-"
        colour = "tab:blue" if engine == "inprocess" else "tab:orange"
        for axes, key in ((time_axes, "seconds"), (memory_axes, "megabytes")):
            seen = [one[key] if one[key] >= 1e-3 else math.nan for one in found]
            axes.plot(sizes, seen, style, c=colour, marker="o", label=label)
    uploads = [sizes * 4e-3 for sizes in (10, 100_000)]
    memory_axes.plot([10, 100_000], uploads, ":", c="grey", label="a round's uploads")
    time_axes.set_ylabel("a round, seconds")
    memory_axes.set_ylabel("peak of the server's process above its start, MB")
    for axes in (time_axes, memory_axes):
        axes.set(xscale="log", yscale="log", xlabel="clients, 1,000 numbers each, all in a round")
        axes.grid(alpha=0.3)
    time_axes.legend(fontsize="small")
    memory_axes.legend(memory_axes.get_lines()[-1:], ["a round's uploads"], fontsize="small")
    memory_axes.set_ylim(bottom=1)  # smaller federations fit in what the process had before
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["inprocess", "ray"], default="inprocess")
    parser.add_argument("--method", choices=[*STRATEGIES, "flower"], default="mean")
    parser.add_argument("--clients", type=int, help="known clients; without, the whole table")
    parser.add_argument("--numbers", type=int, default=1_000, help="of each client's model")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the clients in a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--plot", type=Path, help="draw a picture over the number of clients")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
        return
    if given.plot:
        draw(given.plot, given.rounds)
        return
    cases = TABLE
    if given.clients:
        nodes = given.clients if given.method == "flower" else given.nodes
        one = given.engine, given.method, given.clients, given.numbers, nodes, given.fraction
        cases = [one]
    print("engine    method   clients numbers nodes sampled  round s  processor s  memory   load")
    seconds: dict[tuple[str, str, int, int], float] = {}
    for case in cases:
        engine, method, clients, numbers, nodes, fraction = case
        found = in_its_own_process(case, given.rounds)
        seconds[engine, method, clients, numbers] = found["seconds"]
        here = engine == "inprocess"
        processor = f"{found['processor']:11.3f}" if here else " " * 11
        memory = f"{found['megabytes'] / found['uploads']:6.1f} x" if here else " " * 8
        print(
            f"{engine:9} {method:8} {clients:7} {numbers:7} {nodes:5} {fraction:7.0%} "
            f"{found['seconds']:8.3f} {processor} {memory} {found['load']:7.1f}",
            flush=True,
        )
    for engine in ("inprocess", "ray"):
        theirs = seconds.get((engine, "flower", 1_000, 1_000))
        for method in STRATEGIES:
            ours = seconds.get((engine, method, 10_000, 1_000))
            if ours and theirs:
                print(
                    f"{engine}: a round of Flower's FedAvg with 1,000 nodes takes "
                    f"{theirs / ours:.1f} times one of {method} with 10,000 clients; a client of "
                    f"it {10 * theirs / ours:.0f} times one"
                )


if __name__ == "__main__":
    main()
