"""Cases with many numbers, for the tests that count bytes.

Each takes a case and a width, about a seventh of the numbers in the model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import FedGiAClient
from fl_admm_strategies import initial_item_factors, initial_item_weights
from tests.support.federation import NUM_CLASSES

if TYPE_CHECKING:
    from tests.support.cases import Case


class Faint(nn.Module):
    """tanh, so weak that the step sizes of the small model suit a wide one as well."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.tanh() / inputs.shape[1] ** 0.5


def of_a_wide_model(case: Case, width: int) -> Case:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        body, head = nn.Linear(3, width), nn.Linear(width, NUM_CLASSES)
    model = nn.Sequential(OrderedDict(body=body, bend=Faint(), head=head))

    def client(context: Context, _: Any, *args: Any, **kwargs: Any) -> NumPyClient:
        return case.client_class(context, copy.deepcopy(model), *args, **kwargs)

    arrays = ArrayRecord(model.state_dict())
    return replace(case, client_class=client, initial_arrays=lambda: arrays)


def of_many_projections(case: Case, width: int) -> Case:
    wide = of_a_wide_model(case, width // 10)
    return replace(wide, strategy=partial(case.strategy, dimension=width // 2))


def of_many_items(case: Case, width: int) -> Case:
    client = partial(case.client_class, num_items=width)
    return replace(
        case, client_class=client, initial_arrays=partial(initial_item_factors, 3, width)
    )


def of_many_pairs(case: Case, width: int) -> Case:
    items = int(width**0.5) + 7
    client = partial(case.client_class, num_items=items)
    return replace(case, client_class=client, initial_arrays=partial(initial_item_weights, items))


def of_wide_samples(case: Case, width: int) -> Case:
    def client(context: Context, model: Any, loader: Any, *args: Any, **more: Any) -> NumPyClient:
        inputs, labels = loader.dataset[:2]
        wide = DataLoader(TensorDataset(inputs.repeat(1, width), labels))
        return case.client_class(context, model, wide, *args, **more)

    arrays = ArrayRecord({"x": Array(np.zeros(3 * width))})
    return replace(case, client_class=client, initial_arrays=lambda: arrays)


class OfKnownCurvature(FedGiAClient):
    def measure_curvature(self, asked: Any, config: Any) -> float:
        return 2.0  # to estimate it takes long


def of_a_known_curvature(case: Case, width: int) -> Case:
    return of_a_wide_model(replace(case, client_class=OfKnownCurvature), width)
