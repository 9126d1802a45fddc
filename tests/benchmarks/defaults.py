"""Whether every method learns with its defaults: the table of docs/settings.md.

Run with `python -m tests.benchmarks.defaults` in the repository (minutes), or name some tasks and
methods: `python -m tests.benchmarks.defaults cnn FedADMM FedGiA`. Ten clients with like data, all
of them in each of ten rounds, mini-batches of 16. Scikit-learn ships the digits; the rest is drawn.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_friedman1
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import clients
import fl_admm_strategies as library
from clients import Ratings, accuracy, client_app
from fl_admm_strategies import InProcessGrid, SmoothedSCAD, SquaredL2, initial_item_factors

CLIENTS, ROUNDS, BATCH, SEED = 10, 10, 16, 1
USERS, ITEMS, RANK = 60, 30, 2

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and targets to train on, inputs and targets to test on."""


class QuickstartNet(nn.Module):
    """The network of Flower's PyTorch quickstart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape (n, 10)."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = functional.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
        logits: Tensor = self.fc3(functional.relu(self.fc2(x)))
        return logits


def explained(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the targets' variance (about 0) that is explained."""
    return 1 - ((outputs - targets) ** 2).mean() / (targets**2).mean()


@dataclass(frozen=True)
class Task:
    """A model, its loss and the clients' data.

    Attributes
    ----------
    model : callable
    loss : nn.Module
    metric : callable
        What is reported, up to 1.
    data : callable
        Returns inputs and targets of all samples.
    personal : str
        FedAPM's.
    """

    model: Callable[[], nn.Module]
    loss: nn.Module
    metric: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], tuple[Tensor, Tensor]]
    personal: str

    def initial(self, client_class: Any) -> nn.Module:
        """Return the model as everybody starts with it, with two heads if the clients need them."""
        torch.manual_seed(SEED)
        heads = getattr(client_class, "heads", None)
        model: nn.Module = self.model() if heads is None else heads.of(self.model())
        return model


def digits(*shape: int) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1797 digits, 8 x 8 pixels, or enlarged to an image's `shape`."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32)
    if shape:
        inputs = functional.interpolate(inputs.view(-1, 1, 8, 8), shape[1:]).expand(-1, *shape)
        inputs = 2 * inputs - 1
    return inputs, torch.tensor(labels)


def friedman() -> tuple[Tensor, Tensor]:
    """Return 1000 samples of Friedman's nonlinear regression problem, standardised."""
    inputs, targets = make_friedman1(1000, noise=1.0, random_state=SEED)
    scaled = [(a - a.mean(axis=0)) / a.std(axis=0) for a in (inputs, targets[:, None])]
    return tuple(torch.tensor(a, dtype=torch.float32) for a in scaled)  # type: ignore[return-value]


@cache
def ratings() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return who rated what, shape (n, 2), and the ratings, 1 to 5 stars."""
    rng = np.random.default_rng(SEED)
    users, items = rng.random((USERS, RANK)), rng.random((ITEMS, RANK))
    cells = np.argwhere(rng.random((USERS, ITEMS)) < 0.6)
    stars = 1 + 2 * (users @ items.T)[tuple(cells.T)]
    return cells, stars + rng.normal(scale=0.2, size=len(cells))


def responses() -> tuple[Tensor, Tensor]:
    """Return 1000 samples of 8 responses to 20 features: a matrix of rank 2, with noise."""
    rng = np.random.default_rng(SEED)
    matrix = rng.normal(size=(20, RANK)) @ rng.normal(size=(RANK, 8)) / np.sqrt(20 * RANK)
    inputs = rng.normal(size=(1000, 20))
    targets = inputs @ matrix + rng.normal(scale=0.3, size=(1000, 8))
    return torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32)


TASKS = {
    "linear": Task(partial(nn.Linear, 64, 10), nn.CrossEntropyLoss(), accuracy, digits, "bias"),
    "mlp": Task(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        nn.CrossEntropyLoss(),
        accuracy,
        digits,
        "^2",
    ),
    "cnn": Task(QuickstartNet, nn.CrossEntropyLoss(), accuracy, partial(digits, 3, 32, 32), "^fc3"),
    "regression": Task(
        lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)),
        nn.MSELoss(),
        explained,
        friedman,
        "^2",
    ),
    "matrix": Task(partial(nn.Linear, 20, 8), nn.MSELoss(), explained, responses, "bias"),
}

FIRST: dict[str, Callable[[Task], Any]] = {
    "FPFC": lambda task: [SmoothedSCAD(lam=0.6)],
    **dict.fromkeys(("FedAPM", "FedAlt", "FedSim"), lambda task: [task.personal]),
}
"""What a constructor cannot do without."""


def method(name: str, client: str = "") -> tuple[Callable[[Task], Any], Any]:
    """Return what makes a strategy with its defaults, and its client."""
    kind, first = getattr(library, name), FIRST.get(name, lambda task: [])
    return lambda task: kind(*first(task), seed=SEED), getattr(clients, client or f"{name}Client")


NAMES = [
    "FPFC",
    "FedADMM",
    "FedAPM",
    "FedAlt",
    "FedSim",
    "FedALA",
    "FedRoD",
    "FedCP",
    "FLAME",
    "LpProjADMM",
    "FedGiA",
    "Ditto",
    "FedProx",
    "FedDyn",
    "SCAFFOLD",
    "PFedMe",
    "PFedMeMatched",
    "LpProj",
    "PerFedAvg",
    "LocalSGD",
    "Local",
]
METHODS = {name: method(name) for name in NAMES} | {"FedAvg": method("FedAvg", "SGDClient")}

COMPLETIONS = {
    name: (getattr(library, name), getattr(clients, f"{name}Client"))
    for name in ("FedMCADMM", "FedMAvg", "FedMGS")
}
"""Methods of matrix completion, which have the last task only."""


@cache
def parts(task: str) -> list[Parts]:
    """Deal the samples to the clients, a fifth of each part for testing."""
    inputs, targets = TASKS[task].data()
    order = np.random.default_rng(SEED).permutation(len(targets))
    dealt = []
    for index in np.array_split(order, CLIENTS):
        train, test = np.split(index, [len(index) * 4 // 5])
        dealt.append((inputs[train], targets[train], inputs[test], targets[test]))
    return dealt


def client_of(task: str, client_class: Any, context: Context) -> Any:
    """Return a client with its part of the data."""
    given = TASKS[task]
    x, y, test_x, test_y = parts(task)[int(context.node_config["partition-id"])]
    return client_class(
        context,
        given.initial(client_class),
        DataLoader(TensorDataset(x, y), BATCH, shuffle=True),
        given.loss,
        test_loader=[(test_x, test_y)],
        metrics={"score": given.metric},
    )


def run(task: str, method: str, rounds: int = ROUNDS, **settings: Any) -> dict[str, float]:
    """Return the last evaluation of a run: ``KIND-score`` and ``KIND-loss``."""
    strategy, client_class = METHODS[method]
    app = client_app(partial(client_of, task, client_class))
    chosen = strategy(TASKS[task])
    vars(chosen).update(settings)
    first = ArrayRecord(TASKS[task].initial(client_class).state_dict())
    with InProcessGrid(app, CLIENTS) as grid:
        result = chosen.start(grid, first, num_rounds=rounds, evaluate_every=rounds)
    return {name: float(v) for name, v in result.evaluate_metrics_clientapp[rounds].items()}  # type: ignore[arg-type]


def matrix_completion(method: str, rounds: int = ROUNDS, **settings: Any) -> float:
    """Return what a method, whose clients hold the rows of their users, explains."""
    strategy_class, client_class = COMPLETIONS[method]
    cells, values = ratings()
    test = np.random.default_rng(SEED).random(len(values)) < 0.2
    each = USERS // CLIENTS

    def part(client: int, chosen: NDArray[np.bool_]) -> Ratings:
        rows = chosen & (cells[:, 0] // each == client)
        users, items = cells[rows].T
        return Ratings(users - client * each, items, values[rows], each, ITEMS)

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        return client_class(context, part(client, ~test), SquaredL2(1e-6), test=part(client, test))

    strategy = strategy_class(SquaredL2(1e-6), seed=SEED, **settings)
    with InProcessGrid(client_app(client_fn), CLIENTS) as grid:
        first = initial_item_factors(RANK, ITEMS, seed=SEED)
        result = strategy.start(grid, first, num_rounds=rounds, evaluate_every=rounds)
    rmse = float(result.evaluate_metrics_clientapp[rounds]["rmse"])  # type: ignore[arg-type]
    return 1 - rmse**2 / float(np.var(values[test]))


def score(task: str, method: str) -> float:
    """Return the mean score of the method's first kind of model; NaN where it does not apply."""
    if method == "FedRoD" and TASKS[task].metric is not accuracy:
        return math.nan
    kinds = getattr(METHODS[method][0](TASKS[task]), "kinds", {"global": ""})
    return run(task, method)[f"{next(iter(kinds))}-score"]


def main(chosen: Sequence[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    tasks = [name for name in TASKS if name in chosen] or list(TASKS)
    methods = [name for name in METHODS if name in chosen] or list(METHODS)
    print(f"| method | {' | '.join(tasks)} |\n|---|{'---|' * len(tasks)}")
    for method in methods:
        began = time.process_time()
        scores = [f"{100 * score(task, method):.0f}".replace("nan", "") for task in tasks]
        spent = time.process_time() - began
        print(f"| {method} | {' | '.join(scores)} |", flush=True)
        print(f"{method}: {spent:.0f} s", file=sys.stderr)
    for method in COMPLETIONS:
        if "matrix" in tasks and (method in chosen or len(methods) == len(METHODS)):
            row = [*[""] * (len(tasks) - 1), f"{100 * matrix_completion(method):.0f}"]
            print(f"| {method} | {' | '.join(row)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
