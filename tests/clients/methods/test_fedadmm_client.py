"""FedADMMClient by hand, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.testing import assert_allclose
from torch import Tensor, nn

from clients import FedADMMClient


class Line(nn.Module):
    """w x + b and a counter, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w * inputs + self.b


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


def new_context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def client(context: Context | None = None, loader: Any = None) -> FedADMMClient:
    """Return a client with one sample, x = 1 and y = 4: f = (w + b - 4)^2 / 2."""
    batch = (torch.tensor([1.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64))
    loader = [batch] if loader is None else loader
    return FedADMMClient(context or new_context(), Line(), loader, half_square, full_batch=True)


def config(**changes: Any) -> dict[str, Any]:
    return {
        "rho": 2.0,
        "lr": 0.1,
        "local-epochs": 1,
        "loss-weight": 0.5,
        "duals": "strategy",
        "shared": "w,b",
        "version": 0,
        "server-round": 1,
        "seed": 5,
        "groups": "center:3,start:2",
    } | {key.replace("_", "-"): value for key, value in changes.items()}


def column(*values: float) -> list[np.ndarray]:
    return [np.array([value]) for value in values]


FIRST = column(3, 0.5, 7, 1, 0)  # anchor (3, .5), seen = 7; u_i = (1, 0)


def test_steps_from_u_i_towards_the_anchor() -> None:
    # Residual 1 + 0 - 4 = -3, alpha = 1/2: w = 1 - .1 [.5 (-3) + 2 (1 - 3)] = 1.55,
    # b = 0 - .1 [-1.5 + 2 (0 - .5)] = .25. The second step: residual -2.2,
    # w = 1.55 - .1 [-1.1 + 2 (-1.45)] = 1.95, b = .25 - .1 [-1.1 - .5] = .41; the loss before it
    # is 2.2^2/2 = 2.42. The counter goes back as it came.
    arrays, num_examples, metrics = client().fit(FIRST, config(local_epochs=2))
    assert_allclose(np.ravel(arrays), [1.95, 0.41, 7], rtol=1e-14)
    assert num_examples == 1
    assert metrics == {"loss": pytest.approx(2.42, rel=1e-14)}


def test_it_goes_on_from_its_own_u_i() -> None:
    context = new_context()
    client(context).fit(FIRST, config())
    assert_allclose(np.ravel(list(client(context).personal_arrays().values())), [1.55, 0.25])
    later = config(version=1, server_round=4, groups="center:3")
    arrays, _, _ = client(context).fit(FIRST[:3], later)
    assert_allclose(np.ravel(arrays), [1.95, 0.41, 7], rtol=1e-14)


def test_with_its_own_dual_it_uploads_the_change_of_z() -> None:
    # Round 1 at w = (3, .5), u_i^0 = (1, 0), pi = 0: the anchor is w, so u = (1.55, .25) as above,
    # pi = 2 (u - w) = (-2.9, -.5), and z - z^0 = (u - u^0) + (u - w) = (.55 - 1.45, .25 - .25).
    context = new_context()
    arrays, _, _ = client(context).fit(FIRST, config(duals="client"))
    assert_allclose(np.ravel(arrays), [-0.9, 0, 7], atol=1e-14)
    # Round 2 at w = (2, 1): the anchor is w - pi/2 = (3.45, 1.25), the residual 1.8 - 4 = -2.2,
    # u = (1.55 - .1 [-1.1 + 2 (-1.9)], .25 - .1 [-1.1 + 2 (-1)]) = (2.04, .56), and the change
    # (.49 + .04, .31 - .44).
    arrays, _, _ = client(context).fit(
        column(2, 1, 8), config(duals="client", version=1, server_round=2, groups="center:3")
    )
    assert_allclose(np.ravel(arrays), [0.53, -0.13, 8], atol=1e-14)


def test_a_hand_shake_asks_for_the_number_of_examples() -> None:
    assert client().fit([], {"handshake": True, "groups": "nothing:0"}) == ([], 1, {})


def test_a_client_that_lost_its_state_refuses() -> None:
    message = config(version=3, server_round=4, groups="center:3")
    with pytest.raises(ValueError, match=r"variables of round 3, but it holds .* \[\]"):
        client().fit(FIRST[:3], message)
    with pytest.raises(RuntimeError, match="has not been trained yet"):
        client().personal_arrays()


def test_an_array_without_gradient_cannot_be_optimised() -> None:
    text = "The server optimises seen, which the client's model does not train"
    with pytest.raises(ValueError, match=text) as error:
        client().fit(
            column(3, 0.5, 7, 1, 0, 7), config(shared="w,b,seen", groups="center:3,start:3")
        )
    assert "Give FedADMM(averaged=...) a pattern that leaves it out." in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "groups", "text"),
    [
        (FIRST[:2] + FIRST[3:], "center:2,start:2", "a model of 2 arrays, the client's has 3"),
        ([np.zeros(2), *FIRST[1:]], "center:3,start:2", "'w' of shape (2,), the client's model"),
        (FIRST[:4], "center:3,start:2", "announced 'center:3,start:2' but sent 4 arrays"),
    ],
)
def test_a_message_that_does_not_fit_is_refused(arrays: Any, groups: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        client().fit(arrays, config(groups=groups))


def test_no_data_is_refused() -> None:
    with pytest.raises(ValueError, match="train_loader is empty"):
        client(loader=[]).fit(FIRST, config())
