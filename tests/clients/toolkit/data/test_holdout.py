"""Samples that are held out: of every form of loader, the same by the seed, and none trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from clients import Minibatches
from clients.toolkit.data.batches import split_batch
from clients.toolkit.data.holdout import hold_out, in_parts
from tests.support.refusals import refused

N = 23
DATA = TensorDataset(torch.arange(N), torch.arange(N) % 2)


class Dicts:
    """A data set of dicts, as Hugging Face's are."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"img": torch.tensor([float(index)]), "label": torch.tensor(index)}


LOADERS = {
    "plain": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "in memory": lambda: Minibatches(*DATA.tensors, 4),
    "dicts": lambda: DataLoader(Dicts(), batch_size=5, shuffle=True),
    "list": lambda: list(DataLoader(DATA, batch_size=7)),
    "one batch": lambda: [(torch.arange(N), torch.arange(N) % 2)],
    "list of dicts": lambda: list(DataLoader(Dicts(), batch_size=7)),
}


def samples(loader: Any) -> list[int]:
    return [
        sample
        for batch in loader
        for sample in (batch["label"] if isinstance(batch, dict) else batch[0]).tolist()
    ]


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_kept_or_held_out(name: str) -> None:
    for share, count in ((0.2, 4), (0.01, 1)):  # 0.2 * 23, rounded down, and one at least
        kept, held = hold_out(LOADERS[name](), split_batch, share, 5)
        # Of the list's last two, if one is held out, the other is as well.
        assert len(samples(held)) - count == (name.startswith("list") and share == 0.2)
        assert sorted(samples(kept) + samples(held)) == list(range(N))
        assert samples(hold_out(LOADERS[name](), split_batch, share, 5)[1]) == samples(held)
        assert samples(hold_out(LOADERS[name](), split_batch, share, 6)[1]) != samples(held)


DATA_76 = TensorDataset(torch.arange(76), torch.arange(76) % 2)
BY_20 = {
    "plain": lambda: DataLoader(DATA_76, batch_size=20),
    "shuffled": lambda: DataLoader(DATA_76, batch_size=20, shuffle=True),
    "in memory": lambda: Minibatches(*DATA_76.tensors, 20),
    "list": lambda: list(DataLoader(DATA_76, batch_size=4)),
}


@pytest.mark.parametrize("name", BY_20)
def test_no_batch_is_left_with_one_sample_and_both_parts_have_a_length(name: str) -> None:
    # 76 samples, of which 15 are held out, leave 61: three batches of 20 and one sample.
    kept, held = hold_out(BY_20[name](), split_batch, 0.2, 5)
    sizes = [len(batch[0]) for batch in kept]
    assert 1 not in sizes
    assert len(kept) == len(sizes)  # type: ignore[arg-type]
    assert len(held) == len(list(held))  # type: ignore[arg-type]
    assert sorted(samples(kept) + samples(held)) == list(range(76))


def test_what_is_left_of_a_single_batch_stays_even_if_it_is_one_sample() -> None:
    for loader in (Minibatches(torch.arange(2), torch.arange(2), 20), [(torch.arange(2),) * 2]):
        kept, held = hold_out(loader, split_batch, 0.2, 5)
        assert sorted(samples(kept) + samples(held)) == [0, 1]
        assert len(samples(kept)) == 1


def test_a_loader_goes_on_shuffling_and_the_held_out_samples_stay_in_order() -> None:
    kept, held = hold_out(LOADERS["shuffled"](), split_batch, 0.2, 5)
    assert [len(batch[0]) for batch in kept] == [4, 4, 4, 4, 3]
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        orders.append(samples(kept))
    assert orders[0] == orders[2] != orders[1]
    assert samples(held) == sorted(samples(held))


def test_parts_are_of_like_size_and_have_every_sample() -> None:
    parts = in_parts(LOADERS["list"](), split_batch, 6)
    assert [len(part[0]) for part in parts] == [4, 3, 4, 3, 4, 3, 2]
    assert samples(parts) == list(range(N))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("loader", "share", "named"),
    [
        (DataLoader(Stream()), 0.2, "DataLoader"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * N, N)), 0.2, "sampler"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), 0.2, "sampler"),
        (DataLoader(DATA, batch_size=None), 0.2, "DataLoader"),
        ((b for b in [1]), 0.2, "generator"),
        ([(torch.zeros(1), torch.zeros(1))], 0.2, "1 training samples"),
    ],
    ids=["stream", "sampler", "batches", "no batches", "generator", "one in a list"],
)
def test_what_cannot_be_split_is_refused(loader: Any, share: float, named: str) -> None:
    with refused(ValueError, named):
        hold_out(loader, split_batch, share, 0)
