"""FPFC without a lambda, with malicious clients: what false uploads and false reports cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from torch import nn

from clients import FPFCClient, accuracy, client_app
from fl_admm_strategies import FPFC, InProcessGrid
from simulations.attacks import Attack, AttackingClient

NUM_CLIENTS = 20
LIARS = (4, 11)
CONVENTIONS = (3, 6, 9)  # what a client calls a three, and the other way round


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.tensor(images[order] / 16).float(), torch.tensor(labels[order])


def honest(context: Context, client: int) -> FPFCClient:
    images, labels = (part[client::NUM_CLIENTS] for part in digits())
    swapped = torch.arange(10)
    swapped[[3, CONVENTIONS[client % 3]]] = torch.tensor([CONVENTIONS[client % 3], 3])
    labels = swapped[labels]
    return FPFCClient(
        context,
        nn.Linear(64, 10),
        [(images[:60], labels[:60])],
        nn.functional.cross_entropy,
        test_loader=[(images[60:], labels[60:])],
        metrics={"accuracy": accuracy},
        full_batch=True,
    )


class Lying(NumPyClient):
    """Trains honestly, and lies in every number that it reports."""

    def __init__(self, client: FPFCClient) -> None:
        self.client = client

    def fit(self, parameters: Any, config: Any) -> Any:
        upload, num_examples, metrics = self.client.fit(parameters, config)
        if config.get("handshake"):
            return upload, num_examples, metrics
        false = {
            name: 0.0 if "error" in name else 1e6 * (not name.endswith("-0"))
            for name in metrics
            if name.startswith(("held-out-loss", "loss-error", "training-loss"))
        }
        norms = {name: 1e9 for name in metrics if name.startswith("gradient-norm")}
        return upload, 2**53, metrics | false | norms

    def evaluate(self, parameters: Any, config: Any) -> Any:
        loss, _, metrics = self.client.evaluate(parameters, config)
        return loss, 0, metrics


def mean_accuracy(kind: str | None, count: int) -> float:
    """Return the accuracy of the honest clients' models after a run of `FPFC()`."""

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        own = honest(context, client)
        if client not in LIARS[:count] or kind is None:
            return own.to_client()
        if kind == "lie":
            return Lying(own).to_client()
        attack: Any = Attack(kind, count / NUM_CLIENTS)  # type: ignore[arg-type]
        return AttackingClient(own, attack, client).to_client()

    torch.manual_seed(0)
    strategy = FPFC(lr=0.3, fraction_train=0.5, seed=1)
    with InProcessGrid(client_app(client_fn), NUM_CLIENTS) as grid:
        model = ArrayRecord(nn.Linear(64, 10).state_dict())
        strategy.start(grid, model, 80, evaluate_every=80)
    found = strategy.evaluate_metrics[80]
    others = [client for client in range(NUM_CLIENTS) if client not in LIARS]
    return 100 * float(np.mean([found[c]["cluster-accuracy"] for c in others]))


@cache
def without_attack() -> float:
    return mean_accuracy(None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["same-value", "sign-flip", "gaussian", "lie"])
def test_one_and_two_malicious_of_twenty_cost_the_others_two_points_at_most(
    kind: str, count: int
) -> None:
    assert mean_accuracy(kind, count) > without_attack() - 2
