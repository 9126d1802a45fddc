"""Accuracy, rounds and megabytes to a target, where all clients, three tenths or a tenth take part.

Run with `python -m tests.benchmarks.participation` in the repository (long), or name problems and
methods: `python -m tests.benchmarks.participation digits-alike FedAvg FedADMM --seeds 3`. For one
seed all methods have the same data, initial model, clients and batches. Prints a markdown table for
each problem: mean and standard deviation over the seeds. Files of data are read from $FL_ADMM_DATA.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, pstdev
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from torch import nn

import clients
import fl_admm_strategies as library
from clients import Minibatches, accuracy, client_app
from fl_admm_strategies import InProcessGrid
from simulations.data.federated import FederatedData
from simulations.data.registry import load
from simulations.problems.models import build, initialise

PARTICIPATIONS = (1.0, 0.3, 0.1)


def small_cnn(data: FederatedData) -> nn.Module:
    """Return a network for 8 x 8 digits: 18,000 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


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
    "mnist-two": Problem("mnist", {**SKEWS["two"], "samples": 2000}, MLP, "^fc3", 75),
    "mnist-dirichlet": Problem(
        "mnist", {**SKEWS["dirichlet"], "beta": 0.3, "samples": 2000}, MLP, "^fc3", 80
    ),
    "har": Problem("uci-har", {}, partial(build, "mlp"), "^fc3", 80, lr=0.05, local_epochs=1),
    "resnet": Problem(
        "cifar10",
        {**SKEWS["alike"], "clients": 5, "samples": 500},
        resnet,
        "^fc",
        30,
        looks=(3, 5),
        lr=0.05,
        local_epochs=1,
        batch_size=32,
    ),
}


@dataclass(frozen=True)
class Method:
    """A strategy with its settings, its client, and the kind of model that is looked at."""

    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "global"
    client: str = ""
    all_train: bool = False

    def run(
        self, problem: Problem, participation: float, seed: int
    ) -> tuple[list[float], list[float]]:
        """Return accuracy in percent, and megabytes sent so far, after each round."""
        data = load(problem.data, seed, None, **problem.options)
        client_class = getattr(clients, self.client or f"{self.strategy}Client")

        def client_fn(context: Context) -> Any:
            samples = data.clients[int(context.node_config["partition-id"])]
            return client_class(
                context,
                initialise(problem.model(data), seed),
                Minibatches(*samples.train, problem.batch_size),
                nn.CrossEntropyLoss(),
                test_loader=[samples.test],
                metrics={"accuracy": accuracy},
            )

        kind = getattr(library, self.strategy)
        settings = {"lr": problem.lr, "local_epochs": problem.local_epochs, **self.settings}
        first = [problem.personal] if self.strategy in ("FedAPM", "FedAlt") else []
        share = 1.0 if self.all_train else participation
        strategy = kind(*first, fraction_train=share, seed=seed, **settings)
        start = ArrayRecord(initialise(problem.model(data), seed).state_dict())
        m, rounds = len(data.clients), problem.looks[-1]
        with InProcessGrid(client_app(client_fn, num_clients=m), 1) as grid:
            result = strategy.start(grid, start, num_rounds=rounds, evaluate_every=1)
        looks = result.evaluate_metrics_clientapp
        scores = [100 * float(looks[r][f"{self.kind}-accuracy"]) for r in range(1, rounds + 1)]
        sent, total = [], 0.0
        for server_round in range(1, rounds + 1):
            traffic = strategy.traffic.get(server_round)
            total += 0.0 if traffic is None else (traffic.down + traffic.up) / 1e6
            sent.append(total)
        return scores, sent


METHODS = {
    "Local, all train": Method("Local", kind="personal", all_train=True),
    "Local": Method("Local", kind="personal"),
    "FedAvg": Method("FedAvg", client="SGDClient"),
    "FedProx": Method("FedProx"),
    "SCAFFOLD": Method("SCAFFOLD"),
    "FedADMM": Method("FedADMM"),
    "FedADMM, published": Method("FedADMM", {"published": True}),
    "FedAPM": Method("FedAPM", kind="personal"),
    "FedAPM, published": Method("FedAPM", {"published": True}, kind="personal"),
    "FLAME": Method("FLAME", kind="personal"),
    "FLAME, published": Method("FLAME", {"published": True}, kind="personal"),
    "Ditto": Method("Ditto", kind="personal"),
    "FedAlt": Method("FedAlt", kind="personal"),
    "pFedMe": Method("PFedMeMatched", kind="personal"),
    "LpProjADMM": Method("LpProjADMM", kind="personal"),
}


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard deviation."""
    return f"{mean(values):.{digits}f} ± {pstdev(values):.{digits}f}"


def row(problem: Problem, method: Method, participation: float, seeds: range) -> list[str]:
    """Return the cells of a method: accuracies, rounds and megabytes to the target."""
    runs = [method.run(problem, participation, seed) for seed in seeds]
    cells = [spread([scores[look - 1] for scores, _ in runs]) for look in problem.looks]
    there = []
    for scores, sent in runs:
        hit = next((i for i, score in enumerate(scores) if score >= problem.target), None)
        if hit is not None:
            there.append((hit + 1, sent[hit]))
    if len(there) < len(runs):
        return [*cells, f"{len(there)} of {len(runs)} seeds", ""]
    return [*cells, *(spread(values) for values in zip(*there, strict=True))]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems and methods; without, all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--participation", type=float, nargs="+", default=PARTICIPATIONS)
    given = parser.parse_args()
    unknown = set(given.names) - PROBLEMS.keys() - METHODS.keys()
    if unknown:
        parser.error(f"names has {sorted(unknown)}, expected {[*PROBLEMS, *METHODS]}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    methods = [name for name in METHODS if name in given.names] or list(METHODS)
    for name in [name for name in PROBLEMS if name in given.names] or PROBLEMS:
        problem = PROBLEMS[name]
        looks = " | ".join(f"round {look}" for look in problem.looks)
        to_target = f"rounds to {problem.target:.0f} % | MB to it"
        print(f"\n{name}\n\n| participation | method | {looks} | {to_target} |")
        print("|---" * (4 + len(problem.looks)) + "|")
        for participation in given.participation:
            for method in methods:
                cells = row(problem, METHODS[method], participation, seeds)
                print(f"| {participation} | {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
