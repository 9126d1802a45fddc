"""Batches: every sample once an epoch, in an order that torch's seed rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from clients import Minibatches
from clients.toolkit.data.draws import _GOLDEN, _mixed, _wrapped, bits, order_of, orders

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


def test_the_orders_of_several_clients_are_those_of_each() -> None:
    keys, sizes = [3, -(2**62), 2**63 - 1], [5, 8, 1]
    together = orders(torch.tensor(keys), torch.tensor(sizes), max(sizes))
    for key, size, row in zip(keys, sizes, together, strict=True):
        assert row[:size].tolist() == order_of(key, size, torch.device("cpu")).tolist()


def test_every_place_is_as_likely() -> None:
    # 4,000 orders of 10: a place has each sample 400 times, with a standard deviation of 19.
    drawn = orders(torch.arange(4_000), torch.full((4_000,), 10), 10)
    counts = torch.stack([(drawn == sample).sum(0) for sample in range(10)])
    assert counts.min() > 320
    assert counts.max() < 480


def test_the_hash_is_splitmix64() -> None:
    # The first numbers of the generator with the seed 1234567, by its authors' program.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state, found = 1234567, []
    for number in range(1, 4):
        found.append(_mixed(_wrapped(state + number * _GOLDEN)) % 2**64)
    assert found == first
    assert bits(5, 7) == int(bits(torch.tensor(5), 7)) == int(bits(5, torch.tensor(7)))
