"""The methods that every promise is tested with. A method joins with one `Case`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

import clients as of
import fl_admm_strategies as library
from clients import client_app
from clients.toolkit.round.completion import RatingsClient
from fl_admm_strategies import SmoothedSCAD, SquaredL2, StatefulStrategy
from tests.support.federation import (
    Adding,
    Federation,
    Mean,
    Raises,
    client_fn_of,
    initial_arrays,
    make_model,
)
from tests.support.ratings import NUM_ITEMS, contract_client


@dataclass(frozen=True)
class Case:
    """A strategy, its client and the model they start from, and in what the methods differ.

    Attributes
    ----------
    name : str
    strategy : callable
        Takes the keyword arguments of `StatefulStrategy`.
    client_class : callable
        Takes those of `TorchClient`.
    initial_arrays : callable
    admm : bool
        Whether it is an ADMM method: a sum over the members, of which one client has a fair share.
    keeps : bool
        Whether clients keep what is nowhere else, so that a client that lost it starts afresh.
    everybody_trains : bool
        In every round.
    server_learns : bool
        Whether replies change the state of the server.
    shakes_hands : bool
        Whether all clients are asked something before round 1.
    uploads_once : bool
        Whether a client uploads in its first round only.
    two_heads : type, optional
        The client whose models have two heads; then `client_class` makes them of plain models.
    variant : bool
        Whether its tests are slow ones: it is another setting of a method that is among the
        others, or shares most of its code with one that is.
    """

    name: str
    strategy: Callable[..., StatefulStrategy]
    client_class: Callable[..., NumPyClient]
    initial_arrays: Callable[[], ArrayRecord] = initial_arrays
    admm: bool = False
    keeps: bool = False
    everybody_trains: bool = False
    server_learns: bool = True
    shakes_hands: bool = False
    uploads_once: bool = False
    two_heads: Any = None
    variant: bool = False

    @property
    def takes_any_model(self) -> bool:
        return self.initial_arrays is initial_arrays or self.two_heads is not None

    @property
    def is_async(self) -> bool:
        return self.name == "AsyncFPFC"

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the model that the clients make of a plain one."""
        return model if self.two_heads is None else two_headed(self.two_heads, model)


# --- Where a client or a strategy needs other arguments than the others' --------------------------


def fedgia_linear_client(
    context: Context, model: Any, train_loader: Any, *_: Any, state_dir: Any = None, **__: Any
) -> NumPyClient:
    """Return a client of FedGiA that tells one label of `dataset` from the others."""
    inputs, labels = train_loader.dataset.tensors
    loss = of.Logistic(inputs, labels == 0)
    return of.FedGiALinearClient(context, loss, loss, state_dir=state_dir)


def with_heads(client_class: Any) -> Callable[..., NumPyClient]:
    """Return what builds the clients of a method whose models have two heads, of plain models."""

    def client(context: Context, model: nn.Module, *args: Any, **kwargs: Any) -> NumPyClient:
        made: NumPyClient = client_class(context, two_headed(client_class, model), *args, **kwargs)
        return made

    return client


def two_headed(client_class: Any, model: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made: nn.Module = client_class.heads.of(model)
    return made


def case(strategy: Any, name: str = "", **how: Any) -> Case:
    """Return the case of a method, by default under its name and with the client of that name."""
    kind = getattr(strategy, "func", strategy)
    client: Any = getattr(of, f"{kind.method or 'SGD'}Client")
    own: dict[str, Any] = {"client_class": client}
    if hasattr(client, "heads"):
        own = {
            "client_class": with_heads(client),
            "initial_arrays": lambda: ArrayRecord(two_headed(client, make_model()).state_dict()),
            "two_heads": client,
        }
    elif issubclass(client, RatingsClient):
        own = {
            "client_class": partial(contract_client, kind=client),
            "initial_arrays": partial(library.initial_item_factors, 3, NUM_ITEMS),
        }
    return Case(name or kind.__name__, strategy, **own | how)


# --- The cases ------------------------------------------------------------------------------------

admm = partial(case, admm=True)
form = partial(case, admm=True, variant=True)
baseline = partial(case, variant=True)
keeping = partial(case, keeps=True, variant=True)

SCAD, STEPS = SmoothedSCAD(0.5), {"lr": 0.2, "local_epochs": 1}
PATH = library.LambdaPath([0.0, 0.2, 0.5], min_rounds=1, max_rounds=2)
ONE_EPOCH = {"lr": 0.5, "local_epochs": 1}
FEW_STEPS = {"local_rounds": 2, "inner_steps": 2, "everyone_trains": False}
REGULARIZER = SquaredL2(0.1)

fpfc, fedadmm, fedmc = library.FPFC, library.FedADMM, library.FedMCADMM
fedapm = partial(library.FedAPM, rho=0.1, **ONE_EPOCH)
flame = partial(library.FLAME, lam=1.0, rho=0.2, **ONE_EPOCH)
lp_proj = partial(library.LpProjADMM, lam=1.0, rho=0.2, lr=0.5, dimension=3)

CASES = [
    admm(partial(fpfc, SCAD, **STEPS)),
    admm(partial(fedadmm, **ONE_EPOCH)),
    admm(partial(fedmc, REGULARIZER), "FedMC-ADMM", keeps=True),
    admm(
        partial(library.FedGiA, hessian="gram"),
        "FedGiA-gram",
        client_class=fedgia_linear_client,
        initial_arrays=lambda: ArrayRecord({"x": Array(np.zeros(3))}),
        keeps=True,
        shakes_hands=True,
    ),
    # Slow from here on: they share most of their code with one of those above.
    form(partial(fpfc, SCAD, clustered="^head", **STEPS), "FPFC-head"),
    form(partial(fpfc, **STEPS), "FPFC-auto"),
    form(partial(fpfc, PATH, **STEPS), "FPFC-path"),
    form(partial(fedapm, "^head", personal_epochs=1), keeps=True),
    form(partial(fedadmm, published=True, rho=0.1, **ONE_EPOCH), "FedADMM-published"),
    form(
        partial(fedadmm, weights="size", duals="client", **ONE_EPOCH),
        "FedADMM-client-duals",
        keeps=True,
        shakes_hands=True,
    ),
    form(partial(fedapm, "^body", duals="client"), "FedAPM-client-duals", keeps=True),
    form(flame),
    form(
        partial(flame, weights="size", duals="client"),
        "FLAME-client-duals",
        keeps=True,
        shakes_hands=True,
    ),
    form(lp_proj, keeps=True),
    form(
        partial(fedmc, REGULARIZER, published=True, inner_steps=2),
        "FedMC-ADMM-published",
        keeps=True,
    ),
    form(
        partial(fedmc, REGULARIZER, feedback="implicit", duals="client"),
        "FedMC-ADMM-client-duals",
        keeps=True,
    ),
    form(partial(library.FedGiA, t=0.5, local_steps=3), shakes_hands=True),
    baseline(partial(library.FedAvg, lr=0.5)),
    baseline(partial(library.FedAvgFT, lr=0.5)),
    baseline(partial(library.FedProx, mu=0.5, lr=0.5)),
    keeping(partial(library.FedDyn, alpha=0.1, **ONE_EPOCH)),
    keeping(partial(library.SCAFFOLD, lr=0.5, global_lr=0.9)),
    baseline(partial(library.LocalSGD, lr=0.5, local_steps=3)),
    baseline(partial(library.PerFedAvg, mode="hf", alpha=0.2, lr=0.5, local_steps=2)),
    keeping(partial(library.Ditto, lam=0.5, lr=0.5, weights="size")),
    keeping(partial(library.PFedMe, lam=2.0, lr=0.2, outer_lr=0.3, **FEW_STEPS)),
    baseline(partial(library.PFedMeMatched, lam=1.0, lr=0.3, outer_lr=0.5)),
    keeping(partial(library.FedALA, sample=0.5, lr=0.5)),
    keeping(partial(library.FedAlt, "^head", lr=0.5)),
    keeping(partial(library.FedSim, "^head", lr=0.5, weights="uniform")),
    keeping(partial(library.FedRoD, lr=0.5)),
    keeping(partial(library.FedCP, lam=1.0, lr=0.5)),
    keeping(partial(library.LGFedAvg, "^body", lr=0.5)),
    keeping(partial(library.LpProj, lam=1.0, lr=0.3, dimension=3, **FEW_STEPS)),
    keeping(partial(library.Local, lr=0.5), server_learns=False),
    baseline(partial(library.IFCA, 2, lr=0.5)),
    baseline(partial(library.CFL, 9.0, 0.0, lr=0.5, warmup_rounds=1)),
    baseline(
        partial(library.PACFL, 20.0, lr=0.5, num_vectors=1, per_class=True, measure="entrywise"),
        shakes_hands=True,
    ),
    keeping(
        partial(library.FedMAvg, REGULARIZER, user_steps=2, item_steps=2), everybody_trains=True
    ),
    keeping(partial(library.FedMGS, REGULARIZER, user_steps=2), shakes_hands=True),
    keeping(partial(library.FedALS, REGULARIZER)),
    baseline(
        partial(library.FedEASE, lam=2.0),
        initial_arrays=partial(library.initial_item_weights, NUM_ITEMS),
        uploads_once=True,
    ),
]

ASYNC = form(partial(library.AsyncFPFC, SCAD, delay=library.RandomDelay(20.0), **STEPS))
"""Every reply is a round here, so it keeps those promises that speak of no rounds."""

AT_ANY_PACE = [*CASES, ASYNC]


def case_of(name: str) -> Case:
    return next(case for case in AT_ANY_PACE if case.name == name)


CHEAP = Case(
    "Mean",
    Mean,
    Adding,
    lambda: ArrayRecord(
        {"w": Array(np.ones((2, 3), np.float32)), "b": Array(np.ones(3, np.float32))}
    ),
)
"""For the promises of the runtime and the engines, which no method can keep or break."""

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

NUM_CLIENTS = 6

State = dict[str, NDArray[Any]]


def grid_of(
    case: Case,
    nodes: Any = NUM_CLIENTS,
    online: Any = None,
    *,
    raises: Raises | None = None,
    app_options: dict[str, Any] | None = None,
    **options: Any,
) -> Federation:
    """Return a federation of the case's clients, by default one on each of six nodes.

    `app_options` are those of `client_app`, the others those of `Federation`.
    """
    app = client_app(client_fn_of(case.client_class, raises), **app_options or {})
    return Federation(app, nodes, online, **options)


def run(
    case: Case, grid: Grid, num_rounds: int = 3, strategy: StatefulStrategy | None = None
) -> StatefulStrategy:
    strategy = strategy or case.strategy(seed=1)
    strategy.start(grid, case.initial_arrays(), num_rounds)
    return strategy


def sampling(case: Case, **changes: Any) -> StatefulStrategy:
    """Return a strategy that trains three of six clients and evaluates two."""
    settings = {"fraction_train": 0.5, "fraction_evaluate": 0.34, "seed": 1}
    return case.strategy(**settings | changes)


@cache
def plain(case: Case) -> tuple[StatefulStrategy, Federation]:
    """Return a run of three rounds of `sampling`, which many tests compare with; only to read."""
    grid = grid_of(case)
    return run(case, grid, strategy=sampling(case)), grid
