"""Models: parameter counts of the spec, shapes, initial weights."""

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, max_pool2d

from simulations.data import ClientData, FederatedData, load
from simulations.models import build, initialise


def data(shape: tuple[int, ...], classes: int | None = 10) -> FederatedData:
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64)
    client = ClientData((x, y), None, (x, y))
    task = "regression" if classes is None else "classification"
    return FederatedData("made-up", [client], np.array([0]), task, shape, classes)


IMAGES, VECTORS, REGRESSION = data((1, 28, 28)), data((60,)), data((14,), None)


def sizes(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters()}


def test_parameter_counts_are_those_of_the_paper() -> None:
    """Spec §4, §4.1: softmax 610, linear 15, CNN head 4010 and 156 + 2416 in front of it."""
    assert sum(sizes(build("softmax", VECTORS)).values()) == 610
    assert sum(sizes(build("softmax", load("digits-swap", 0))).values()) == 650
    assert sum(sizes(build("linear", REGRESSION)).values()) == 15
    cnn = sizes(build("cnn", IMAGES))
    assert cnn["head.weight"] + cnn["head.bias"] == 4010
    shared = [n for name, n in cnn.items() if not name.startswith("head.")]
    assert shared == [150, 6, 2400, 16]


def test_softmax_gives_logits() -> None:
    model, x = build("softmax", VECTORS), torch.randn(5, 60)
    torch.testing.assert_close(model(x), x @ model.weight.T + model.bias)


def test_linear_gives_one_number_a_sample() -> None:
    """(n, 1) against labels (n,) would broadcast to (n, n) in the squared loss."""
    model, x = build("linear", REGRESSION), torch.randn(5, 14)
    assert model(x).shape == (5,)
    torch.testing.assert_close(model(x), x @ model.weight[0] + model.bias)
    assert model(x[:1]).shape == (1,)


def test_cnn_is_the_one_of_the_spec() -> None:
    model, x = build("cnn", IMAGES), torch.randn(3, 1, 28, 28)
    p = dict(model.named_parameters())
    h = max_pool2d(conv2d(x, p["conv1.weight"], p["conv1.bias"], padding=2).relu(), 2)
    h = max_pool2d(conv2d(h, p["conv2.weight"], p["conv2.bias"]).relu(), 2)
    assert h.shape == (3, 16, 5, 5)
    torch.testing.assert_close(model(x), h.flatten(1) @ p["head.weight"].T + p["head.bias"])


@pytest.mark.parametrize("scheme", ["pytorch", "normal"])
@pytest.mark.parametrize(("name", "like"), [("cnn", IMAGES), ("softmax", VECTORS)])
def test_initial_weights_follow_the_seed_alone(scheme: str, name: str, like: FederatedData) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.seed()  # whatever came before does not matter
        return torch.nn.utils.parameters_to_vector(
            initialise(build(name, like), seed, scheme).parameters()
        )

    assert torch.equal(weights(1), weights(1))
    # No single weight or bias is left as it was.
    assert (weights(1) != weights(2)).all()


def test_global_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    initialise(build("cnn", IMAGES), 7, "normal")
    initialise(build("cnn", IMAGES), 7, "pytorch")
    assert torch.equal(torch.rand(3), expected)


def test_schemes() -> None:
    """N(0, 1) everywhere; PyTorch's is uniform within +-1/sqrt(fan-in)."""
    model = build("cnn", IMAGES)
    w = torch.nn.utils.parameters_to_vector(initialise(model, 0, "normal").parameters())
    # 6582 numbers: 4 s.d. are .05 for the mean, .035 for the s.d.
    assert w.mean().item() == pytest.approx(0, abs=0.05)
    assert w.std().item() == pytest.approx(1, abs=0.035)
    head = initialise(model, 0, "pytorch").head
    assert 0.95 / 20 < max(head.weight.abs().max(), head.bias.abs().max()) <= 1 / 20


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("softmx", VECTORS, "unknown model 'softmx'. Did you mean 'softmax'.*softmax, linear, cnn"),
        ("softmax", REGRESSION, "use 'linear'"),
        ("softmax", IMAGES, r"shape \(1, 28, 28\): use 'cnn'"),
        ("linear", VECTORS, "use 'softmax' or 'cnn'"),
        ("cnn", VECTORS, r"shape \(60,\): use 'softmax'"),
        ("cnn", REGRESSION, "use 'linear'"),
    ],
)
def test_models_that_do_not_exist_or_do_not_fit(
    name: str, like: FederatedData, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, like)


def test_unknown_scheme() -> None:
    with pytest.raises(ValueError, match=r"scheme 'norm'.*mean 'normal'"):
        initialise(build("cnn", IMAGES), 0, "norm")
