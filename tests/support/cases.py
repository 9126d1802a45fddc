"""The strategies that every promise is tested with. A strategy joins with one `Case`."""

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

from clients import (
    CFLClient,
    DittoClient,
    FedADMMClient,
    FedALAClient,
    FedAltClient,
    FedAPMClient,
    FedCPClient,
    FedGiAClient,
    FedGiALinearClient,
    FedMAvgClient,
    FedMGSClient,
    FedProxClient,
    FedRoDClient,
    FedSimClient,
    FLAMEClient,
    FPFCClient,
    IFCAClient,
    LGFedAvgClient,
    LocalClient,
    LocalSGDClient,
    Logistic,
    LpProjADMMClient,
    LpProjClient,
    PACFLClient,
    PerFedAvgClient,
    PFedMeClient,
    PFedMeMatchedClient,
    SGDClient,
    client_app,
)
from fl_admm_strategies import (
    CFL,
    FLAME,
    FPFC,
    IFCA,
    L1,
    PACFL,
    AsyncFPFC,
    Ditto,
    FedADMM,
    FedALA,
    FedAlt,
    FedAPM,
    FedAvg,
    FedCP,
    FedGiA,
    FedMAvg,
    FedMCADMM,
    FedMGS,
    FedProx,
    FedRoD,
    FedSim,
    L1Norm,
    LambdaPath,
    LGFedAvg,
    Local,
    LocalSGD,
    LpProj,
    LpProjADMM,
    PerFedAvg,
    PFedMe,
    PFedMeMatched,
    RandomDelay,
    SmoothedSCAD,
    SquaredL2,
    StatefulStrategy,
    initial_item_factors,
)
from tests.support import large, views
from tests.support.federation import (
    Adding,
    Mean,
    WatchedGrid,
    client_fn_of,
    initial_arrays,
    make_model,
)
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
    memory_for_tests : bool
        Whether clients keep what they evaluate, and do not train from it.
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
    names_parts : bool
        Whether the method knows parts of the clients' models by their names.
    variant : bool
        Whether its tests are slow ones: it is another setting of a strategy that is among the
        others, or one that shares most of its code with one that is (FedADMM with FedAPM, Lp-Proj
        with FLAME, Local and pFedMe with Ditto).
    """

    name: str
    strategy: Callable[..., StatefulStrategy]
    client_class: Callable[..., NumPyClient]
    initial_arrays: Callable[[], ArrayRecord] = initial_arrays
    fedavg_clients: bool = True
    stateless_clients: bool = True
    memory_for_tests: bool = False
    everybody_trains: bool = False
    server_learns: bool = True
    shakes_hands: bool = False
    view: View = views.NOTHING
    enlarged: Callable[[Case, int], Case] = large.of_a_wide_model
    small_messages: bool = False
    names_parts: bool = False
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


def initial_arrays_of(client_class: Any) -> ArrayRecord:
    return ArrayRecord(two_headed(client_class, make_model()).state_dict())


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
        "FPFC-auto",
        partial(FPFC, lr=0.2, local_epochs=1),
        FPFCClient,
        fedavg_clients=False,
        view=views.PAIRS,
        variant=True,
    ),
    Case(
        "FPFC-path",
        partial(
            FPFC, LambdaPath([0.0, 0.2, 0.5], min_rounds=1, max_rounds=2), lr=0.2, local_epochs=1
        ),
        FPFCClient,
        fedavg_clients=False,
        shakes_hands=True,
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
        "FedMC-ADMM-rated",
        partial(FedMCADMM, SquaredL2(0.1), inner_steps=2, rows="rated"),
        contract_client,
        partial(initial_item_factors, 3, NUM_ITEMS),
        fedavg_clients=False,
        stateless_clients=False,
        shakes_hands=True,
        view=views.RATED,
        enlarged=large.of_many_items,
        variant=True,
    ),
    Case(
        "FedMAvg",
        partial(FedMAvg, SquaredL2(0.1), user_steps=2, item_steps=2),
        partial(contract_client, kind=FedMAvgClient),
        partial(initial_item_factors, 3, NUM_ITEMS),
        fedavg_clients=False,
        stateless_clients=False,
        everybody_trains=True,
        enlarged=large.of_many_items,
        variant=True,
    ),
    Case(
        "FedMGS",
        partial(FedMGS, SquaredL2(0.1), user_steps=2),
        partial(contract_client, kind=FedMGSClient),
        partial(initial_item_factors, 3, NUM_ITEMS),
        fedavg_clients=False,
        stateless_clients=False,
        shakes_hands=True,
        view=views.GRADIENTS,
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
    Case(
        "FedALA",
        partial(FedALA, sample=0.5, lr=0.5),
        FedALAClient,
        fedavg_clients=False,
        stateless_clients=False,
        variant=True,
    ),
    Case(
        "FedAlt",
        partial(FedAlt, "^head", lr=0.5),
        FedAltClient,
        fedavg_clients=False,
        stateless_clients=False,
        variant=True,
    ),
    Case(
        "FedRoD",
        partial(FedRoD, lr=0.5),
        with_heads(FedRoDClient),
        partial(initial_arrays_of, FedRoDClient),
        fedavg_clients=False,
        stateless_clients=False,
        names_parts=True,
        variant=True,
    ),
    Case(
        "FedCP",
        partial(FedCP, lam=1.0, lr=0.5),
        with_heads(FedCPClient),
        partial(initial_arrays_of, FedCPClient),
        fedavg_clients=False,
        stateless_clients=False,
        names_parts=True,
        variant=True,
    ),
    Case(
        "FedSim",
        partial(FedSim, "^head", lr=0.5, weights="uniform"),
        FedSimClient,
        fedavg_clients=False,
        stateless_clients=False,
        variant=True,
    ),
    Case(
        "LG-FedAvg",
        partial(LGFedAvg, "^body", lr=0.5, score="before_aggregation"),
        LGFedAvgClient,
        fedavg_clients=False,
        stateless_clients=False,
        variant=True,
    ),
    Case("FedAvg", partial(FedAvg, lr=0.5), SGDClient),
    Case("FedProx", partial(FedProx, mu=0.5, lr=0.5), FedProxClient, variant=True),
    Case(
        "Ditto",
        partial(Ditto, lam=0.5, lr=0.5, weights="size"),
        DittoClient,
        fedavg_clients=False,
        stateless_clients=False,
    ),
    Case("IFCA", partial(IFCA, 2, lr=0.5), IFCAClient, fedavg_clients=False, variant=True),
    Case(
        "PACFL",
        partial(PACFL, 20.0, lr=0.5, num_vectors=1, per_class=True, measure="entrywise"),
        PACFLClient,
        fedavg_clients=False,
        shakes_hands=True,
        variant=True,
    ),
    Case("CFL", partial(CFL, 9.0, 0.0, lr=0.5, warmup_rounds=1), CFLClient, variant=True),
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
    Case(
        "LocalSGD",
        partial(LocalSGD, lr=0.5, local_steps=3),
        LocalSGDClient,
        variant=True,
    ),
    Case(
        "PFedMe",
        partial(
            PFedMe,
            lam=2.0,
            lr=0.2,
            outer_lr=0.3,
            local_rounds=2,
            inner_steps=2,
            everyone_trains=False,
        ),
        PFedMeClient,
        fedavg_clients=False,
        stateless_clients=False,
        memory_for_tests=True,
        variant=True,
    ),
    Case(
        "PFedMeMatched",
        partial(PFedMeMatched, lam=1.0, lr=0.3, outer_lr=0.5),
        PFedMeMatchedClient,
        fedavg_clients=False,
        stateless_clients=False,
        view=views.LOCAL_COPIES,
        variant=True,
    ),
    Case(
        "LpProj",
        partial(
            LpProj,
            lam=1.0,
            lr=0.3,
            dimension=3,
            local_rounds=2,
            inner_steps=2,
            everyone_trains=False,
        ),
        LpProjClient,
        fedavg_clients=False,
        stateless_clients=False,
        enlarged=large.of_many_projections,
        small_messages=True,
        variant=True,
    ),
    Case(
        "PerFedAvg",
        partial(PerFedAvg, mode="hf", alpha=0.2, lr=0.5, local_steps=2),
        PerFedAvgClient,
        variant=True,
    ),
]


ASYNC = Case(
    "AsyncFPFC",
    partial(AsyncFPFC, SmoothedSCAD(0.5), lr=0.2, local_epochs=1, delay=RandomDelay(20.0)),
    FPFCClient,
    view=views.PAIRS,
    variant=True,
)
"""Every reply is a round here, so it keeps those promises that speak of no rounds."""

AT_ANY_PACE = [*CASES, ASYNC]


def case_of(name: str) -> Case:
    """Return the case of a name."""
    return next(case for case in AT_ANY_PACE if case.name == name)


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
at_any_pace = pytest.mark.parametrize("case", AT_ANY_PACE, ids=lambda case: case.name)

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
