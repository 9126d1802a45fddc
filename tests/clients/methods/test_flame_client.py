"""What FLAMEClient decides for itself: its hybrid model, its solver, what it keeps.

See docs/methods/flame.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import nn

from clients import FLAMEClient, accuracy
from fl_admm_strategies.algorithms.flame import FLAMERule
from fl_admm_strategies.algorithms.shared.consensus import ProximalInstruction
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from fl_admm_strategies.runtime.messages.stamp import made_by
from tests.clients.methods.messages import changed

Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Sign(nn.Module):
    """Logits (-u x, u x): class 1 where u x > 0."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([-self.u * inputs, self.u * inputs], dim=1)


def batches(positive: int, negative: int) -> Batches:
    """Return points x = 1, so many of class 1 and of class 0."""
    labels = torch.tensor([1] * positive + [0] * negative)
    return [(torch.ones(len(labels)), labels)]


def client_of(test: Batches, validation: Batches | None = None, **settings: Any) -> FLAMEClient:
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    return FLAMEClient(
        context,
        Sign(),
        batches(1, 1),
        nn.CrossEntropyLoss(),
        test_loader=test,
        validation_loader=validation,
        **({"metrics": {"accuracy": accuracy}} | settings),
    )


def model(u: float) -> dict[str, NDArray[np.float32]]:
    return {"u": np.array([u], dtype=np.float32)}


def evaluate(client: FLAMEClient, personal: float, shared: float) -> dict[str, Any]:
    asked = ClientInstruction(
        {"personal": model(personal), "global": model(shared)}, {"version": 0, "server-round": 1}
    )
    loss, _, metrics = client.evaluate(asked.flat(), asked.full_config())
    assert loss == metrics["personal-loss"]
    return metrics


def test_the_hybrid_model_is_chosen_on_the_data_that_its_name_says() -> None:
    # u = 1 predicts class 1, u = -1 class 0. Test data: 3 of class 1, 1 of class 0; validation
    # data the other way round, so the validation's choice is the worse one on the test data.
    client = client_of(batches(3, 1), batches(1, 3))
    metrics = evaluate(client, 1.0, -1.0)
    assert metrics["personal-accuracy"] == 0.75
    assert metrics["global-accuracy"] == 0.25
    assert metrics["hm-oracle-accuracy"] == 0.75
    assert metrics["hm-oracle-personal"] == 1
    assert metrics["hm-oracle-loss"] == metrics["personal-loss"]
    assert metrics["hm-val-accuracy"] == 0.25  # its test accuracy, not that of its validation data
    assert metrics["hm-val-personal"] == 0
    assert metrics["hm-val-loss"] == metrics["global-loss"]
    swapped = evaluate(client, -1.0, 1.0)
    assert swapped["hm-oracle-accuracy"] == 0.75
    assert swapped["hm-oracle-personal"] == 0


def test_the_lower_loss_decides_between_equal_accuracies() -> None:
    # Both are right on 3 of 4; being surer costs more on the fourth: log(1 + e^-2u) on the right
    # ones and log(1 + e^2u) on the wrong one are 0.56 on average for u = 0.5 and 1.02 for u = 2.
    metrics = evaluate(client_of(batches(3, 1), batches(3, 1)), 2.0, 0.5)
    assert metrics["personal-accuracy"] == metrics["global-accuracy"] == 0.75
    for kind in ("hm-oracle", "hm-val"):
        assert metrics[f"{kind}-personal"] == 0
        assert metrics[f"{kind}-loss"] == metrics["global-loss"] < metrics["personal-loss"]


def test_it_starts_from_its_own_model_and_is_pulled_to_its_copy_of_w() -> None:
    # f = log(1 + e^-2u) and log(1 + e^2u), half each: f' = tanh(u). With a = rho = 1/2 the copy is
    # w_i = theta - pi/rho. From theta = 1 with w_i = -1, so pi/rho = 2, one step is
    # 1 - 0.1 (tanh 1 + 1 (1 - (-1))) = 0.8 - 0.1 tanh 1.
    rule = FLAMERule(published=True, lam=1.0, a=0.5, rho=0.5)
    first = ProximalInstruction(
        model=model(-1),
        start={"theta": np.ones(1, np.float32), "dual": np.full(1, 2, np.float32)},
        rule=rule.text(),
        duals="strategy",
        optimised=["u"],
        lr=0.1,
        local_epochs=1,
        wants_step_sum=False,
    )
    client = client_of(batches(1, 1))
    (theta,), num_examples, metrics = client.fit(*changed(first))
    assert theta == pytest.approx(0.8 - 0.1 * np.tanh(1), rel=1e-6)
    assert num_examples == 2
    # f(1) = (log(1 + e^-2) + log(1 + e^2)) / 2 = 1 + log(1 + e^-2)
    loss = pytest.approx(1 + np.log(1 + np.exp(-2)), rel=1e-6)
    assert metrics == {"initial-loss": loss, "loss": loss, **made_by("FLAME")}
    assert client.personal_arrays() == {"u": theta}
    # In the next round it holds its row: pi/rho = (theta + 1 + 2)/2, w_i = theta - pi/rho.
    w_i = theta - (theta + 3) / 2
    later = changed(first, model=model(0), start=None, version=1, server_round=2)
    (second,), _, _ = client.fit(*later)
    assert second == pytest.approx(theta - 0.1 * (np.tanh(theta) + theta - w_i), rel=1e-6)
