"""All samples of a client at once."""

import torch

from simulations.data import full_batch


def test_full_batch_is_one_batch_of_everything() -> None:
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    ((inputs, targets),) = full_batch(x, y)
    assert inputs is x
    assert targets is y
