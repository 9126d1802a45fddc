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

    Raises
    ------
    TooFewSamplesError
        If the share is 0, or there is only one sample, or none.
    ValueError
        If the loader cannot be split.
    """
    sizes = _sizes(loader, split_batch)
    return _parted(loader, sizes, _chosen(sum(sizes), share, seed))


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
        parted.append(_parted(loader, sizes, chosen))
    return parted


def _sizes(loader: Any, split_batch: SplitBatch) -> list[int]:
    """Return the number of samples, of a sequence in each batch."""
    if isinstance(loader, Minibatches | DataLoader) and not isinstance(
        loader.dataset, IterableDataset
    ):
        return [len(loader.dataset)]  # type: ignore[arg-type]
    if isinstance(loader, Sequence):
        parts = (split_batch(batch) for batch in loader)
        return [size_of(inputs if targets is None else targets) for inputs, targets in parts]
    raise ValueError(
        f"train_loader is {type(loader).__name__}, of which no samples can be held out. Give the "
        "client a validation_loader, or the strategy a penalty instead of 'auto'."
    )


def _parted(loader: Any, sizes: list[int], chosen: _Rows) -> tuple[Loader, Loader]:
    """Return what is not chosen, and what is."""
    if isinstance(loader, DataLoader):
        return _without(loader, chosen), _only(loader, chosen)
    if isinstance(loader, Minibatches):
        inputs, targets = loader.dataset.tensors
        rows, others = (torch.from_numpy(which).to(inputs.device) for which in (chosen, ~chosen))
        kept = Minibatches(inputs[others], targets[others], loader.batch_size)
        return kept, [(inputs[rows], targets[rows])]
    return _rows(loader, sizes, ~chosen), _rows(loader, sizes, chosen)


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
    """A sampler, of single indices or of lists of them, without some indices."""

    def __init__(self, sampler: Any, left_out: _Rows) -> None:
        self.sampler, self.left_out = sampler, left_out

    def __iter__(self) -> Iterator[Any]:
        for index in self.sampler:
            if isinstance(index, list | tuple):
                if kept := [i for i in index if not self.left_out[i]]:
                    yield kept
            elif not self.left_out[index]:
                yield index


def _without(loader: Any, chosen: _Rows) -> Loader:
    """Return a loader like this one without the chosen samples."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(batches) is BatchSampler:  # batches keep their size
        inner: Any = _Filtered(batches.sampler, chosen)
        filtered: Any = BatchSampler(inner, batches.batch_size, batches.drop_last)
    else:
        filtered = _Filtered(batches, chosen)
    kept = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "generator")
    common: dict[str, Any] = {name: getattr(loader, name) for name in kept}
    if loader.batch_sampler is not None:
        return DataLoader(loader.dataset, batch_sampler=filtered, **common)
    return DataLoader(loader.dataset, sampler=filtered, batch_size=None, **common)


def _only(loader: Any, chosen: _Rows) -> Loader:
    """Return a loader of the chosen samples, in their order."""
    indices = np.flatnonzero(chosen).tolist()
    if loader.batch_sampler is not None:
        size = loader.batch_size or len(indices)
        subset = Subset(loader.dataset, indices)
        return DataLoader(subset, batch_size=size, collate_fn=loader.collate_fn)
    lists = any(isinstance(index, list | tuple) for index in _first(loader.sampler))
    sampler: Any = [indices] if lists else indices
    return DataLoader(
        loader.dataset, sampler=sampler, batch_size=None, collate_fn=loader.collate_fn
    )


def _first(sampler: Any) -> Iterator[Any]:
    with torch.random.fork_rng([]):  # looking draws no random number
        for index in sampler:
            yield index
            return


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
