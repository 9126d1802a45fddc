"""Malicious clients beside every method at its defaults: the first tables of docs/robustness.md.

Run with `python -m tests.benchmarks.byzantine` in the repository (an hour), or name some methods:
`python -m tests.benchmarks.byzantine FedADMM FLAME --out docs/results/robustness`. Twenty clients
with a skew of labels, and 21 in three groups, with scikit-learn's digits; none, one or four of them
are malicious. The model is a linear softmax. The score is the accuracy of the model that a method
shows first, over the test samples of the honest clients. For one seed all runs have the same data,
initial model and clients. Every run becomes a line of `--out`/DATA.csv; one that stands there
already is not repeated. `--table` prints the tables alone.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from torch import nn

import clients
import fl_admm_strategies as library
from clients import client_app
from fl_admm_strategies import InProcessGrid
from simulations.attacks import Attack, AttackingClient
from simulations.data.registry import load
from tests.benchmarks.shared import append, client_fn_of, prepare, read, spread

ROUNDS, BATCH = 20, 16
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "skew": ("digits", {"clients": 20, "partition": "dirichlet-label", "beta": 0.3}),
    "groups": ("digits-swap", {"clients": 21}),  # three groups of seven
}
ATTACKS = ("same-value", "sign-flip", "gaussian", "lies")
COUNTS = (1, 4)


class Lying(NumPyClient):
    """Trains and uploads honestly, and lies in every number that it reports."""

    def __init__(self, client: NumPyClient) -> None:
        self.client = client

    def fit(self, parameters: Any, config: Any) -> Any:
        """Say that it has 2^53 examples, and that all but the first choice is bad."""
        upload, _, metrics = self.client.fit(parameters, config)
        lies = {
            name: 0.0 if name.endswith("-0") else 1e6
            for name, value in metrics.items()
            if isinstance(value, float)
        }
        return upload, 2**53, metrics | lies

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Evaluate with 0 examples: scores are those of the honest clients."""
        loss, _, metrics = self.client.evaluate(parameters, config)
        return loss, 0, metrics


@dataclass(frozen=True)
class Method:
    """A strategy at its defaults, with what its constructor cannot do without, and its client."""

    strategy: Callable[..., Any]
    client: Any
    rounds: int = ROUNDS

    def initial(self, seed: int) -> nn.Module:
        """Return the model as everybody starts with it, with two heads if the clients need them."""
        torch.manual_seed(seed)
        heads = getattr(self.client, "heads", None)
        return nn.Linear(64, 10) if heads is None else heads.of(two_layers())

    def score(self, data: str, kind: str, count: int, seed: int, **settings: Any) -> float:
        """Return the accuracy of the honest clients in percent; NaN where the run ended early."""
        name, options = DATA[data]
        data_: Any = load(name, seed, None, **options)
        m = len(data_.clients)
        honest_fn = client_fn_of(self.client, data_, partial(self.initial, seed), BATCH)
        drawn: Any = "gaussian" if kind in ("none", "lies") else kind
        attack = Attack(drawn, count / m, seed=seed)
        malicious = attack.malicious(m)

        def client_fn(context: Context) -> Any:
            client = int(context.node_config["partition-id"])
            honest = honest_fn(context)
            if client not in malicious:
                return honest.to_client()
            lying = Lying(honest) if kind == "lies" else AttackingClient(honest, attack, client)
            return lying.to_client()

        strategy = self.strategy(seed=seed, **settings)
        first = ArrayRecord(self.initial(seed).state_dict())
        with InProcessGrid(client_app(client_fn, num_clients=m), 1) as grid:
            try:
                result = strategy.start(
                    grid, first, num_rounds=self.rounds, evaluate_every=self.rounds
                )
            except RuntimeError:
                return math.nan
        found = result.evaluate_metrics_clientapp.get(self.rounds, {})
        return 100 * float(found.get(f"{next(iter(strategy.kinds))}-accuracy", math.nan))


def two_layers() -> nn.Module:
    """Return a network with a head, for the methods that have two."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def method(name: str, *first: Any, client: str = "", rounds: int = ROUNDS) -> Method:
    """Return a method by the name of its strategy."""
    made = partial(getattr(library, name), *first)
    return Method(made, getattr(clients, client or f"{name}Client"), rounds)


METHODS = {
    # Some 30 rounds in which it finds groups, and the last 30.
    "FPFC": method("FPFC", rounds=64),
    "FedADMM": method("FedADMM"),
    "FedAPM": method("FedAPM", "bias"),
    "FLAME": method("FLAME"),
    "FedGiA": method("FedGiA"),
    "FedAvg": method("FedAvg", client="SGDClient"),
    "FedProx": method("FedProx"),
    "FedDyn": method("FedDyn"),
    "SCAFFOLD": method("SCAFFOLD"),
    "LocalSGD": method("LocalSGD"),
    "PerFedAvg": method("PerFedAvg"),
    "Ditto": method("Ditto"),
    "PFedMe": method("PFedMe"),
    "PFedMeMatched": method("PFedMeMatched"),
    "LpProj": method("LpProj"),
    "LpProjADMM": method("LpProjADMM"),
    "FedALA": method("FedALA"),
    "FedAlt": method("FedAlt", "bias"),
    "FedSim": method("FedSim", "bias"),
    "LGFedAvg": method("LGFedAvg", "bias"),
    "FedRoD": method("FedRoD"),
    "FedCP": method("FedCP"),
    "IFCA": method("IFCA", 3),
    "PACFL": method("PACFL", 20.0),
    "CFL": method("CFL", 0.4, 1.6),
    "Local": method("Local"),
}


class Line(NamedTuple):
    """One run: who attacks how, and the honest clients' accuracy in percent."""

    method: str
    attack: str
    malicious: int
    seed: int
    accuracy: float


def cells(seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield attack, number of malicious clients and seed of the runs of a method."""
    yield "none", 0, seed
    for count in COUNTS:
        yield from ((kind, count, seed) for kind in ATTACKS)


def run(path: Path, data: str, names: list[str], seed: int, settings: dict[str, Any]) -> None:
    """Run what a file does not have yet, long runs last."""
    done = {line[:4] for line in read(path, Line)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in sorted(names, key=lambda name: METHODS[name].rounds):
        for cell in cells(seed):
            if (name, *cell) in done:
                continue
            accuracy_ = METHODS[name].score(data, *cell, **settings)
            append(path, [Line(name, *cell, round(accuracy_, 2))])


def table(lines: list[Line]) -> list[str]:
    """Return the lines of a markdown table: a row for each method."""
    found = defaultdict(list)
    for line in lines:
        found[line.method, line.attack, line.malicious].append(line.accuracy)
    columns = [("none", 0), *((kind, count) for count in COUNTS for kind in ATTACKS)]
    heads = ["no attack", *(f"{count} {kind}" for kind, count in columns[1:])]
    rows = [f"| method | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in METHODS:
        values = [found[name, *column] for column in columns]
        if any(values):
            rows.append(f"| {name} | {' | '.join(map(spread_of, values))} |")
    return rows


def spread_of(values: list[float]) -> str:
    """Return mean and standard deviation over the seeds, and in how many the run ended early."""
    whole = [value for value in values if not math.isnan(value)]
    ended = f"{len(values) - len(whole)} of {len(values)} ended" * (len(whole) < len(values))
    if not whole:
        return ended
    return f"{spread(whole)} ({ended})" if ended else spread(whole)


def main() -> None:
    """Run what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", help="without, all")
    parser.add_argument("--data", nargs="+", choices=[*DATA], default=[*DATA])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-norm", choices=["auto"], help="run with this bound, in --out too")
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.methods) - METHODS.keys():
        parser.error(f"methods has {sorted(unknown)}, expected {[*METHODS]}")
    prepare(logging.CRITICAL)
    settings = {} if given.max_norm is None else {"max_norm": given.max_norm}
    paths = {data: given.out / f"{data}{'-bounded' * bool(settings)}.csv" for data in given.data}
    if not given.table:
        for seed, (data, path) in product(range(1, given.seeds + 1), paths.items()):
            run(path, data, given.methods or [*METHODS], seed, settings)
    for path in paths.values():
        print(f"\n{path.stem}\n")
        print("\n".join(table(read(path, Line))), flush=True)


if __name__ == "__main__":
    main()
