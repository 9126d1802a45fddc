"""Batches: every sample once an epoch, in an order that torch's seed rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from clients import Minibatches

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


def epoch(loader: Iterable[Any], seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    batches = list(loader)
    assert all(torch.equal(x, X[y]) for x, y in batches)  # inputs stay beside their labels
    return [y.tolist() for _, y in batches]


def test_an_epoch_holds_every_sample_once_the_last_batch_being_smaller() -> None:
    batches = epoch(Minibatches(X, Y, 4), seed=0)
    assert [len(b) for b in batches] == [4, 4, 2]
    assert sorted(i for b in batches for i in b) == list(range(10))
    assert len(Minibatches(X, Y, 4)) == 3


def test_the_order_follows_the_global_seed_and_changes_with_the_epoch() -> None:
    loader = Minibatches(X, Y, 4)
    assert epoch(loader, seed=1) == epoch(Minibatches(X, Y, 4), seed=1)
    assert epoch(loader, seed=1) != epoch(loader, seed=2)
    torch.manual_seed(1)
    first, second = ([y.tolist() for _, y in loader] for _ in range(2))
    assert first != second


def test_the_batches_and_what_is_drawn_after_them_are_those_of_a_data_loader() -> None:
    """A later dropout draws what it drew beside a `DataLoader`."""
    drawn = []
    for loader in (Minibatches(X, Y, 4), DataLoader(TensorDataset(X, Y), 4, shuffle=True)):
        torch.manual_seed(3)
        epochs = [[y.tolist() for _, y in loader] for _ in range(3)]
        drawn.append((epochs, torch.rand(2).tolist()))
    assert drawn[0] == drawn[1]


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        Minibatches(X, Y, 0)
