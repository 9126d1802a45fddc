"""Mini-batches of data that are in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fl_admm_strategies.maths.checks import check_count


class Minibatches:
    """Shuffled batches of tensors in memory; the last one of an epoch may be smaller.

    Its batches are those of ``DataLoader(TensorDataset(inputs, targets), batch_size,
    shuffle=True)``, bit for bit and from the same random numbers, sliced without the loader's cost
    for each sample and epoch: `torch.manual_seed` governs the order, each epoch has its own.

    Parameters
    ----------
    inputs : Tensor of shape (n, ...)
    targets : Tensor of shape (n, ...)
    batch_size : int
        Samples a batch, 1 or more.

    Examples
    --------
    >>> client = FPFCClient(context, Net(), Minibatches(images, labels, 32), nn.CrossEntropyLoss())
    """

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        check_count("batch_size", batch_size, least=1)
        self.dataset = TensorDataset(inputs, targets)
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch."""
        order = self._drawn()
        inputs, targets = self.dataset.tensors
        for places in torch.split(order, self.batch_size):
            yield inputs[places], targets[places]

    def epoch(self) -> tuple[Tensor, Tensor]:
        """Return the batches of an epoch one after another, in less time than one by one."""
        order = self._drawn()
        inputs, targets = self.dataset.tensors
        return inputs[order], targets[order]

    def _drawn(self) -> Tensor:
        """Draw the order of an epoch."""
        # A DataLoader draws a seed for its workers, of which there are none here, then the order's.
        _, seed = torch.empty(2, dtype=torch.int64).random_().tolist()
        generator = torch.Generator()
        generator.manual_seed(seed)
        return torch.randperm(self.dataset.tensors[0].shape[0], generator=generator)
