"""The calls of a model that are made in another way: dropout, and in a stack two kinds more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ..data.draws import bits

_RECURRENT = {
    torch.gru: torch.ops.aten.gru.input,
    torch.lstm: torch.ops.aten.lstm.input,
    torch.rnn_tanh: torch.ops.aten.rnn_tanh.input,
    torch.rnn_relu: torch.ops.aten.rnn_relu.input,
}
_DROPPED_TOGETHER = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
"""How many of the last dimensions are dropped as one."""


class ClientCalls(TorchFunctionMode):
    """What the model of one client calls, alone or in a stack.

    * Dropout draws from the client's key, in place of the device's generator: for each sample by
      its place in the epoch, in whatever batches that is taken.
    * In a stack a linear layer has its weight on the left, so that the gradient of the weight has
      the memory order of the weight. PyTorch's order costs a transposed copy of every gradient.
    * In a stack a recurrent layer, for which `vmap` has no rule, is PyTorch's own decomposition.

    Parameters
    ----------
    key : Tensor of shape (), or int
        Of the client's random numbers in this epoch.
    first : Tensor of shape (), or int
        The place of the batch's first sample in the epoch.
    stacked : bool (default: False)

    Attributes
    ----------
    dropouts : int
        How many dropouts were called.
    """

    def __init__(self, key: Any, first: Any, *, stacked: bool = False) -> None:
        super().__init__()
        self._key = key
        self._first = first
        self._stacked = stacked
        self.dropouts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call of the model."""
        kwargs = kwargs or {}
        if func in _DROPPED_TOGETHER:
            return self._dropped(_DROPPED_TOGETHER[func], *args, **kwargs)
        if self._stacked and func is F.linear:
            return _linear(*args, **kwargs)
        if self._stacked and func in _RECURRENT:
            from torch._decomp import get_decompositions

            layer = _RECURRENT[func]
            return get_decompositions([layer])[layer](*args, **kwargs)
        return func(*args, **kwargs)

    def _dropped(
        self,
        last: int,
        input: Tensor,  # noqa: A002 (PyTorch's name, by which it may be given)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        self.dropouts += 1
        shape = input.shape[: input.ndim - last]
        before = self._first * shape[1:].numel()
        place = torch.arange(shape.numel(), device=input.device) + before
        drawn = (bits(bits(self._key, self.dropouts), place) >> 40) & 0xFFFFFF
        kept = (drawn >= p * 2**24).to(input.dtype) / (1 - p)
        dropped: Tensor = input * kept.view(*shape, *[1] * last)
        return dropped


def _linear(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    samples = input.reshape(-1, input.shape[-1]).t()
    outputs = weight @ samples if bias is None else torch.addmm(bias[:, None], weight, samples)
    return outputs.t().view(*input.shape[:-1], -1)
