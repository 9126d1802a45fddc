"""The strategies that every promise is tested with. A strategy joins with one `Case`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from numpy.typing import NDArray

from clients import (
    DittoClient,
    FedADMMClient,
    FedAPMClient,
    FedGiAClient,
    FedGiALinearClient,
    FedProxClient,
    FLAMEClient,
    FPFCClient,
    LocalClient,
    Logistic,
    LpProjADMMClient,
    client_app,
)
from fl_admm_strategies import (
    FLAME,
    FPFC,
    L1,
    Ditto,
    FedADMM,
    FedAPM,
    FedGiA,
    FedMCADMM,
    FedProx,
    L1Norm,
    Local,
    LpProjADMM,
    SmoothedSCAD,
    SquaredL2,
    StatefulStrategy,
    initial_item_factors,
)
from tests.support import large, views
from tests.support.federation import Adding, Mean, WatchedGrid, client_fn_of, initial_arrays
from tests.support.ratings import NUM_ITEMS, contract_client
from tests.support.views import View


@dataclass(frozen=True)
class Case:
    """A strategy, its client and the model they start from, and in what the strategies differ.

    Attributes
    ----------
    name : str
    strategy : callable
        Takes the keyword arguments of `SampledStrategy`.
    client_class : callable
        Takes those of `TorchClient`.
    initial_arrays : callable
    fedavg_clients : bool
        Whether a client that knows nothing of the library will do.
    stateless_clients : bool
        Whether the server can make up for what a client lost.
    everybody_trains : bool
        In every round.
    server_learns : bool
        Whether replies change the state of the server.
    shakes_hands : bool
        Whether all clients are asked something before round 1.
    view : View
        Where the state has what clients uploaded.
    enlarged : callable
        ``enlarged(case, width)``: the same with many numbers.
    small_messages : bool
        Whether its messages are small however large the model.
    variant : bool
        Whether its tests are slow ones: it is another setting of a strategy that is among the
        others, or one that shares most of its code with one that is (FedADMM with FedAPM, Lp-Proj
        with FLAME, Local with Ditto).
    """

    name: str
    strategy: Callable[..., StatefulStrategy]
    client_class: Callable[..., NumPyClient]
    initial_arrays: Callable[[], ArrayRecord] = initial_arrays
    fedavg_clients: bool = True
    stateless_clients: bool = True
    everybody_trains: bool = False
    server_learns: bool = True
    shakes_hands: bool = False
    view: View = views.NOTHING
    enlarged: Callable[[Case, int], Case] = large.of_a_wide_model
    small_messages: bool = False
    variant: bool = False


def fedgia(fraction_train: float = 1.0, **settings: Any) -> FedGiA:
    """Return FedGiA, in which everybody trains: it takes no `fraction_train`."""
    return FedGiA(**settings)


def fedgia_linear_client(
    context: Context, model: Any, train_loader: Any, *args: Any, **kwargs: Any
) -> NumPyClient:
    """Return a client of FedGiA that tells one label of `dataset` from the others."""
    inputs, labels = train_loader.dataset.tensors
    loss = Logistic(inputs, labels == 0)
    return FedGiALinearClient(context, loss, loss)


CASES = [
    Case(
        "FPFC",
        partial(FPFC, SmoothedSCAD(0.5), lr=0.2, local_epochs=1),
        FPFCClient,
        view=views.PAIRS,
    ),
    Case(
        "FPFC-l1",
        partial(FPFC, L1(0.05), lr=0.2, local_epochs=1),
        FPFCClient,
        view=views.PAIRS,
        variant=True,
    ),
    Case(
        "FPFC-head",
        partial(FPFC, SmoothedSCAD(0.5), lr=0.2, local_epochs=1, clustered="^head"),
        FPFCClient,
        view=views.PAIRS,
        variant=True,
    ),
    Case(
        "FedADMM",
        partial(FedADMM, rho=0.1, lr=0.5, local_epochs=1),
        FedADMMClient,
        view=views.CONSENSUS,
        variant=True,
    ),
    Case(
        "FedADMM-client-duals",
        partial(FedADMM, rho=0.1, lr=0.5, local_epochs=1, weights="size", duals="client"),
        FedADMMClient,
        fedavg_clients=False,
        stateless_clients=False,
        shakes_hands=True,
        view=views.CONSENSUS_ON_CLIENTS,
        variant=True,
    ),
    Case(
        "FedAPM",
        partial(FedAPM, "^head", rho=0.1, lr=0.5, local_epochs=1, personal_epochs=1),
        FedAPMClient,
        fedavg_clients=False,
        stateless_clients=False,
        view=views.CONSENSUS,
    ),
    Case(
        "FedAPM-client-duals",
        partial(FedAPM, "^body", rho=0.1, lr=0.5, tolerance=1e-3, duals="client", u_start="server"),
        FedAPMClient,
        fedavg_clients=False,
        stateless_clients=False,
        view=views.CONSENSUS_ON_CLIENTS,
        variant=True,
    ),
    Case(
        "FLAME",
        partial(FLAME, lam=1.0, rho=0.2, lr=0.5, local_epochs=1),
        FLAMEClient,
        view=views.MOREAU,
    ),
    Case(
        "FLAME-client-duals",
        partial(FLAME, rho=0.2, lr=0.3, theta_step="accuracy", weights="size", duals="client"),
        FLAMEClient,
        fedavg_clients=False,
        stateless_clients=False,
        shakes_hands=True,
        view=views.MOREAU_ON_CLIENTS,
        variant=True,
    ),
    Case(
        "LpProjADMM",
        partial(LpProjADMM, lam=1.0, rho=0.2, lr=0.5, dimension=3),
        LpProjADMMClient,
        fedavg_clients=False,
        stateless_clients=False,
        view=views.PROJECTIONS,
        enlarged=large.of_many_projections,
        small_messages=True,
        variant=True,
    ),
    Case(
        "FedMC-ADMM",
        partial(FedMCADMM, SquaredL2(0.1), inner_steps=2),
        contract_client,
        partial(initial_item_factors, 3, NUM_ITEMS),
        fedavg_clients=False,
        stateless_clients=False,
        view=views.CONSENSUS,
        enlarged=large.of_many_items,
    ),
    Case(
        "FedMC-ADMM-client-duals",
        partial(FedMCADMM, L1Norm(0.1), inner_steps=2, y0="handshake", duals="client"),
        contract_client,
        partial(initial_item_factors, 3, NUM_ITEMS),
        fedavg_clients=False,
        stateless_clients=False,
        shakes_hands=True,
        view=views.FACTORS_ON_CLIENTS,
        enlarged=large.of_many_items,
        variant=True,
    ),
    Case(
        "FedGiA",
        partial(fedgia, t=0.5, local_steps=3),
        FedGiAClient,
        fedavg_clients=False,
        everybody_trains=True,
        shakes_hands=True,
        view=views.MESSAGES,
        enlarged=large.of_a_known_curvature,
        variant=True,
    ),
    Case(
        "FedGiA-client-duals",
        partial(fedgia, t=0.5, curvature=2.0, duals="client"),
        FedGiAClient,
        stateless_clients=False,
        everybody_trains=True,
        view=views.MESSAGES,
        variant=True,
    ),
    Case(
        "FedGiA-gram",
        partial(fedgia, hessian="gram", report_gradient=True),
        fedgia_linear_client,
        lambda: ArrayRecord({"x": Array(np.zeros(3))}),
        fedavg_clients=False,
        everybody_trains=True,
        shakes_hands=True,
        view=views.MESSAGES,
        enlarged=large.of_wide_samples,
    ),
    Case("FedProx", partial(FedProx, mu=0.5, lr=0.5), FedProxClient),
    Case(
        "Ditto",
        partial(Ditto, lam=0.5, lr=0.5, weights="size"),
        DittoClient,
        fedavg_clients=False,
        stateless_clients=False,
    ),
    Case(
        "Local",
        partial(Local, lr=0.5),
        LocalClient,
        fedavg_clients=False,
        stateless_clients=False,
        server_learns=False,
        small_messages=True,
        variant=True,
    ),
]


def case_of(name: str) -> Case:
    """Return the case of a name."""
    return next(case for case in CASES if case.name == name)


CHEAP = Case(
    "Mean",
    Mean,
    Adding,
    lambda: ArrayRecord(
        {"w": Array(np.ones((2, 3), np.float32)), "b": Array(np.ones(3, np.float32))}
    ),
)
"""For the promises of the runtime and the engines, which no algorithm can keep or break."""

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

NUM_CLIENTS = 6

State = dict[str, NDArray[Any]]


def grid_of(case: Case, **kwargs: Any) -> WatchedGrid:
    """Return a grid with one client of the case on each of its nodes."""
    return WatchedGrid(client_app(client_fn_of(case.client_class)), NUM_CLIENTS, **kwargs)


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
def plain(case: Case) -> tuple[StatefulStrategy, WatchedGrid]:
    """Return a run of three rounds of `sampling`, which many tests compare with; only to read."""
    grid = grid_of(case)
    return run(case, grid, strategy=sampling(case)), grid
