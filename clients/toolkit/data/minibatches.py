"""Mini-batches of data that are in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fl_admm_strategies.maths.checks import check_count

from .draws import order_of


class Minibatches:
    """Shuffled batches of tensors in memory; the last one of an epoch may be smaller.

    It takes the place of ``DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True)``
    without the loader's cost for each sample and epoch. Each epoch has an order of its own, a hash
    of one number that torch's generator draws, so that `torch.manual_seed` governs it.

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
        inputs, targets = self.dataset.tensors
        order = order_of(self.draw(), len(inputs), inputs.device)
        for places in torch.split(order, self.batch_size):
            yield inputs[places], targets[places]

    @property
    def sizes(self) -> list[int]:
        """How many samples each batch of an epoch has."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return [self.batch_size] * whole + [rest] * bool(rest)

    @staticmethod
    def draw() -> int:
        """Draw the key of an epoch's order."""
        return int(torch.empty((), dtype=torch.int64).random_())

    def on(self, device: torch.device) -> Minibatches:
        """Return them with their tensors on a device, where these stay from round to round."""
        if any(tensor.device != device for tensor in self.dataset.tensors):
            self.dataset = TensorDataset(*(tensor.to(device) for tensor in self.dataset.tensors))
        return self
