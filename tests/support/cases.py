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

import clients as of
import fl_admm_strategies as library
from clients import client_app
from fl_admm_strategies import SmoothedSCAD, SquaredL2, StatefulStrategy
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
    two_heads : type, optional
        The client whose models have two heads; then `client_class` makes them of plain models.
    sends_changes : bool
        Whether uploads are changes of what was sent, of buffers as well.
    counts_once : bool
        Whether a client uploads in its first round only.
    variant : bool
        Whether its tests are slow ones: it is another setting of a strategy that is among the
        others, or one that shares most of its code with one that is (FedADMM, FLAME and
        Lp-Proj with FedAPM, FedALS with FedMC-ADMM, Ditto, Local and pFedMe with FedAvg, which
        has nothing that FPFC and FedAPM have not).
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
    two_heads: Any = None
    sends_changes: bool = False
    counts_once: bool = False
    variant: bool = False

    @property
    def takes_any_model(self) -> bool:
        """Whether the clients' models may be any: the table of models is for these cases."""
        return self.initial_arrays is initial_arrays or self.two_heads is not None

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the model that the clients make of a plain one."""
        return model if self.two_heads is None else two_headed(self.two_heads, model)


def fedgia(fraction_train: float = 1.0, **settings: Any) -> Any:
    """Return FedGiA, in which everybody trains: it takes no `fraction_train`."""
    return library.FedGiA(**settings)


def fedgia_linear_client(
    context: Context,
    model: Any,
    train_loader: Any,
    *args: Any,
    state_dir: Any = None,
    **kwargs: Any,
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


def initial_arrays_of(client_class: Any) -> ArrayRecord:
    return ArrayRecord(two_headed(client_class, make_model()).state_dict())


FIRST_FACTORS = partial(library.initial_item_factors, 3, NUM_ITEMS)

variant = partial(Case, variant=True)
keeping = partial(Case, fedavg_clients=False, stateless_clients=False)
"""What its clients keep is nowhere else."""
keeping_variant = partial(keeping, variant=True)
completion = partial(keeping, initial_arrays=FIRST_FACTORS, enlarged=large.of_many_items)

SCAD, STEPS = SmoothedSCAD(0.5), {"lr": 0.2, "local_epochs": 1}
PATH = library.LambdaPath([0.0, 0.2, 0.5], min_rounds=1, max_rounds=2)
FEW_STEPS = {"local_rounds": 2, "inner_steps": 2, "everyone_trains": False}

# The first of each family; then, slow, what shares most of its code with one of them.
CASES = [
    Case("FPFC", partial(library.FPFC, SCAD, **STEPS), of.FPFCClient, view=views.PAIRS),
    keeping(
        "FedAPM",
        partial(library.FedAPM, "^head", rho=0.1, lr=0.5, local_epochs=1, personal_epochs=1),
        of.FedAPMClient,
        view=views.CONSENSUS_OF_PARTICIPANTS,
    ),
    Case(
        "FLAME",
        partial(library.FLAME, lam=1.0, rho=0.2, lr=0.5, local_epochs=1),
        of.FLAMEClient,
        view=views.MOREAU,
        variant=True,
    ),
    completion(
        "FedMC-ADMM",
        partial(library.FedMCADMM, SquaredL2(0.1)),
        contract_client,
        view=views.CONSENSUS_OF_PARTICIPANTS,
    ),
    completion(
        "FedMC-ADMM-linear",
        partial(library.FedMCADMM, SquaredL2(0.1), solve="linear", inner_steps=2),
        contract_client,
        view=views.CONSENSUS,
        variant=True,
    ),
    completion(
        "FedMC-ADMM-implicit-client-duals",
        partial(library.FedMCADMM, SquaredL2(0.1), feedback="implicit", duals="client"),
        contract_client,
        view=views.FACTORS_ON_CLIENTS,
        variant=True,
    ),
    completion(
        "FedMC-ADMM-exact-rated",
        partial(library.FedMCADMM, SquaredL2(0.1), rows="rated"),
        contract_client,
        stateless_clients=True,
        shakes_hands=True,
        view=views.RATED,
        variant=True,
    ),
    keeping(
        "FedGiA-gram",
        partial(fedgia, hessian="gram"),
        fedgia_linear_client,
        lambda: ArrayRecord({"x": Array(np.zeros(3))}),
        everybody_trains=True,
        shakes_hands=True,
        view=views.MESSAGES,
        enlarged=large.of_wide_samples,
    ),
    variant("FedAvg", partial(library.FedAvg, lr=0.5), of.SGDClient),
    keeping_variant(
        "Ditto", partial(library.Ditto, lam=0.5, lr=0.5, weights="size"), of.DittoClient
    ),
    variant(
        "FPFC-l1", partial(library.FPFC, library.L1(0.05), **STEPS), of.FPFCClient, view=views.PAIRS
    ),
    variant(
        "FPFC-head",
        partial(library.FPFC, SCAD, clustered="^head", **STEPS),
        of.FPFCClient,
        view=views.PAIRS,
    ),
    variant(
        "FPFC-auto",
        partial(library.FPFC, **STEPS),
        of.FPFCClient,
        fedavg_clients=False,
        view=views.PAIRS,
    ),
    variant(
        "FPFC-path",
        partial(library.FPFC, PATH, **STEPS),
        of.FPFCClient,
        fedavg_clients=False,
        shakes_hands=True,
        view=views.PAIRS,
    ),
    variant(
        "FedADMM",
        partial(library.FedADMM, lr=0.5, local_epochs=1),
        of.FedADMMClient,
        view=views.CONSENSUS_OF_PARTICIPANTS,
    ),
    variant(
        "FedADMM-published",
        partial(library.FedADMM, published=True, rho=0.1, lr=0.5, local_epochs=1),
        of.FedADMMClient,
        view=views.CONSENSUS,
    ),
    keeping_variant(
        "FedADMM-published-client-duals",
        partial(library.FedADMM, published=True, rho=0.1, lr=0.5, local_epochs=1, duals="client"),
        of.FedADMMClient,
        view=views.CONSENSUS_ON_CLIENTS,
    ),
    keeping_variant(
        "FedADMM-client-duals",
        partial(library.FedADMM, lr=0.5, local_epochs=1, weights="size", duals="client"),
        of.FedADMMClient,
        shakes_hands=True,
        view=views.CONSENSUS_ON_CLIENTS,
    ),
    keeping_variant(
        "FedAPM-client-duals",
        partial(
            library.FedAPM,
            "^body",
            rho=0.1,
            lr=0.5,
            tolerance=1e-3,
            duals="client",
            start_at="global",
            averaging="all",
        ),
        of.FedAPMClient,
        view=views.CONSENSUS_ON_CLIENTS,
    ),
    keeping_variant(
        "FLAME-client-duals",
        partial(
            library.FLAME, rho=0.2, lr=0.3, theta_step="accuracy", weights="size", duals="client"
        ),
        of.FLAMEClient,
        shakes_hands=True,
        view=views.MOREAU_ON_CLIENTS,
    ),
    keeping_variant(
        "LpProjADMM",
        partial(library.LpProjADMM, lam=1.0, rho=0.2, lr=0.5, dimension=3),
        of.LpProjADMMClient,
        view=views.PROJECTIONS,
        enlarged=large.of_many_projections,
        small_messages=True,
    ),
    completion(
        "FedMC-ADMM-client-duals",
        partial(
            library.FedMCADMM,
            library.L1Norm(0.1),
            solve="linear",
            inner_steps=2,
            y0="handshake",
            duals="client",
        ),
        contract_client,
        shakes_hands=True,
        view=views.FACTORS_ON_CLIENTS,
        variant=True,
    ),
    completion(
        "FedMC-ADMM-rated",
        partial(library.FedMCADMM, SquaredL2(0.1), solve="linear", inner_steps=2, rows="rated"),
        contract_client,
        shakes_hands=True,
        view=views.RATED,
        variant=True,
    ),
    completion(
        "FedMAvg",
        partial(library.FedMAvg, SquaredL2(0.1), user_steps=2, item_steps=2),
        partial(contract_client, kind=of.FedMAvgClient),
        everybody_trains=True,
        variant=True,
    ),
    completion(
        "FedMGS",
        partial(library.FedMGS, SquaredL2(0.1), user_steps=2),
        partial(contract_client, kind=of.FedMGSClient),
        shakes_hands=True,
        view=views.GRADIENTS,
        variant=True,
    ),
    completion(
        "FedALS",
        partial(library.FedALS, SquaredL2(0.1)),
        partial(contract_client, kind=of.FedALSClient),
        view=views.EQUATIONS,
        variant=True,
    ),
    completion(
        "FedALS-implicit",
        partial(library.FedALS, SquaredL2(0.1), feedback="implicit"),
        partial(contract_client, kind=of.FedALSClient),
        variant=True,
    ),
    completion(
        "FedEASE",
        partial(library.FedEASE, lam=2.0),
        partial(contract_client, kind=of.FedEASEClient),
        initial_arrays=partial(library.initial_item_weights, NUM_ITEMS),
        stateless_clients=True,
        counts_once=True,
        enlarged=large.of_many_pairs,
        variant=True,
    ),
    variant(
        "FedGiA",
        partial(fedgia, t=0.5, local_steps=3),
        of.FedGiAClient,
        fedavg_clients=False,
        everybody_trains=True,
        shakes_hands=True,
        view=views.MESSAGES,
        enlarged=large.of_a_known_curvature,
    ),
    keeping_variant("FedALA", partial(library.FedALA, sample=0.5, lr=0.5), of.FedALAClient),
    keeping_variant("FedAlt", partial(library.FedAlt, "^head", lr=0.5), of.FedAltClient),
    keeping_variant(
        "FedRoD",
        partial(library.FedRoD, lr=0.5),
        with_heads(of.FedRoDClient),
        partial(initial_arrays_of, of.FedRoDClient),
        two_heads=of.FedRoDClient,
    ),
    keeping_variant(
        "FedCP",
        partial(library.FedCP, lam=1.0, lr=0.5),
        with_heads(of.FedCPClient),
        partial(initial_arrays_of, of.FedCPClient),
        two_heads=of.FedCPClient,
    ),
    keeping_variant(
        "FedSim", partial(library.FedSim, "^head", lr=0.5, weights="uniform"), of.FedSimClient
    ),
    keeping_variant(
        "LG-FedAvg",
        partial(library.LGFedAvg, "^body", lr=0.5, score="before_aggregation"),
        of.LGFedAvgClient,
    ),
    variant("FedProx", partial(library.FedProx, mu=0.5, lr=0.5), of.FedProxClient),
    variant(
        "IFCA",
        partial(library.IFCA, 2, lr=0.5),
        of.IFCAClient,
        fedavg_clients=False,
        sends_changes=True,
    ),
    variant(
        "PACFL",
        partial(library.PACFL, 20.0, lr=0.5, num_vectors=1, per_class=True, measure="entrywise"),
        of.PACFLClient,
        fedavg_clients=False,
        shakes_hands=True,
    ),
    variant("CFL", partial(library.CFL, 9.0, 0.0, lr=0.5, warmup_rounds=1), of.CFLClient),
    keeping_variant(
        "Local",
        partial(library.Local, lr=0.5),
        of.LocalClient,
        server_learns=False,
        small_messages=True,
    ),
    variant("LocalSGD", partial(library.LocalSGD, lr=0.5, local_steps=3), of.LocalSGDClient),
    keeping_variant(
        "PFedMe",
        partial(library.PFedMe, lam=2.0, lr=0.2, outer_lr=0.3, **FEW_STEPS),
        of.PFedMeClient,
        memory_for_tests=True,
    ),
    keeping_variant(
        "PFedMeMatched",
        partial(library.PFedMeMatched, lam=1.0, lr=0.3, outer_lr=0.5),
        of.PFedMeMatchedClient,
        view=views.LOCAL_COPIES,
    ),
    keeping_variant(
        "FedDyn",
        partial(library.FedDyn, alpha=0.1, lr=0.5, local_epochs=1),
        of.FedDynClient,
        view=views.GRADIENTS_ON_CLIENTS,
    ),
    keeping_variant(
        "SCAFFOLD",
        partial(library.SCAFFOLD, lr=0.5, global_lr=0.9),
        of.SCAFFOLDClient,
        view=views.CONTROLS,
    ),
    keeping_variant(
        "LpProj",
        partial(library.LpProj, lam=1.0, lr=0.3, dimension=3, **FEW_STEPS),
        of.LpProjClient,
        enlarged=large.of_many_projections,
        small_messages=True,
    ),
    variant(
        "PerFedAvg",
        partial(library.PerFedAvg, mode="hf", alpha=0.2, lr=0.5, local_steps=2),
        of.PerFedAvgClient,
    ),
]


ASYNC = variant(
    "AsyncFPFC",
    partial(library.AsyncFPFC, SCAD, delay=library.RandomDelay(20.0), **STEPS),
    of.FPFCClient,
    view=views.PAIRS,
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
