"""What equals FedAvg in a limit equals it bit for bit: same clients, batches, weights and attacks.

Data are shuffled, of uneven sizes; a part of the clients trains in a round, three local epochs.
IFCA, which uploads changes, equals it to rounding. Flower's own FedAvg: see test_fedavg.py.
FedADMM has no such limit: as rho goes to 0 its server adds up all past moves (P9 of its notes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
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
from simulations.attacks import SIGMAS, Attack, Kind, attacked_client_fn
from tests.support.federation import assert_same_bits, make_model
from tests.support.pace import fast

NUM_CLIENTS, ROUNDS, SEED, LR, EPOCHS = 9, 3, 3, 0.1, 3


def samples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(13 + 11 * client, 3, generator=generator)
    return inputs, (inputs.argmax(dim=1) + client) % 3


def with_dropout() -> nn.Module:
    body, bend, head = make_model().children()
    return nn.Sequential(body, bend, nn.Dropout(0.3), head)


def dealt(
    client_class: Callable[..., NumPyClient], model: Callable[[], nn.Module]
) -> Callable[[Context], Any]:
    def client_fn(context: Context) -> Any:
        data = samples(int(context.node_config["partition-id"]))
        loader = Minibatches(*data, 8)
        return client_class(context, model(), loader, nn.CrossEntropyLoss()).to_client()

    return client_fn


def end_of(
    strategy: StatefulStrategy,
    client_class: Callable[..., NumPyClient],
    model: Callable[[], nn.Module] = make_model,
    attack: Attack | None = None,
) -> Arrays:
    """Return the one model of all after some rounds."""
    client_fn = dealt(client_class, model)
    if attack is not None:
        client_fn = attacked_client_fn(client_fn, attack)
    with InProcessGrid(client_app(client_fn, num_clients=NUM_CLIENTS), 1) as grid:
        strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=ROUNDS)
    models = strategy.models()
    return dict(models.clusters[1] if models.global_ is None else models.global_)


def setting(name: str, *args: Any, share: float = 0.5, **settings: Any) -> StatefulStrategy:
    base = {"lr": LR, "local_epochs": EPOCHS, "seed": SEED, "fraction_train": share}
    # Without a bound of uploads, so that an attack has its effect.
    unbounded = {"max_norm": float("inf"), "fraction_evaluate": 0.0}
    made: StatefulStrategy = getattr(library, name)(*args, **base, **unbounded, **settings)
    return made


IFCA = "IFCA of one"
LIMITS: dict[str, tuple[Callable[[], StatefulStrategy], Callable[..., NumPyClient]]] = {
    "FedProx, mu = 0": (lambda: setting("FedProx", mu=0.0), of.FedProxClient),
    "FedALA, no layers": (lambda: setting("FedALA", layers=0), of.FedALAClient),
    "CFL, eps1 = 0": (lambda: setting("CFL", 0.0, 1.0, weights="size"), of.CFLClient),
    "PACFL, 90 degrees": (lambda: setting("PACFL", 90.0), of.PACFLClient),
    IFCA: (lambda: setting("IFCA", 1, weights="size"), of.IFCAClient),
    "Per-FedAvg's start, fine-tuned": (
        lambda: setting("PerFedAvg", mode="finetune", weights="size"),
        of.PerFedAvgClient,
    ),
    # The personal step comes second and changes nothing of the first.
    "Ditto's global model": (lambda: setting("Ditto", weights="size"), of.DittoClient),
    "FedAlt, nothing personal": (lambda: setting("FedAlt", None), of.FedAltClient),
    "FedSim, nothing personal": (lambda: setting("FedSim", None), of.FedSimClient),
    "LG-FedAvg, nothing local": (lambda: setting("LGFedAvg", None), of.LGFedAvgClient),
}
SOME = [IFCA, "Ditto's global model"]
"""Those of the fast tests."""


def assert_alike(name: str, found: Arrays, expected: Arrays) -> None:
    """Compare to rounding where a change was uploaded, else to the bit."""
    if name != IFCA:
        assert_same_bits(found, expected)
    for array, value in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(array, value, rtol=1e-5, atol=1e-5)


@cache
def fedavg(model: Callable[[], nn.Module] = make_model, attack: Attack | None = None) -> Arrays:
    """Return FedAvg's model; only to read."""
    return end_of(setting("FedAvg"), of.SGDClient, model, attack)


@pytest.mark.parametrize(
    "model",
    [make_model, pytest.param(with_dropout, marks=pytest.mark.slow)],
    ids=["plain", "dropout"],
)
@pytest.mark.parametrize("name", fast([*SOME, "FedALA, no layers"], LIMITS))
def test_a_limit_that_is_fedavg_has_its_bits(name: str, model: Callable[[], nn.Module]) -> None:
    strategy, client_class = LIMITS[name]
    assert_alike(name, end_of(strategy(), client_class, model), fedavg(model))


@pytest.mark.parametrize("kind", fast(["gaussian"], SIGMAS))
@pytest.mark.parametrize("name", fast(SOME, LIMITS))
def test_an_attack_means_the_same_model_in_every_method(name: str, kind: Kind) -> None:
    strategy, client_class = LIMITS[name]
    attack = Attack(kind, ratio=0.25)
    attacked = fedavg(attack=attack)
    assert abs(attacked["head.weight"] - fedavg()["head.weight"]).max() > 0.1
    assert_alike(name, end_of(strategy(), client_class, attack=attack), attacked)


def test_fedrods_generic_model_without_its_prior_is_fedavgs() -> None:
    def two_headed() -> TwoHeaded:
        return TwoHeaded.of(make_model())

    generic = end_of(setting("FedRoD", gamma=0.0), of.FedRoDClient, two_headed)
    plain = fedavg()
    values = [generic[name] for name in generic if not name.startswith("personal_head")]
    assert_same_bits(dict(zip(plain, values, strict=True)), plain)
