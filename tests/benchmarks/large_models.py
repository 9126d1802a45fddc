"""Rounds of large models that hardly train: processor time and memory, beside Flower's FedAvg.

    PYTHONPATH=. python tests/benchmarks/large_models.py  # the table of docs/scaling.md
    PYTHONPATH=. python tests/benchmarks/large_models.py --clients 4 --millions 100 --method FedADMM

A client takes one step on eight samples. Every line is two processes of its own, in-process on one
thread: the median processor time of a round after the first; the peak of the memory above that
before the run, and what is held when a round is over, both as multiples of one model. What is held
is the method's state, on the server and in the clients' contexts, and the global model. Flower's
FedAvg has a node for each client; ours are also packed on one. In the process that memory is of,
whatever is freed goes back at once, so that every large array costs its page faults anew; the other
is as a user has it, where malloc keeps arrays of up to 32 MB for the next.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import flwr.serverapp.strategy as flowers
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

import clients
import fl_admm_strategies
from fl_admm_strategies import run_in_process
from tests.support.federation import run_on_ray

METHODS = {"FedAvg": "SGDClient"} | {
    name: f"{name}Client" for name in ("FedProx", "Ditto", "FedADMM", "FLAME")
}
SIZES = [(11, 8), (100, 4)]  # millions of numbers, clients
INPUTS, LAYERS, ROUNDS = 64, 6, 3


def make_model(millions: float) -> nn.Module:
    """Return a network of that many numbers in six equal layers; its weights cost nothing."""
    width = round((millions * 1e6 / LAYERS) ** 0.5)
    sizes = [INPUTS, *[width] * (LAYERS + 1)]
    layers = [nn.utils.skip_init(nn.Linear, a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())], nn.Flatten())


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the only batch of a client."""
    return [(torch.ones(8, INPUTS), torch.zeros(8, dtype=torch.int64))]


def flowers_app(millions: float) -> ClientApp:
    """Return the client of Flower's quickstart for PyTorch, with one step."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = make_model(millions)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for inputs, targets in samples():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 8, "loss": loss.item()})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def our_app(method: str, millions: float, num_clients: int | None) -> ClientApp:
    """Return the app of a method's client."""
    kind = getattr(clients, METHODS[method])

    def client_fn(context: Context) -> Any:
        return kind(context, make_model(millions), samples(), nn.CrossEntropyLoss())

    return clients.client_app(client_fn, num_clients=num_clients)


def measure(engine: str, method: str, packed: bool, millions: float, num: int) -> dict[str, float]:
    """Run a federation; return seconds of a round, and memory as multiples of a model."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    times: list[tuple[float, float]] = []
    before: list[float] = []
    held: list[float] = []
    server, theirs = ServerApp(), method == "Flower"

    def note(*_: object) -> None:
        times.append((time.perf_counter(), time.process_time()))
        held.append(in_use())

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        model = make_model(millions)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1e-3)
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # its import is nobody's
        start = ArrayRecord(model.state_dict())
        del model
        before.append(in_use())
        strategy: Any
        if theirs:
            strategy = flowers.FedAvg(fraction_evaluate=0.0)
            strategy.start(grid, start, ROUNDS, evaluate_fn=note)
        else:
            kind = getattr(fl_admm_strategies, method)
            note()
            strategy = kind(fraction_evaluate=0.0, lr=0.01, local_epochs=1)
            strategy.start(grid, start, ROUNDS, on_round=note, progress=False)

    app = flowers_app(millions) if theirs else our_app(method, millions, num if packed else None)
    nodes = 1 if packed else num
    if engine == "ray":
        run_on_ray(server, app, nodes, object_store_memory=4 * 10**9)
    else:
        run_in_process(server, app, nodes)
    model_bytes = sum(p.nbytes for p in make_model(millions).parameters())
    each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)][1:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "wall": median(wall for wall, _ in each),
        "seconds": median(processor for _, processor in each),
        "peak": (peak - before[0]) / model_bytes,
        "held": (held[-1] - before[0]) / model_bytes,
    }


def in_use() -> float:
    """Return the memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.M)
    return int(found[1]) * 1024


def in_processes_of_its_own(case: tuple[Any, ...]) -> tuple[dict[str, float], ...]:
    """Return what `measure` does where malloc keeps freed memory, and where that goes back."""
    command = [sys.executable, __file__, "--one", json.dumps(case)]
    exact = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # every large array is a mapping of its own
    found: list[dict[str, float]] = []
    for options in ({}, exact):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | options
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["inprocess", "ray"], default="inprocess")
    parser.add_argument("--method", choices=list(METHODS), nargs="+")
    parser.add_argument("--clients", type=int, help="without, the whole table")
    parser.add_argument("--millions", type=float, default=11, help="of numbers of a model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
        return
    sizes = [(given.millions, given.clients)] if given.clients else SIZES
    print(
        "model x clients  method   nodes  s a round  of Flower's  given back  of Flower's   peak   "
        "held"
    )
    for millions, num in sizes:
        clock = "wall" if given.engine == "ray" else "seconds"
        cases = [(method, packed) for method in given.method or METHODS for packed in (True, False)]
        flower = in_processes_of_its_own((given.engine, "Flower", False, millions, num))
        for method, packed in [("Flower", False), *cases]:
            case = (given.engine, method, packed, millions, num)
            both = flower if method == "Flower" else in_processes_of_its_own(case)
            kept, back = (
                f"{found[clock]:10.2f} {found[clock] / theirs[clock]:12.2f}"
                for found, theirs in zip(both, flower, strict=True)
            )
            print(
                f"{millions:6.3g} M x {num:3}    {method:8} {1 if packed else num:4} "
                f"{kept}  {back} {both[1]['peak']:6.1f} {both[1]['held']:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
