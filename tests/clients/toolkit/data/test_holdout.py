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
from clients.toolkit.data.batches import split_batch
from clients.toolkit.data.holdout import TooFewSamplesError, folds, hold_out
from tests.support.refusals import refused

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


def _whole(sample: Any) -> Any:
    return sample[0][None], sample[1][None]


def samples(loader: Any) -> list[int]:
    found: list[int] = []
    for batch in loader:
        inputs = batch["label"] if isinstance(batch, dict) else batch[0]
        found += torch.atleast_1d(inputs).tolist()
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_kept_or_held_out(name: str) -> None:
    kept, held = hold_out(LOADERS[name](), _whole if name == "no batches" else split_batch, 0.2, 5)
    # 0.2 * 23, rounded down; of the list's last two, if one is held out, the other is as well.
    assert len(samples(held)) == (5 if name.startswith("list") else 4)
    assert sorted(samples(kept) + samples(held)) == list(range(N))
    again = hold_out(LOADERS[name](), split_batch, 0.2, 5)[1]
    assert samples(again) == samples(held)
    assert samples(hold_out(LOADERS[name](), split_batch, 0.2, 6)[1]) != samples(held)
    kept, held = hold_out(LOADERS[name](), _whole if name == "no batches" else split_batch, 0.01, 5)
    assert len(samples(held)) == 1  # at least
    assert sorted(samples(kept) + samples(held)) == list(range(N))


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_in_one_fold(name: str) -> None:
    split = _whole if name == "no batches" else split_batch
    parts = folds(LOADERS[name](), split, 4, 5)
    assert [len(samples(held)) for _, held in parts] == [6, 6, 6, 5]
    assert sorted(i for _, held in parts for i in samples(held)) == list(range(N))
    for kept, held in parts:
        both = samples(kept) + samples(held)
        assert sorted(both) == sorted(set(both))
        # Slices of tensors cannot be joined: who would be alone in one is left out.
        assert len(both) >= N - 1 if name in ("in memory", "list", "list of dicts") else N


def test_of_few_samples_each_is_a_fold_and_of_one_there_are_none() -> None:
    parts = folds([(torch.arange(3), torch.arange(3))], split_batch, 4, 5)
    assert [len(samples(held)) for _, held in parts] == [1, 1, 1]
    with pytest.raises(TooFewSamplesError):
        folds([(torch.zeros(1), torch.zeros(1))], split_batch, 4, 5)
    with refused(ValueError, "train_loader", "DataLoader"):
        folds(DataLoader(Stream()), split_batch, 4, 5)


DATA_76 = TensorDataset(torch.arange(76), torch.arange(76) % 2)
BY_20 = {
    "plain": lambda: DataLoader(DATA_76, batch_size=20),
    "shuffled": lambda: DataLoader(DATA_76, batch_size=20, shuffle=True),
    "pairs": lambda: DataLoader(DATA_76, batch_sampler=[[i, i + 1] for i in range(0, 76, 2)]),
    "in memory": lambda: Minibatches(*DATA_76.tensors, 20),
    "list": lambda: list(DataLoader(DATA_76, batch_size=4)),
}


@pytest.mark.parametrize("name", BY_20)
def test_no_batch_is_left_with_one_sample(name: str) -> None:
    # 76 samples, of which 15 are held out, leave 61: three batches of 20 and one sample.
    kept, held = hold_out(BY_20[name](), split_batch, 0.2, 5)
    of_folds = [loader for loader, _ in folds(BY_20[name](), split_batch, 5, 5)]
    for loader in (kept, *of_folds):
        assert 1 not in [len(batch[0]) for batch in loader]
    assert sorted(samples(kept) + samples(held)) == list(range(76))


def test_what_is_left_of_a_single_batch_stays_even_if_it_is_one_sample() -> None:
    for loader in (Minibatches(torch.arange(2), torch.arange(2), 20), [(torch.arange(2),) * 2]):
        kept, held = hold_out(loader, split_batch, 0.2, 5)
        assert sorted(samples(kept) + samples(held)) == [0, 1]
        assert len(samples(kept)) == 1


@pytest.mark.parametrize("name", [*BY_20, "sliced", "no batches"])
def test_both_parts_have_a_length(name: str) -> None:
    whole = (LOADERS | BY_20)[name]
    for count in (0.2, 0.3, 0.5):
        split = _whole if name == "no batches" else split_batch
        for part in hold_out(whole(), split, count, 5):
            length = len(part)  # type: ignore[arg-type]
            assert length >= len(list(part)) if name == "pairs" else length == len(list(part))
            if hasattr(part, "dataset"):
                assert len(part.dataset) == len(samples(part))


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
    ("loader", "share", "named"),
    [
        (DataLoader(Stream()), 0.2, "DataLoader"),
        ((b for b in [1]), 0.2, "generator"),
        (DataLoader(DATA), 0.0, "23 training samples"),
        ([(torch.zeros(1), torch.zeros(1))], 0.2, "1 training samples"),
    ],
    ids=["stream", "generator", "no share", "one in a list"],
)
def test_what_cannot_be_split_is_refused(loader: Any, share: float, named: str) -> None:
    with refused(ValueError, named):
        hold_out(loader, split_batch, share, 0)
