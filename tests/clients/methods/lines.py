"""One sample and a line through it: what the plain clients are tested with by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from clients import TorchClient
from fl_admm_strategies.maths.blocks import Arrays
from tests.support.federation import make_model


class Line(nn.Module):
    """w x + b and a counter, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w * inputs + self.b


class Noisy(nn.Module):
    """The small network with dropout, whose masks come from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.drop(inputs))


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


def matrix(rows: int, columns: int) -> NDArray[np.float64]:
    return np.random.default_rng(rows).normal(size=(rows, columns))


def labels(rows: int) -> NDArray[np.float64]:
    return np.random.default_rng(rows).integers(0, 2, rows).astype(float)


def new_context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def sample(x: float, y: float) -> tuple[Tensor, Tensor]:
    """Return a batch of one sample."""
    return torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)


def numbers(arrays: Arrays) -> list[float]:
    """Return arrays of one number each as numbers."""
    return [float(array.item()) for array in arrays.values()]


def line_client(
    client_class: type[TorchClient[Any]],
    context: Context | None = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    """Return a client with one sample, x = 1 and y = 4: f = (w + b - 4)^2 / 2."""
    batch = sample(1.0, 4.0)
    usual = {"test_loader": [batch], "full_batch": True, "train_loader": [batch]}
    return client_class(
        context or new_context(), model or Line(), loss_fn=half_square, **usual | settings
    )
