"""What FLAMEClient decides for itself: its hybrid model, its solver, what it keeps.

See docs/methods/flame.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import nn

from clients import FLAMEClient, accuracy
from fl_admm_strategies.runtime.messages.records import ClientInstruction

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
