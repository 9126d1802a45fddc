"""After a run: a cluster or a personal model for a client that took no part in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from clients import losses_of, personalise, state_dict

MODEL = nn.Linear(1, 1, bias=False).double()
LOSS = nn.MSELoss()


def line(slope: float) -> dict[str, np.ndarray]:
    """Return the model y = slope x."""
    return {"weight": np.array([[slope]], dtype=np.float64)}


def data(slope: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples of y = slope x in batches of 1 and 2; the mean of x^2 is 2."""
    x = torch.tensor([[1.0], [1.0], [2.0]], dtype=torch.float64)
    return [(x[:1], slope * x[:1]), (x[1:], slope * x[1:])]


def test_the_model_that_fits_best_is_first() -> None:
    before = MODEL.weight.detach().clone()
    found = losses_of(MODEL, {1: line(-1), 2: line(2.5), 3: line(9)}, data(2), LOSS)
    # (slope - 2)^2 times the mean of x^2
    assert found == pytest.approx({2: 0.25 * 2, 1: 9 * 2, 3: 49 * 2})
    assert list(found) == [2, 1, 3]
    torch.testing.assert_close(MODEL.weight, before)
    with pytest.raises(ValueError, match="clusters"):
        losses_of(MODEL, {}, data(2), LOSS)


@pytest.mark.slow
def test_a_personal_model_minimises_loss_and_distance() -> None:
    # min 2 (u - 4)^2 + lam/2 (u - 1)^2 at lam = 4: 4 (u - 4) + 4 (u - 1) = 0, u = 5/2.
    settings = {"lr": 0.05, "epochs": 200, "full_batch": True}
    held = personalise(MODEL, line(1), data(4), LOSS, lam=4.0, **settings)  # type: ignore[arg-type]
    free = personalise(MODEL, line(1), data(4), LOSS, **settings)  # type: ignore[arg-type]
    np.testing.assert_allclose(held["weight"], [[2.5]])
    np.testing.assert_allclose(free["weight"], [[4.0]])


def test_names_dtypes_and_what_is_frozen_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    start = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    new = personalise(model, start, [(x, x[:, :1])], LOSS, lr=0.1, epochs=2)
    assert {name: array.dtype for name, array in new.items()} == {
        name: array.dtype for name, array in start.items()
    }
    moved = {name for name in start if not np.array_equal(start[name], new[name])}
    assert moved >= {"1.running_mean", "2.weight", "2.bias"}
    assert not moved & {"0.weight", "0.bias"}
    model.load_state_dict(state_dict(new))
