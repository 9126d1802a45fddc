"""Samples of a client's training data that are held out, whatever form its loader has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from ..data.batches import Loader, SplitBatch
from .batches import map_tensors, size_of
from .minibatches import Minibatches

_Rows = np.ndarray[Any, np.dtype[np.bool_]]


class TooFewSamplesError(ValueError):
    """Of a client's samples none would be held out, or none be left to train on."""


def hold_out(
    loader: Loader, split_batch: SplitBatch, share: float, seed: int
) -> tuple[Loader, Loader]:
    """Split training data in two, by samples; the same seed gives the same split.

    Parameters
    ----------
    loader : DataLoader over a data set with a length, Minibatches, or sequence of batches
        A `DataLoader` keeps its order, its batch size and whatever else it has, its samplers among
        them, and leaves the samples out.
    split_batch : callable
        Turns a batch into (inputs, targets): says how many samples it has.
    share : float
        Of the samples, rounded down; one at least, unless the share is 0.
    seed : int

    Returns
    -------
    kept, held_out : iterables of batches
        With a length where the loader has one. No batch of several is left with one sample, which
        batch norm could not train on: that sample joins another batch, or is held out as well.

    Raises
    ------
    TooFewSamplesError
        If the share is 0, or there is only one sample, or none.
    ValueError
        If the loader cannot be split.
    """
    sizes = _sizes(loader, split_batch)
    chosen = _chosen(sum(sizes), share, seed)
    chosen |= _lone(loader, sizes, ~chosen)
    return _parted(loader, sizes, ~chosen, chosen)


def folds(
    loader: Loader, split_batch: SplitBatch, count: int, seed: int
) -> list[tuple[Loader, Loader]]:
    """Split training data for cross-validation: each sample is held out once.

    Parameters
    ----------
    loader, split_batch, seed
        As of `hold_out`.
    count : int
        The number of folds; of fewer samples each is a fold of its own.

    Returns
    -------
    list of (kept, held_out)
        Of batches as of `hold_out`; a sample that would be left alone in one is in neither.

    Raises
    ------
    TooFewSamplesError
        If there is only one sample, or none.
    ValueError
        If the loader cannot be split.
    """
    sizes = _sizes(loader, split_batch)
    num_samples = sum(sizes)
    if num_samples < 2:
        raise TooFewSamplesError(f"The client has {num_samples} training samples, expected 2.")
    order = np.random.default_rng(seed).permutation(num_samples)
    parted = []
    for rows in np.array_split(order, min(count, num_samples)):
        chosen = np.zeros(num_samples, dtype=np.bool_)
        chosen[rows] = True
        lone = _lone(loader, sizes, ~chosen)
        parted.append(_parted(loader, sizes, ~(chosen | lone), chosen))
    return parted


def in_parts(loader: Loader, split_batch: SplitBatch, count: int) -> list[Any]:
    """Cut data into batches of like size, so many or a few more; of fewer samples each is one."""
    batches = list(loader)
    sizes = _sizes_of(batches, split_batch)
    most, parts = -(-sum(sizes) // count), []
    for batch, size in zip(batches, sizes, strict=True):
        for start in range(0, size, most):
            rows = torch.zeros(size, dtype=torch.bool)
            rows[start : start + most] = True
            parts.append(_taken(batch, rows))
    return parts


def _sizes(loader: Any, split_batch: SplitBatch) -> list[int]:
    """Return the number of samples, of a sequence in each batch."""
    if isinstance(loader, Minibatches | DataLoader) and not isinstance(
        loader.dataset, IterableDataset
    ):
        return [len(loader.dataset)]  # type: ignore[arg-type]
    if isinstance(loader, Sequence):
        return _sizes_of(loader, split_batch)
    raise ValueError(
        f"train_loader is {type(loader).__name__}, of which no samples can be held out. Give the "
        "client a validation_loader, or the strategy a penalty instead of 'auto'."
    )


def _sizes_of(batches: Sequence[Any], split_batch: SplitBatch) -> list[int]:
    parts = map(split_batch, batches)
    return [size_of(inputs if targets is None else targets) for inputs, targets in parts]


def _parted(loader: Any, sizes: list[int], kept: _Rows, chosen: _Rows) -> tuple[Loader, Loader]:
    """Return a loader of the kept samples and one of the chosen ones."""
    if isinstance(loader, DataLoader):
        return _without(loader, kept), _only(loader, chosen)
    if isinstance(loader, Minibatches):
        inputs, targets = loader.dataset.tensors
        rows, others = (torch.from_numpy(which).to(inputs.device) for which in (chosen, kept))
        left = Minibatches(inputs[others], targets[others], loader.batch_size)
        return left, [(inputs[rows], targets[rows])]
    return _rows(loader, sizes, kept), _rows(loader, sizes, chosen)


def _lone(loader: Any, sizes: list[int], kept: _Rows) -> _Rows:
    """Return the samples that would be left alone in a batch; none where nothing else is left."""
    found = np.zeros_like(kept)
    if isinstance(loader, Minibatches):
        rows = np.flatnonzero(kept)
        found[rows[-1:]] = loader.batch_size > 1 and len(rows) % loader.batch_size == 1
    elif not isinstance(loader, DataLoader):
        for rows in np.split(np.arange(len(kept)), np.cumsum(sizes)[:-1]):
            found[rows] = kept[rows] & (kept[rows].sum() == 1 < len(rows))
    return found if (kept & ~found).any() else np.zeros_like(found)


def _chosen(num_samples: int, share: float, seed: int) -> _Rows:
    count = max(math.floor(share * num_samples), 1 if share else 0)
    if not 0 < count < num_samples:
        raise TooFewSamplesError(
            f"The client has {num_samples} training samples, of which a share of {share:g}, and "
            "one at least, is to be held out. Give it more samples or a validation_loader, or the "
            "strategy a penalty instead of 'auto'."
        )
    chosen = np.zeros(num_samples, dtype=np.bool_)
    chosen[np.random.default_rng(seed).permutation(num_samples)[:count]] = True
    return chosen


class _Filtered:
    """A sampler without some indices; those that stay are places among the kept samples."""

    def __init__(self, sampler: Any, kept: _Rows) -> None:
        self.sampler, self.kept = sampler, kept
        self._places = np.cumsum(kept) - 1

    def __iter__(self) -> Iterator[int]:
        return (int(self._places[i]) for i in self.sampler if self.kept[i])

    def __len__(self) -> int:
        """Return the number of indices, on average where a sampler draws with replacement."""
        return round(len(self.sampler) * float(self.kept.mean()))


class _FilteredBatches:
    """A batch sampler without some indices; one that is left alone joins the batch before."""

    def __init__(self, batches: Any, kept: _Rows) -> None:
        self.batches, self.kept = batches, kept
        self._filled: BatchSampler | None = None
        if type(batches) is BatchSampler:  # batches keep their size
            inner: Any = _Filtered(batches.sampler, kept)
            self._filled = BatchSampler(inner, batches.batch_size, batches.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        before: list[int] = []
        for batch, size in self._left():
            if before and (1 not in (len(before), len(batch)) or size == 1):
                yield before
                before = []
            before = before + batch
        if before:
            yield before

    def _left(self) -> Iterator[tuple[list[int], int]]:
        """Yield what is left of each batch, and its size before."""
        if self._filled is not None:
            yield from ((batch, self._filled.batch_size) for batch in self._filled)
            return
        for batch in self.batches:
            if left := list(_Filtered(batch, self.kept)):
                yield left, len(batch)

    def __len__(self) -> int:
        filled = self._filled
        if filled is None:
            return len(self.batches)
        alone = not filled.drop_last and len(filled.sampler) % filled.batch_size == 1  # type: ignore[arg-type]
        return len(filled) - (alone and len(filled) > 1)


def _without(loader: Any, kept: _Rows) -> Loader:
    """Return a loader like this one of the kept samples."""
    names = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "generator")
    common: dict[str, Any] = {name: getattr(loader, name) for name in names}
    left = Subset(loader.dataset, np.flatnonzero(kept).tolist())
    if loader.batch_sampler is not None:
        batches: Any = _FilteredBatches(loader.batch_sampler, kept)
        return DataLoader(left, batch_sampler=batches, **common)
    kind = _FilteredBatches if _yields_lists(loader) else _Filtered
    sampler: Any = kind(loader.sampler, kept)
    return DataLoader(left, sampler=sampler, batch_size=None, **common)


def _only(loader: Any, chosen: _Rows) -> Loader:
    """Return a loader of the chosen samples, in their order."""
    left = Subset(loader.dataset, np.flatnonzero(chosen).tolist())
    if loader.batch_sampler is not None:
        size = loader.batch_size or len(left)
        return DataLoader(left, batch_size=size, collate_fn=loader.collate_fn)
    places = list(range(len(left)))
    sampler: Any = [places] if _yields_lists(loader) else places
    return DataLoader(left, sampler=sampler, batch_size=None, collate_fn=loader.collate_fn)


def _yields_lists(loader: Any) -> bool:
    """Return whether the sampler of a loader without batches yields lists of indices."""
    with torch.random.fork_rng([]):  # looking draws no random number
        return isinstance(next(iter(loader.sampler), None), list | tuple)


def _rows(batches: Sequence[Any], sizes: list[int], wanted: _Rows) -> list[Any]:
    """Return batches with the wanted samples only, which count through all batches."""
    found, start = [], 0
    for batch, size in zip(batches, sizes, strict=True):
        rows = torch.from_numpy(wanted[start : start + size])
        if rows.any():
            found.append(_taken(batch, rows))
        start += size
    return found


def _taken(values: Any, rows: Tensor) -> Any:
    def of_rows(tensor: Tensor) -> Tensor:
        with_rows = tensor.ndim and len(tensor) == len(rows)
        return tensor[rows.to(tensor.device)] if with_rows else tensor

    return map_tensors(of_rows, values)
