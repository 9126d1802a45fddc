"""The examples in docstrings run, in a project like a reader's."""

from __future__ import annotations

import doctest
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import flwr.app
import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from numpy.typing import NDArray
from torch import nn

import clients
import fl_admm_strategies
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.support.pace import fast

CLASSES, FEATURES, SAMPLES = 3, 4, 12
USERS, ITEMS = 4, 3706


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in (fl_admm_strategies, clients):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found = finder.find(import_module(module.name), extraglobs={})
            yield from (test for test in found if test.examples)


# --- The reader's project -----------------------------------------------------------------------


class Net(nn.Sequential):
    """A model."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))


def load_data(client: int) -> tuple[Any, Any]:
    """Return batches to train and to test on; every four clients call the classes alike."""
    torch.manual_seed(client)
    inputs = torch.randn(SAMPLES, FEATURES)
    batches = [(inputs, (inputs[:, :CLASSES].argmax(dim=1) + client // 4) % CLASSES)]
    return batches, batches


def load_matrix(client: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a matrix of 100 columns and the responses, which all clients could explain."""
    draw = np.random.default_rng(client)
    a = draw.normal(size=(150, 100))
    return a, a @ np.linspace(-1, 1, 100) + draw.normal(scale=0.1, size=150)


RECOMMENDERS = "FedM", "FedALS", "FedEASE"


def load_ratings(client: int, items: int = ITEMS) -> tuple[clients.Ratings, clients.Ratings]:
    """Return ratings of four users to train and to test on."""
    draw = np.random.default_rng(client)
    cells = draw.permutation(USERS * items)[:100].reshape(2, -1)
    train, test = (
        clients.Ratings(*np.divmod(part, items), draw.integers(1, 6, len(part)), USERS, items)
        for part in cells
    )
    return train, test


def context_of(client: int, num_clients: int) -> Context:
    config = {"partition-id": client, "num-partitions": num_clients}
    return Context(1, client, config, RecordDict(), {})


def names(method: str) -> dict[str, Any]:
    """Return what is defined or imported where an example stands: a project with a method."""
    linear = method in ("FedGiA", "FedGiALinearClient")
    client_class = getattr(clients, f"{method}Client", clients.FPFCClient)
    num_clients = 12 if method == "FPFC" else 4

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        if method.startswith(RECOMMENDERS):
            kind = getattr(clients, f"{method.removesuffix('Client')}Client")
            if kind is clients.FedEASEClient:
                train, test = load_ratings(client, 1682)
                return kind(context, train, test=test, rank_at=10)
            train, test = load_ratings(client)
            return kind(context, train, fl_admm_strategies.SquaredL2(1.0), test=test)
        if method == "FedGiA":
            return clients.FedGiALinearClient(context, *[least_squares(client)] * 2)
        train, test = load_data(client)
        heads = getattr(client_class, "heads", None)
        net = Net() if heads is None else heads.of(Net())
        return client_class(context, net, train, nn.CrossEntropyLoss(), test_loader=test)

    @lru_cache
    def least_squares(client: int) -> Any:
        return clients.LeastSquares(*load_matrix(client))

    torch.manual_seed(0)
    given: dict[str, Any] = {name: getattr(flwr.app, name) for name in flwr.app.__all__}
    for package in (fl_admm_strategies, clients):
        given |= {name: getattr(package, name) for name in package.__all__}
    given |= {
        "Memory": import_module("clients.toolkit.round.memory").Memory,
        "ClientTable": import_module("fl_admm_strategies.maths.clienttable").ClientTable,
        "ClientApp": ClientApp,
        "flwr": flwr,
        "ServerAppComponents": ServerAppComponents,
        "ServerConfig": ServerConfig,
        "lru_cache": lru_cache,
        "nn": nn,
        "np": np,
        "torch": torch,
    }
    return given | {
        "Net": Net,
        "model": Net(),
        "load_data": load_matrix if linear else load_data,
        "load_ratings": load_ratings,
        "strategy": fl_admm_strategies.FPFC(fl_admm_strategies.SmoothedSCAD(lam=0.6)),
        "config": {"version": 0, "server-round": 1},
        "first": np.zeros(3),
        "images": torch.zeros(40, FEATURES),
        "labels": torch.zeros(40, dtype=torch.int64),
        "client_fn": client_fn,
        "app": clients.client_app(client_fn),
        "grid": (grid := InProcessGrid(clients.client_app(client_fn), num_clients)),
        "context": trained(grid) if method == "FedMCADMMClient" else context_of(3, num_clients),
    }


def briefly(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `start` that ends after a round."""

    def started(strategy: Any, grid: Any, arrays: Any, num_rounds: int, **more: Any) -> Any:
        return start(strategy, grid, arrays, 1, **more)

    return started


def trained(grid: InProcessGrid) -> Context:
    """Return the context that a client of FedMC-ADMM has after a round."""
    strategy = fl_admm_strategies.FedMCADMM(fl_admm_strategies.SquaredL2(1.0))
    strategy.start(grid, fl_admm_strategies.initial_item_factors(5, ITEMS), 1)
    return grid.context(5)


EXAMPLES = [*examples()]
OURS = ("FPFC", "FedADMM", "FedAPM", "FLAME", "FedMCADMM", "FedGiA")
OTHERS = [
    one.name for one in EXAMPLES if ".algorithms." in one.name and not one.name.endswith(OURS)
]


@pytest.mark.parametrize(
    "example", fast([one.name for one in EXAMPLES if one.name not in OTHERS], EXAMPLES)
)
def test_an_example_runs(example, capsys, monkeypatch):
    method = example.name.rpartition(".")[2]
    if not method.startswith(RECOMMENDERS):  # which show what they measure in the last round
        monkeypatch.setattr(StatefulStrategy, "start", briefly(StatefulStrategy.start))
    example.globs = names(method)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=options)
    runner.run(example, clear_globs=False)
    assert runner.summarize().failed == 0, capsys.readouterr().out
    made = example.globs["client_fn"](context_of(0, 4))
    assert made is not None
