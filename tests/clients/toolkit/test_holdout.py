"""Samples that are held out: of every form of loader, the same by the seed, and none trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from clients import Minibatches
from clients.toolkit.batches import split_batch
from clients.toolkit.holdout import hold_out

N = 23
DATA = TensorDataset(torch.arange(N), torch.arange(N) % 2)


class Dicts:
    """A data set of dicts, as Hugging Face's are."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"img": torch.tensor([float(index)]), "label": torch.tensor(index)}


def sliced() -> DataLoader[Any]:
    slices = BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    return DataLoader(DATA, sampler=slices, batch_size=None)


class InPairs:
    """A batch sampler of one's own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i, i + 1] for i in range(0, N - 1, 2))
        yield [N - 1]


LOADERS = {
    "plain": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "sliced": sliced,
    "in memory": lambda: Minibatches(*DATA.tensors, 4),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=InPairs()),
    "no batches": lambda: DataLoader(DATA, batch_size=None),
    "dicts": lambda: DataLoader(Dicts(), batch_size=5, shuffle=True),
    "list": lambda: list(DataLoader(DATA, batch_size=7)),
    "one batch": lambda: [(torch.arange(N), torch.arange(N) % 2)],
    "list of dicts": lambda: list(DataLoader(Dicts(), batch_size=7)),
}


def samples(loader: Any) -> list[int]:
    found: list[int] = []
    for batch in loader:
        inputs = batch["label"] if isinstance(batch, dict) else batch[0]
        found += torch.atleast_1d(inputs).tolist()
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_kept_or_held_out(name: str) -> None:
    if name == "no batches":
        kept, held = hold_out(LOADERS[name](), lambda b: (b[0][None], b[1][None]), 0.2, 5)
    else:
        kept, held = hold_out(LOADERS[name](), split_batch, 0.2, 5)
    assert len(samples(held)) == 4  # 0.2 * 23, rounded down
    assert sorted(samples(kept) + samples(held)) == list(range(N))
    again = hold_out(LOADERS[name](), split_batch, 0.2, 5)[1]
    assert samples(again) == samples(held)
    assert samples(hold_out(LOADERS[name](), split_batch, 0.2, 6)[1]) != samples(held)


def test_batches_keep_their_size_and_their_order_of_chance() -> None:
    kept, _ = hold_out(LOADERS["shuffled"](), split_batch, 0.2, 5)
    assert [len(batch[0]) for batch in kept] == [4, 4, 4, 4, 3]
    torch.manual_seed(1)
    first = samples(kept)
    torch.manual_seed(2)
    assert samples(kept) != first
    torch.manual_seed(1)
    assert samples(kept) == first


def test_a_sampler_of_ones_own_goes_on_drawing() -> None:
    sampler = WeightedRandomSampler([1.0] * 3 + [0.0] * (N - 3), 40)
    kept, held = hold_out(DataLoader(DATA, batch_size=8, sampler=sampler), split_batch, 0.5, 0)
    assert set(samples(kept)) == {0, 1, 2} - set(samples(held))


def test_looking_at_a_loader_draws_no_random_number() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    hold_out(sliced(), split_batch, 0.2, 5)
    assert torch.equal(torch.get_rng_state(), state)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("loader", "share", "text"),
    [
        (DataLoader(Stream()), 0.2, r"train_loader is DataLoader, of which no samples can be held"),
        (
            (b for b in [1]),
            0.2,
            r"train_loader is generator, .* Give the client a validation_loade",
        ),
        (DataLoader(DATA), 0.04, r"has 23 training samples, .*that is 0\. Give it more samples or"),
        ([(torch.zeros(2), torch.zeros(2))], 0.2, "has 2 training samples"),
    ],
    ids=["stream", "generator", "too few", "too few in a list"],
)
def test_what_cannot_be_split_is_refused_in_words(loader: Any, share: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hold_out(loader, split_batch, share, 0)
