"""Models with two heads: how one is made of a plain model, and what it computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from clients import RoutedHeads, TwoHeaded
from clients.toolkit.models.heads import mean_discrepancy
from tests.support.federation import make_model
from tests.support.refusals import refused


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# --- Splitting ----------------------------------------------------------------------------------


class Net(nn.Module):
    """Its last linear layer is not the last module that it defines, nor the last it uses."""

    def __init__(self, after: Any = lambda logits: logits, twice: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.out = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.after, self.twice = after, twice

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.drop(self.body(inputs))
        logits = self.out(self.out(features) if self.twice else features)
        result: Tensor = self.after(logits)
        return result


@pytest.mark.parametrize("kind", [TwoHeaded, RoutedHeads])
@pytest.mark.parametrize("model", [make_model(), Net(), nn.Linear(3, 2)], ids=lambda m: type(m))
def test_a_model_is_split_at_its_last_linear_layer(kind: Any, model: nn.Module) -> None:
    before = copy.deepcopy(model.state_dict())
    two = kind.of(model)
    inputs = torch.randn(5, 3)
    assert torch.equal(two.head(two.features(inputs)), model(inputs))
    assert torch.equal(two.personal_head(two.features(inputs)), model(inputs))
    # Of its own parameters: the model is left as it is.
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(two.head.weight + 1, two.personal_head.weight)
    copied = copy.deepcopy(two)  # in the middle of a federation, as cohorts do
    assert torch.equal(copied(inputs), two(inputs))


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda logits: logits.softmax(1)),
        Net(lambda logits: logits.squeeze(0)),
        Net(lambda logits: logits.detach()),
        Net(twice=True),
    ],
)
def test_a_model_that_does_not_end_there_is_refused(net: nn.Module) -> None:
    two = TwoHeaded.of(net)
    for _ in range(2):
        with refused(ValueError, "Net ... 'out'"):
            two(torch.randn(5, 3))


def test_a_model_without_a_linear_layer_is_refused() -> None:
    with refused(ValueError, "Conv2d", "TwoHeaded(base, head)"):
        TwoHeaded.of(nn.Conv2d(1, 2, 3))
    with refused(ValueError, "Tanh"):
        RoutedHeads(nn.Linear(3, 4), nn.Tanh())
    with refused(ValueError, "(3, 5, 2)"):  # features that are no vectors
        routed()(torch.zeros(3, 5, 2, dtype=torch.float64))


def test_two_modules_of_ones_own_will_do() -> None:
    base, head = nn.Tanh(), nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    inputs = torch.randn(4, 3)
    assert torch.equal(TwoHeaded(base, head)(inputs), 2 * head(inputs.tanh()))
    routed = RoutedHeads(base, head)
    product = head[2].weight @ head[0].weight  # type: ignore[operator]
    assert torch.allclose(routed.context(), product.sum(0))
    assert routed(inputs).shape == (4, 2)


# --- Routing (docs/methods/fedcp.md, E1) --------------------------------------------------------


def routed() -> RoutedHeads:
    """Return the model of the worked example: h is the input, K = 2, three classes."""
    head = nn.Linear(2, 3, dtype=torch.float64)
    model = RoutedHeads(nn.Identity(), head)
    linear: Any = model.policy[0]
    with torch.no_grad():
        model.personal_head.weight.copy_(tensor((0.5, -0.2), (0.1, 0.4), (0.3, 0.3)))  # type: ignore[operator]
        linear.weight.copy_(tensor((0.2, 0.1), (-0.3, 0.5), (0.4, -0.1), (0.0, 0.6)))
        linear.bias.copy_(tensor(0.1, 0.0, -0.1, 0.05))
    return model


def test_features_are_routed_by_hand() -> None:
    model, h = routed(), tensor((1.0, 2.0))
    context = model.context()
    assert_allclose(context.numpy(), [0.9, 0.5], atol=1e-12)
    gated = nn.functional.normalize(context, dim=0) * h
    assert_allclose(gated.numpy(), [[0.8741572761, 0.9712858624]], atol=1e-8)
    shares = model.route(h, context).detach()
    assert_allclose(shares.numpy(), [[0.5363434504, 0.1731938793]], atol=1e-8)
    assert_allclose((shares * h).numpy(), [[0.5363434504, 0.3463877586]], atol=1e-8)
    assert_allclose(((1 - shares) * h).numpy(), [[0.4636565496, 1.6536122414]], atol=1e-8)
    expected = model.personal_head(shares * h) + model.head((1 - shares) * h)
    assert torch.equal(model(h), expected)


def test_noise_is_for_training_only() -> None:
    model, h = routed(), tensor((1.0, 2.0)).expand(4000, 2)
    plain = model.route(h, model.context())
    assert torch.equal(plain[0], plain[-1])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noisy = model.route(h, model.context(), noise=True)
    assert noisy.std(0).min() > 0.1
    assert noisy.min() > 0
    assert noisy.max() < 1


def test_the_discrepancy_by_hand() -> None:
    x = tensor((0.0, 1.0, 2.0), (1.0, 1.0, 0.0), (2.0, 0.0, 1.0)).requires_grad_()
    y = tensor((1.0, 1.0, 1.0), (0.0, 2.0, 2.0), (3.0, 0.0, 0.0))
    assert mean_discrepancy(x, y).item() == pytest.approx(0.0689357734, abs=1e-8)
    same = mean_discrepancy(x, x.detach())
    assert same.item() == pytest.approx(0, abs=1e-12)
    same.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(x.grad).all()
