"""Batches: every sample once an epoch, in an order that torch's seed rules."""

import pytest
import torch

from simulations.data import full_batch, minibatches

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


def epoch(loader: torch.utils.data.DataLoader, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    batches = list(loader)
    assert all(torch.equal(x, X[y]) for x, y in batches)  # inputs stay beside their labels
    return [y.tolist() for _, y in batches]


def test_full_batch_is_one_batch_of_everything() -> None:
    ((x, y),) = full_batch(X, Y)
    assert x is X
    assert y is Y


def test_an_epoch_holds_every_sample_once_the_last_batch_being_smaller() -> None:
    batches = epoch(minibatches(X, Y, 4), seed=0)
    assert [len(b) for b in batches] == [4, 4, 2]
    assert sorted(i for b in batches for i in b) == list(range(10))
    assert len(minibatches(X, Y, 4)) == 3


def test_the_order_follows_the_global_seed_and_changes_with_the_epoch() -> None:
    loader = minibatches(X, Y, 4)
    assert epoch(loader, seed=1) == epoch(minibatches(X, Y, 4), seed=1)
    assert epoch(loader, seed=1) != epoch(loader, seed=2)
    torch.manual_seed(1)
    first, second = ([y.tolist() for _, y in loader] for _ in range(2))
    assert first != second


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        minibatches(X, Y, 0)
