"""A model as named arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clients import ModelArrays, initial_arrays
from fl_admm_strategies.runtime.trust.layout import (
    ABSENT,
    BUFFER,
    CHECKSUMS,
    FROZEN,
    ROLES,
    TRAINED,
)
from tests.support.refusals import refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.head = nn.Linear(2, 2)
        self.tail = nn.Linear(2, 2)
        self.tail.weight = self.head.weight
        self.register_buffer("cache", torch.zeros(3), persistent=False)


STATISTICS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
TRAVELS = [*STATISTICS, "head.weight", "head.bias", "tail.bias"]


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel, compiled])
def test_what_travels_is_trained_or_a_buffer_and_has_no_wrappers_name(wrap: Any) -> None:
    named = ModelArrays(wrap(Net()))
    assert named.names == list(named.read()) == TRAVELS
    assert named.trained == ["head.weight", "head.bias", "tail.bias"]
    assert named.buffers == STATISTICS
    assert named.frozen == ["base.weight"]
    assert named.tied == {"tail.weight": "head.weight"}


def test_arrays_are_loaded_where_they_belong() -> None:
    net = nn.DataParallel(Net())
    named, frozen = ModelArrays(net), net.module.base.weight.clone()
    arrays = {name: np.full_like(array, 2) for name, array in named.read().items()}
    named.load(arrays)
    assert torch.equal(net.module.tail.weight, torch.full((2, 2), 2.0))
    assert torch.equal(net.module.base.weight, frozen)
    assert int(net.module.norm.num_batches_tracked) == 2
    whole = named.complete({"head.weight": np.full((2, 2), 3, np.float32)})
    assert list(whole) == list(net.state_dict())
    assert np.all(whole["module.tail.weight"] == 3)
    for wrong in ({}, arrays | {"more": np.zeros(1)}, arrays | {"head.bias": np.zeros(3)}):
        with pytest.raises(ValueError, match="server"):
            named.load(wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_travels_as_float32_and_comes_back(dtype: torch.dtype) -> None:
    net = nn.Linear(2, 2).to(dtype)
    named, weight = ModelArrays(net), net.weight.detach().clone()
    arrays = named.read()
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    nn.init.zeros_(net.weight)
    named.load(arrays)
    assert net.weight.dtype == dtype
    assert torch.equal(net.weight, weight)
    assert [a.dtype for a in initial_arrays(net).values()] == ["float32", "float32"]


def test_the_answer_about_names() -> None:
    names = ["base.weight", "tail.weight", "norm.running_var", "head.weight", "other"]
    named = ModelArrays(Net())
    with refused(ValueError, "norm.running_mean"):
        named.answer(names)
    names += [name for name in TRAVELS if name not in names]
    said = named.answer(names)
    assert said[ROLES].tolist()[:5] == [FROZEN, 3, BUFFER, TRAINED, ABSENT]
    assert (said[CHECKSUMS] != 0).tolist() == [True] + [False] * (len(names) - 1)
