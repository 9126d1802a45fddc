"""Clients of two linear regressions, for the tests of what finds groups."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor, nn

from clients import FPFCClient, client_app

SLOPES = torch.tensor([[2.0, 0.0, 1.0], [-1.0, 1.5, 0.0]])

Samples = tuple[Tensor, Tensor]


def model(features: int = 3) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)  # the other notes down the stack, for long
        return nn.Linear(features, 1)


def arrays() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def samples(client: int, slopes: Tensor, count: int, noise: float) -> Samples:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(count, 3, generator=generator)
    return inputs, (inputs @ slopes + noise * torch.randn(count, generator=generator))[:, None]


def client_of(
    context: Context,
    batch: Samples,
    kind: type[FPFCClient] = FPFCClient,
    net: nn.Module | None = None,
    **options: Any,
) -> FPFCClient:
    options = {"test_loader": [batch], "full_batch": True, **options}
    loss = nn.functional.mse_loss
    return kind(context, net or model(), [batch], loss, **options)


def app_of(data: Any, kinds: dict[int, type[FPFCClient]] | None = None, **options: Any) -> Any:
    """Return the app of clients with ``data(client)``, of their own class where one is named."""

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        kind = (kinds or {}).get(client, FPFCClient)
        return client_of(context, data(client), kind, **options).to_client()

    return client_app(client_fn)
