"""Accuracy, rounds and megabytes to a target, where all clients, three tenths or a tenth take part.

Run with `python -m tests.benchmarks.participation` in the repository (hours), or name problems and
methods: `python -m tests.benchmarks.participation digits-alike FedAvg FedADMM --seeds 3`. For one
seed all methods have the same data, initial model, clients and batches. Every round of every run
becomes a line of `--out`/PROBLEM.csv; a run that stands there already is not repeated, so that an
interrupted command goes on. Delete the file after a change that moves the numbers. Then a markdown
table is printed for each problem: mean and standard deviation over the seeds. Files of data are
read from $FL_ADMM_DATA.
"""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from flwr.app import ArrayRecord
from torch import nn

import clients
import fl_admm_strategies as library
from clients import client_app
from fl_admm_strategies import InProcessGrid
from simulations.data.federated import FederatedData
from simulations.data.registry import load
from simulations.problems.models import build, initialise
from tests.benchmarks.shared import (
    append,
    client_fn_of,
    filters,
    percent,
    prepare,
    read,
    spread,
)

PARTICIPATIONS = (1.0, 0.3, 0.1)


def small_cnn(data: FederatedData) -> nn.Module:
    """Return a network for 8 x 8 digits: 18,000 parameters."""
    return nn.Sequential(*filters(16, 32), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10))


def quickstart_net(data: FederatedData) -> nn.Module:
    """Return the network of Flower's PyTorch quickstart."""
    layers = {
        "conv1": nn.Conv2d(3, 6, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(400, 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def resnet(data: FederatedData) -> nn.Module:
    """Return torchvision's ResNet-18."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)
    return model


@dataclass(frozen=True)
class Problem:
    """Data, a model and the local work, the same for all methods.

    Attributes
    ----------
    data : str
        A data set of the app's.
    options : dict
        Its options.
    model : callable
    personal : str
        The parameters that FedAPM and FedAlt keep personal.
    target : float
        The accuracy, in percent, to which rounds and megabytes are counted.
    looks : tuple of int
        The rounds whose accuracy is shown; the last is the last of the run.
    """

    data: str
    options: dict[str, Any]
    model: Callable[[FederatedData], nn.Module]
    personal: str
    target: float
    looks: tuple[int, ...] = (8, 16, 24)
    lr: float = 0.1
    local_epochs: int = 3
    batch_size: int = 16


SKEWS: dict[str, dict[str, Any]] = {
    "alike": {"partition": "noise", "sigma": 0.0},
    "dirichlet": {"partition": "dirichlet-label", "beta": 0.1},
    "two": {"partition": "label-count", "labels_per_client": 2},
}
MLP = partial(build, "mlp")
PROBLEMS = {
    **{f"digits-{k}": Problem("digits", v, small_cnn, "^10", 80) for k, v in SKEWS.items()},
    **{f"digits-mlp-{k}": Problem("digits", v, MLP, "^fc3", 80) for k, v in SKEWS.items()},
    "family": Problem(
        "digits", {**SKEWS["two"], "labels_per_client": 3, "clients": 12}, small_cnn, "^10", 85
    ),
    "family-dirichlet": Problem(
        "digits", {**SKEWS["dirichlet"], "beta": 0.3, "clients": 12}, small_cnn, "^10", 85
    ),
    "mnist-two": Problem("mnist", {**SKEWS["two"], "samples": 2000}, MLP, "^fc3", 75),
    "mnist-dirichlet": Problem(
        "mnist", {**SKEWS["dirichlet"], "beta": 0.3, "samples": 2000}, MLP, "^fc3", 80
    ),
    "har": Problem("uci-har", {}, MLP, "^fc3", 75, looks=(8, 24, 48), lr=0.05, local_epochs=1),
    "cifar10-cnn": Problem(
        "cifar10",
        {**SKEWS["dirichlet"], "beta": 0.3, "samples": 2000},
        quickstart_net,
        "^fc3",
        25,
        lr=0.05,
    ),
    "resnet": Problem(
        "cifar10",
        {**SKEWS["alike"], "clients": 5, "samples": 2000},
        resnet,
        "^fc",
        30,
        looks=(4, 7, 10),
        lr=0.05,
        local_epochs=1,
        batch_size=32,
    ),
}


class Line(NamedTuple):
    """One kind of model after one round of one run."""

    participation: float
    method: str
    seed: int
    round: int
    kind: str
    accuracy: float
    """In percent, over the test samples of all clients; NaN: the run diverged."""
    megabytes: float
    """Sent so far, up and down."""


@dataclass(frozen=True)
class Method:
    """A strategy with its settings and its client."""

    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    client: str = ""
    all_train: bool = False

    def run(self, name: str, problem: Problem, participation: float, seed: int) -> list[Line]:
        """Return what every round of a run gave, under the method's `name`."""
        data = load(problem.data, seed, None, **problem.options)
        client_class = getattr(clients, self.client or f"{self.strategy}Client")

        def model() -> nn.Module:
            return initialise(problem.model(data), seed)

        client_fn = client_fn_of(client_class, data, model, problem.batch_size)
        settings = {"lr": problem.lr, "local_epochs": problem.local_epochs, **self.settings}
        first = [problem.personal] if self.strategy in ("FedAPM", "FedAlt", "FedSim") else []
        share = 1.0 if self.all_train else participation
        strategy = getattr(library, self.strategy)(
            *first, fraction_train=share, seed=seed, **settings
        )
        start = ArrayRecord(model().state_dict())
        m, rounds = len(data.clients), problem.looks[-1]
        with InProcessGrid(client_app(client_fn, num_clients=m), 1) as grid:
            try:
                result = strategy.start(grid, start, num_rounds=rounds, evaluate_every=1)
            except RuntimeError:  # no upload was finite in the last rounds
                lost = (participation, name, seed, rounds)
                return [Line(*lost, kind, math.nan, math.nan) for kind in strategy.kinds]
        lines, sent = [], 0.0
        for number in range(1, rounds + 1):
            traffic = strategy.traffic.get(number)
            sent += 0.0 if traffic is None else (traffic.down + traffic.up) / 1e6
            found = result.evaluate_metrics_clientapp[number]
            lines += [
                Line(participation, name, seed, number, kind, percent(found[score]), sent)
                for kind in strategy.kinds
                # Whose models are chosen by the test samples is no result.
                if kind != "hm-oracle" and (score := f"{kind}-accuracy") in found
            ]
        return lines


METHODS = {
    "Local, all train": Method("Local", all_train=True),
    "Local": Method("Local"),
    "FedAvg": Method("FedAvg", client="SGDClient"),
    "FedProx": Method("FedProx"),
    "SCAFFOLD": Method("SCAFFOLD"),
    "SCAFFOLD, lr 0.05": Method("SCAFFOLD", {"lr": 0.05}),
    "SCAFFOLD, lr 0.02": Method("SCAFFOLD", {"lr": 0.02}),
    "FedDyn": Method("FedDyn"),
    "FedADMM": Method("FedADMM"),
    "FedADMM, rho 0.03": Method("FedADMM", {"rho": 0.03}),
    "FedADMM, rho 0.1": Method("FedADMM", {"rho": 0.1}),
    "FedADMM, rho 0.3": Method("FedADMM", {"rho": 0.3}),
    "FedADMM, by size": Method("FedADMM", {"weights": "size"}),
    "FedADMM, by size, rho 0.1": Method("FedADMM", {"weights": "size", "rho": 0.1}),
    "FedADMM, published": Method("FedADMM", {"published": True}),
    "FedAPM": Method("FedAPM"),
    "FedAPM, rho 0.1": Method("FedAPM", {"rho": 0.1}),
    "FedAPM, published": Method("FedAPM", {"published": True}),
    "FLAME": Method("FLAME"),
    "FLAME, published": Method("FLAME", {"published": True}),
    "Ditto": Method("Ditto"),
    "FedAlt": Method("FedAlt"),
    "FedSim": Method("FedSim"),
    "pFedMe": Method("PFedMeMatched"),
    "LpProjADMM": Method("LpProjADMM"),
}


class Runs:
    """The runs of a problem, kept in a CSV file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = read(path, Line)
        self._finished = {(line.participation, line.method, line.seed) for line in self.lines}

    def add(self, name: str, problem: Problem, participation: float, seed: int) -> None:
        """Run a method, unless the file has this run, and write what it gave, all at once."""
        if (participation, name, seed) in self._finished:
            return
        lines = METHODS[name].run(name, problem, participation, seed)
        append(self._path, lines)
        self.lines += lines

    def table(self, problem: Problem) -> list[str]:
        """Return the lines of a markdown table: a row for each method and kind of model.

        Columns for each participation: accuracies at the looks; rounds and megabytes to the target.
        """
        groups = defaultdict(list)
        for line in self.lines:
            groups[line.method, line.kind, line.participation].append(line)
        shares = sorted({line.participation for line in self.lines}, reverse=True)
        looks = ", ".join(map(str, problem.looks))
        heads = [f"{share:g}: rounds {looks} | to {problem.target:g} %" for share in shares]
        table = [
            f"| method | seeds | {' | '.join(heads)} |",
            "|---" * (2 + 2 * len(shares)) + "|",
        ]
        rows = dict.fromkeys((method, kind) for method, kind, _ in groups)
        for method, kind in sorted(rows, key=lambda row: [*METHODS].index(row[0])):
            found = [groups[method, kind, share] for share in shares]
            seeds = dict.fromkeys(
                str(len({line.seed for line in lines})) for lines in found if lines
            )
            title = method if kind == "global" else f"{method}: {kind}"
            cells = [cell for lines in found for cell in row_cells(problem, lines)]
            table.append(f"| {' | '.join([title, ', '.join(seeds), *cells])} |")
        return table


def row_cells(problem: Problem, lines: Sequence[Line]) -> list[str]:
    """Return accuracies at the looks, and rounds and megabytes to the target."""
    if not lines:
        return ["", ""]
    seeds = {line.seed for line in lines}
    diverged = {line.seed for line in lines if math.isnan(line.accuracy)}
    whole = [line for line in lines if line.seed not in diverged]
    looks = ", ".join(
        spread([line.accuracy for line in whole if line.round == look])
        for look in (problem.looks if whole else ())
    )
    if diverged:
        looks += f" ({len(diverged)} of {len(seeds)} diverged)"
    hits = [
        next(
            (line for line in lines if line.seed == seed and line.accuracy >= problem.target), None
        )
        for seed in seeds
    ]
    there = [hit for hit in hits if hit is not None]
    if len(there) < len(seeds):
        return [looks, f"{len(there)} of {len(seeds)} seeds"]
    megabytes = float(f"{mean(hit.megabytes for hit in there):.3g}")
    return [looks, f"{spread([hit.round for hit in there])}; {megabytes:g} MB"]


def main() -> None:
    """Run what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems and methods; without, all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--participation", type=float, nargs="+", default=PARTICIPATIONS)
    parser.add_argument("--out", type=Path, default=Path("runs/participation"))
    given = parser.parse_args()
    unknown = set(given.names) - PROBLEMS.keys() - METHODS.keys()
    if unknown:
        parser.error(f"names has {sorted(unknown)}, expected {[*PROBLEMS, *METHODS]}")
    prepare()
    given.out.mkdir(parents=True, exist_ok=True)
    methods = [name for name in METHODS if name in given.names] or list(METHODS)
    for name in [name for name in PROBLEMS if name in given.names] or PROBLEMS:
        runs = Runs(given.out / f"{name}.csv")
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            for participation in given.participation:
                for method in methods:
                    runs.add(method, PROBLEMS[name], participation, seed)
        print(f"\n{name}\n")
        print("\n".join(runs.table(PROBLEMS[name])), flush=True)


if __name__ == "__main__":
    main()
