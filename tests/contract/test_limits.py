"""With some settings a method is FedAvg: the same clients, batches and weights, the same bits.

Data are shuffled, of uneven sizes; half of the clients train in a round, three local epochs.
Flower's own FedAvg: see test_fedavg.py. FedADMM has no such limit: as rho goes to 0 its server adds
up all past moves (P9 of its notes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from torch import nn

import clients as of
import fl_admm_strategies as library
from clients import Minibatches, TwoHeaded, client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from fl_admm_strategies.maths.blocks import Arrays
from tests.support.federation import assert_same_bits, make_model
from tests.support.pace import fast

NUM_CLIENTS, ROUNDS = 9, 3


def with_dropout() -> nn.Module:
    body, bend, head = make_model().children()
    return nn.Sequential(body, bend, nn.Dropout(0.3), head)


def end_of(
    strategy: StatefulStrategy,
    client_class: Callable[..., NumPyClient],
    model: Callable[[], nn.Module] = make_model,
) -> Arrays:
    """Return the one model of all after some rounds."""

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        generator = torch.Generator().manual_seed(client)
        inputs = torch.randn(13 + 11 * client, 3, generator=generator)
        loader = Minibatches(inputs, (inputs.argmax(dim=1) + client) % 3, 8)
        return client_class(context, model(), loader, nn.CrossEntropyLoss()).to_client()

    with InProcessGrid(client_app(client_fn, num_clients=NUM_CLIENTS), 1) as grid:
        strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=ROUNDS)
    models = strategy.models()
    return dict(models.clusters[1] if models.global_ is None else models.global_)


def setting(name: str, *args: Any, **settings: Any) -> StatefulStrategy:
    base = {"lr": 0.1, "local_epochs": 3, "seed": 3, "fraction_train": 0.5, "fraction_evaluate": 0}
    made: StatefulStrategy = getattr(library, name)(*args, **base | settings)
    return made


@cache
def fedavg(model: Callable[[], nn.Module] = make_model) -> Arrays:
    """Return FedAvg's model; only to read."""
    return end_of(setting("FedAvg"), of.SGDClient, model)


LIMITS: dict[str, tuple[Callable[[], StatefulStrategy], Callable[..., NumPyClient]]] = {
    "FedProx, mu = 0": (lambda: setting("FedProx", mu=0.0), of.FedProxClient),
    "FedALA, no layers": (lambda: setting("FedALA", layers=0), of.FedALAClient),
    "CFL, eps1 = 0": (lambda: setting("CFL", 0.0, 1.0, weights="size"), of.CFLClient),
    "PACFL, 90 degrees": (lambda: setting("PACFL", 90.0), of.PACFLClient),
    "IFCA of one": (lambda: setting("IFCA", 1, weights="size"), of.IFCAClient),
    "FedAvgFT's global model": (lambda: setting("FedAvgFT"), of.FedAvgFTClient),
    # The personal step comes second and changes nothing of the first.
    "Ditto's global model": (lambda: setting("Ditto", weights="size"), of.DittoClient),
    "FedAlt, nothing personal": (lambda: setting("FedAlt", None), of.FedAltClient),
    "FedSim, nothing personal": (lambda: setting("FedSim", None), of.FedSimClient),
    "LG-FedAvg, nothing local": (lambda: setting("LGFedAvg", None), of.LGFedAvgClient),
}


@pytest.mark.parametrize(
    "model", [make_model, pytest.param(with_dropout, marks=pytest.mark.slow)], ids=["plain", "drop"]
)
@pytest.mark.parametrize("name", fast(["IFCA of one", "Ditto's global model"], LIMITS))
def test_a_limit_is_fedavg(name: str, model: Callable[[], nn.Module]) -> None:
    strategy, client_class = LIMITS[name]
    values = end_of(strategy(), client_class, model).values()  # IFCA's models are numbered
    assert_same_bits(dict(zip(fedavg(model), values, strict=True)), fedavg(model))


def test_fedrods_generic_model_without_its_prior_is_fedavgs() -> None:
    generic = end_of(
        setting("FedRoD", gamma=0.0), of.FedRoDClient, lambda: TwoHeaded.of(make_model())
    )
    values = [array for name, array in generic.items() if not name.startswith("personal_head")]
    assert_same_bits(dict(zip(fedavg(), values, strict=True)), fedavg())
