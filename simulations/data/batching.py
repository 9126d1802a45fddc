"""Batches for the local solvers: all samples at once, or shuffled slices."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


def full_batch(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return one batch of all samples: an epoch is one step of gradient descent."""
    return [(x, y)]


def minibatches(x: Tensor, y: Tensor, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of shuffled batches; the last one of an epoch may be smaller.

    Each epoch's order comes from torch's global random numbers, so that `torch.manual_seed`
    governs it. Batches are sliced by index rather than collated sample by sample, which is several
    times faster for tensors in memory.

    Parameters
    ----------
    x : Tensor, shape (n, ...)
        Inputs.
    y : Tensor, shape (n,)
        Labels.
    batch_size : int
        Samples a batch, 1 or more.
    """
    samples = TensorDataset(x, y)
    slices = BatchSampler(RandomSampler(samples), batch_size, drop_last=False)
    return DataLoader(samples, sampler=slices, batch_size=None)
