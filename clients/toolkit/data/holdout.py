"""Samples of a client's training data that are held out, whatever form its loader has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from .batches import Loader, SplitBatch, map_tensors, size_of
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
        A `DataLoader` keeps its batch size, and shuffles if it did; one with a sampler of its own
        cannot be split.
    split_batch : callable
        Turns a batch into (inputs, targets): says how many samples it has.
    share : float
        Of the samples, in (0, 1), rounded down; one at least.
    seed : int

    Returns
    -------
    kept, held_out : iterables of batches
        With a length where the loader has one. No batch of several is left with one sample, which
        batch norm could not train on: that sample joins another batch, or is held out as well.

    Raises
    ------
    TooFewSamplesError
        If there is only one sample, or none.
    ValueError
        If the loader cannot be split.
    """
    sizes = _sizes(loader, split_batch)
    chosen = _chosen(sum(sizes), share, seed)
    chosen |= _lone(loader, sizes, ~chosen)
    return _parted(loader, sizes, ~chosen, chosen)


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
    if isinstance(loader, Minibatches) or _is_plain(loader):
        return [len(loader.dataset)]
    if isinstance(loader, Sequence):
        return _sizes_of(loader, split_batch)
    raise ValueError(
        f"train_loader is {type(loader).__name__}, of which no samples can be held out, expected "
        "Minibatches, a list of batches, or a DataLoader with a length and without a sampler. Give "
        "the client a validation_loader, or the strategy a penalty instead of 'auto'."
    )


def _is_plain(loader: Any) -> bool:
    """Return whether a loader reads all samples of a data set once, in its order or shuffled."""
    return (
        isinstance(loader, DataLoader)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (SequentialSampler, RandomSampler)
        and len(loader.sampler) == len(loader.dataset)  # type: ignore[arg-type]
    )


def _sizes_of(batches: Sequence[Any], split_batch: SplitBatch) -> list[int]:
    parts = map(split_batch, batches)
    return [size_of(inputs if targets is None else targets) for inputs, targets in parts]


def _parted(loader: Any, sizes: list[int], kept: _Rows, chosen: _Rows) -> tuple[Loader, Loader]:
    """Return a loader of the kept samples and one of the chosen ones, in their order."""
    if isinstance(loader, DataLoader):
        shuffle = type(loader.sampler) is RandomSampler
        left = _subset(loader, kept, shuffle=shuffle, drop_last=loader.drop_last)
        return left, _subset(loader, chosen)
    if isinstance(loader, Minibatches):
        inputs, targets = loader.dataset.tensors
        rows, others = (torch.from_numpy(which).to(inputs.device) for which in (chosen, kept))
        left = Minibatches(inputs[others], targets[others], loader.batch_size)
        return left, [(inputs[rows], targets[rows])]
    return _rows(loader, sizes, kept), _rows(loader, sizes, chosen)


def _subset(loader: DataLoader[Any], rows: _Rows, **options: Any) -> Loader:
    """Return a loader of some samples of another one's data set."""
    names = ("batch_size", "collate_fn", "num_workers", "pin_memory", "worker_init_fn", "generator")
    options |= {name: getattr(loader, name) for name in names}
    return DataLoader(Subset(loader.dataset, np.flatnonzero(rows).tolist()), **options)


def _lone(loader: Any, sizes: list[int], kept: _Rows) -> _Rows:
    """Return the samples that would be left alone in a batch; none where nothing else is left."""
    found = np.zeros_like(kept)
    if isinstance(loader, Minibatches | DataLoader):
        rows = np.flatnonzero(kept)
        size: Any = loader.batch_size
        found[rows[-1:]] = size > 1 and len(rows) % size == 1
    else:
        for rows in np.split(np.arange(len(kept)), np.cumsum(sizes)[:-1]):
            found[rows] = kept[rows] & (kept[rows].sum() == 1 < len(rows))
    return found if (kept & ~found).any() else np.zeros_like(found)


def _chosen(num_samples: int, share: float, seed: int) -> _Rows:
    count = max(math.floor(share * num_samples), 1)
    if not 0 < count < num_samples:
        raise TooFewSamplesError(
            f"The client has {num_samples} training samples, of which a share of {share:g}, and "
            "one at least, is to be held out. Give it more samples or a validation_loader, or the "
            "strategy a penalty instead of 'auto'."
        )
    chosen = np.zeros(num_samples, dtype=np.bool_)
    chosen[np.random.default_rng(seed).permutation(num_samples)[:count]] = True
    return chosen


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
