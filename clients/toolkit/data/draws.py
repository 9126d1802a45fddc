"""A client's random numbers: a hash of its key and of a counter.

They are integers that elementwise operations hash (splitmix64): the same on every device, in every
stack and in every order of the clients, without a generator that is saved or restored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def bits(key: Any, counter: Any) -> Any:
    """Return 64 random bits of a key for each value of a counter, which may be keys in turn.

    Both are integers or tensors of int64.
    """
    return _mixed(_wrapped(_mixed(key) + _wrapped(counter * _GOLDEN)))


def _mixed(z: Any) -> Any:
    """Return the hash of 64-bit integers; the masks make the shifts those of unsigned numbers."""
    z = _wrapped((z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST)
    z = _wrapped((z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _wrapped(z: Any) -> Any:
    """Return an integer as a signed one of 64 bits, as a tensor's are already."""
    return z if isinstance(z, Tensor) else (z + 2**63) % 2**64 - 2**63


def order_of(key: int, size: int, device: torch.device) -> Tensor:
    """Return a random order of some samples, shape (size,)."""
    return bits(key, torch.arange(size, device=device)).argsort(stable=True)  # type: ignore[no-any-return]


def orders(keys: Tensor, sizes: Tensor, longest: int) -> Tensor:
    """Return `order_of` the samples of several clients, shape (clients, longest).

    The first n_i entries of row i are an order of 0 .. n_i - 1.
    """
    place = torch.arange(longest, device=keys.device)
    drawn = bits(keys[:, None], place).masked_fill(place >= sizes[:, None], 2**63 - 1)
    return drawn.argsort(dim=1, stable=True)  # type: ignore[no-any-return]
