"""The three clients of docs/methods: f_i(w) = a_i/2 (w - b_i)^2 with one parameter, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray
from torch import Tensor, nn

from clients import TorchClient, client_app
from fl_admm_strategies import StatefulStrategy
from tests.support.federation import WatchedGrid, node_of

A, B, N = (1.0, 2.0, 4.0), (1.0, -1.0, 3.0), (10, 20, 30)


class Scalar(nn.Module):
    """A model whose output is its one parameter, w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs))


class Counting(Scalar):
    """Scalar with a float and an integer buffer, as batch norm has: `seen` and `steps`."""

    seen: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += len(inputs)
            self.steps += 1
        return super().forward(inputs)


def zero(model: type[Scalar] = Scalar) -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def make_client(
    client_class: type[TorchClient[Any]], context: Context, model: type[Scalar] = Scalar
) -> Any:
    """Return the client of a context's partition, with n_i samples that are all b_i."""
    i = int(context.node_config["partition-id"])
    batch = (torch.zeros(N[i]), torch.full((N[i],), B[i], dtype=torch.float64))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return A[i] / 2 * ((outputs - targets) ** 2).mean()

    return client_class(context, model(), [batch], loss_fn, test_loader=[batch], full_batch=True)


def grid_of(client_class: type[TorchClient[Any]], model: type[Scalar] = Scalar) -> WatchedGrid:
    def client_fn(context: Context) -> Any:
        return make_client(client_class, context, model).to_client()

    return WatchedGrid(client_app(client_fn), len(A))


def scripted(strategy: StatefulStrategy, *rounds: Sequence[int]) -> None:
    """Let these clients train in the rounds, in place of a draw."""
    script = iter(rounds)
    strategy.run.sampling.for_training = lambda pool: list(next(script))  # type: ignore[method-assign]


def own(
    client_class: type[TorchClient[Any]],
    grid: WatchedGrid,
    client: int,
    model: type[Scalar] = Scalar,
) -> dict[str, NDArray[Any]]:
    """Return the model that a client keeps."""
    arrays: dict[str, NDArray[Any]] = make_client(
        client_class, grid.context(node_of(client)), model
    ).personal_arrays()
    return arrays


def follow(
    strategy: StatefulStrategy,
    client_class: type[TorchClient[Any]],
    *rounds: Sequence[int],
    initial: float = 0.0,
    read: Callable[[], Any] = lambda: None,
) -> tuple[WatchedGrid, list[Any]]:
    """Run the rounds with these participants; return the grid and what `read` says after each."""
    grid, seen = grid_of(client_class), []

    def on_round(server_round: int, metrics: Mapping[str, float]) -> None:
        seen.append(read())

    scripted(strategy, *rounds)
    first = ArrayRecord({"w": Array(np.array([initial]))})
    strategy.start(grid, first, len(rounds), on_round=on_round)
    return grid, seen
