"""A client's samples as one batch."""

from __future__ import annotations

from torch import Tensor


def full_batch(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return one batch of all samples: an epoch is one step of gradient descent."""
    return [(x, y)]
