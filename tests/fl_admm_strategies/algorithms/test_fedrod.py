"""FedRoD by hand: a generic head that is everybody's and a personal one; docs/methods/fedrod.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients import FedRoDClient, TorchClient, TwoHeaded, accuracy, client_app
from clients.methods.fedrod import COUNTS, with_prior
from fl_admm_strategies import FedRoD
from fl_admm_strategies.messages import FedRoDInstruction
from tests.clients.methods.lines import new_context
from tests.clients.methods.messages import received
from tests.support.federation import Federation, dataset, initial_arrays, make_model
from tests.support.refusals import refused

LOGITS = torch.tensor([[1.0, 2.0, 0.5], [0.2, -1.0, 3.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2])


def two_headed() -> TwoHeaded:
    return TwoHeaded.of(make_model())


def client_of(
    client_class: type[TorchClient[Any]],
    make: Callable[[], nn.Module],
    context: Context,
    **more: Any,
) -> Any:
    data = dataset(int(context.node_config.get("partition-id", 2)))
    batch = data.tensors
    options = {"test_loader": [batch], "metrics": {"accuracy": accuracy}, "full_batch": True}
    return client_class(context, make(), [batch], nn.CrossEntropyLoss(), **options, **more)


def grid_of(client_class: Any, make: Callable[[], nn.Module], clients: int = 4) -> Federation:
    return Federation(
        client_app(lambda context: client_of(client_class, make, context).to_client()), clients
    )


def run(strategy: FedRoD, num_rounds: int = 3, **options: Any) -> Federation:
    grid = grid_of(FedRoDClient, two_headed)
    strategy.start(grid, ArrayRecord(two_headed().state_dict()), num_rounds, **options)
    return grid


# --- The losses (E1) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gamma", "expected"), [(0.0, 0.7702599809), (0.5, 0.5119044064), (1.0, 0.3417094782)]
)
def test_balanced_softmax_by_hand(gamma: float, expected: float) -> None:
    loss = F.cross_entropy(with_prior(LOGITS, torch.tensor([6, 1, 3]), gamma), LABELS)
    assert loss.item() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_a_class_without_samples_is_removed_and_leaves_no_nan(dtype: Any, gamma: float) -> None:
    logits = LOGITS.to(dtype, copy=True).requires_grad_()
    balanced = with_prior(logits, torch.tensor([6, 0, 3]), gamma)
    loss = F.cross_entropy(balanced.float(), LABELS, label_smoothing=0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    assert bool((logits.grad[:, 1] == 0).all()) == bool(gamma)
    short = with_prior(LOGITS, torch.tensor([6]), gamma)  # of the last classes there are none
    assert torch.equal(short, with_prior(LOGITS, torch.tensor([6, 0, 0]), gamma))
    if gamma:  # as if there were two classes
        rest = with_prior(LOGITS[:, [0, 2]], torch.tensor([6, 3]), gamma)
        expected = F.cross_entropy(rest, torch.tensor([0, 1])).item()
        assert loss.item() == pytest.approx(expected, abs=2e-3)


# --- A round ------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    # Features and generic head by the balanced loss alone, the personal head by its own alone.
    client = client_of(FedRoDClient, two_headed, new_context())
    first = {name: tensor.numpy() for name, tensor in two_headed().state_dict().items()}
    shared = {name: array for name, array in first.items() if "personal" not in name}
    asked = FedRoDInstruction(shared, "^personal_head[.]", 0.2, 1, gamma=0.7)
    upload, _, metrics = client.fit(*received(asked))

    inputs, labels = dataset(2).tensors
    counts = torch.bincount(labels, minlength=3)
    model = two_headed()
    features = model.features(inputs)
    generic = model.head(features)
    balanced = F.cross_entropy(generic + 0.7 * counts.log(), labels)
    both = generic.detach() + model.personal_head(features.detach())
    total = balanced + F.cross_entropy(both, labels)
    total.backward()  # type: ignore[no-untyped-call]
    expected = {
        name: (p - 0.2 * p.grad).detach().numpy()  # type: ignore[operator]
        for name, p in model.named_parameters()
    }
    for name, array in zip(shared, upload, strict=True):
        assert_allclose(array, expected[name], atol=1e-6)
    for name, array in client.personal_arrays().items():
        assert_allclose(array, expected[name], atol=1e-6)
        assert not np.allclose(array, first[name], atol=1e-4)
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert_array_equal(client.memory.latest()[COUNTS], counts.numpy())


def test_both_predictions_are_evaluated() -> None:
    strategy = FedRoD(lr=0.5, local_epochs=3)
    run(strategy, 2, collect=True)
    for i, own in strategy.evaluate_metrics[2].items():
        model = two_headed()
        arrays = strategy.models().personal[i]  # features, generic head, and its own
        model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in arrays.items()})
        inputs, labels = dataset(i).tensors
        with torch.no_grad():
            generic = model.head(model.features(inputs))
            both = generic + model.personal_head(model.features(inputs))
        assert torch.equal(model(inputs), both)
        expected = [F.cross_entropy(logits, labels).item() for logits in (both, generic)]
        assert [own["personal-loss"], own["global-loss"]] == pytest.approx(expected, rel=1e-5)
    shared = ["base.body.weight", "base.body.bias", "head.weight", "head.bias"]
    assert list(strategy.global_arrays) == shared


# --- Refusals -----------------------------------------------------------------------------------


def test_a_plain_model_is_refused_on_both_sides() -> None:
    with refused(TypeError, "TwoHeaded.of"):
        client_of(FedRoDClient, make_model, new_context())
    with refused(ValueError, "TwoHeaded.of"):
        FedRoD().start(grid_of(FedRoDClient, two_headed), initial_arrays(), 1)


def fit(model: nn.Module, batch: Any, loss_fn: Any = nn.CrossEntropyLoss()) -> None:  # noqa: B008
    two = TwoHeaded.of(model)
    first = {n: t.numpy() for n, t in two.state_dict().items() if "personal" not in n}
    client = FedRoDClient(new_context(), two, [batch], loss_fn)
    client.fit(*received(FedRoDInstruction(first, "^personal_head[.]", 0.1, 1, gamma=1.0)))


def test_what_is_no_classification_is_refused() -> None:
    inputs = torch.randn(4, 3)
    with refused(ValueError, "(4,)", "torch.float32"):
        fit(nn.Linear(3, 2), (inputs, torch.randn(4)), nn.MSELoss())
    fit(nn.Linear(3, 2), (inputs, torch.tensor([0, 1, -100, 0])))  # which the loss ignores
    with refused(ValueError, "FedRoDClient", "loss_fn"):
        FedRoDClient(new_context(), two_headed(), [(inputs, inputs)])
