"""Models: parameter counts of the spec, shapes, initial weights."""

import re

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, conv2d, linear, max_pool1d, max_pool2d

from simulations.data import ClientData, FederatedData
from simulations.problems.models import build, initialise, loss_of
from tests.support.refusals import refused


def data(shape: tuple[int, ...], classes: int | None = 10) -> FederatedData:
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64)
    client = ClientData((x, y), None, (x, y))
    task = "regression" if classes is None else "classification"
    return FederatedData("made-up", [client], np.array([0]), task, shape, classes)


IMAGES, VECTORS, REGRESSION = data((1, 28, 28)), data((60,)), data((14,), None)
CIFAR, HAR = data((3, 32, 32)), data((9, 128), 6)
# A data set that fits, for every model.
FITTING = {
    "softmax": VECTORS,
    "linear": REGRESSION,
    "cnn": IMAGES,
    "mlr": IMAGES,
    "mlp": IMAGES,
    "cnn-cifar": CIFAR,
    "har": HAR,
}


@pytest.mark.parametrize(
    ("name", "like", "personal", "d_v", "d_u"),
    [
        # docs/methods/fpfc-notes.md, P12: the head is what FPFC clusters; flame-notes.md, P12.
        ("softmax", VECTORS, "$^", 0, 610),
        ("linear", REGRESSION, "$^", 0, 15),
        ("cnn", IMAGES, "^head", 4010, 150 + 6 + 2400 + 16),
        ("mlr", IMAGES, "$^", 0, 7_850),
        ("mlp", IMAGES, "$^", 0, 109_386),
        # docs/methods/fedapm-notes.md, P14.
        ("cnn-cifar", CIFAR, "^fc", 263_562, 5_088),
        ("har", data((9, 128), 8), "^personal[.]", 51_904, 368_910),
        ("har", data((9, 128), 8), "^(personal|shared)[.]", 103_808, 317_006),
    ],
)
def test_parameter_counts_are_those_of_the_papers(
    name: str, like: FederatedData, personal: str, d_v: int, d_u: int
) -> None:
    counts = {part: p.numel() for part, p in build(name, like).named_parameters()}
    personal_count = sum(n for parameter, n in counts.items() if re.search(personal, parameter))
    assert (personal_count, sum(counts.values()) - personal_count) == (d_v, d_u)


@pytest.mark.parametrize(
    ("name", "convolutions", "linears"),
    [
        ("mlr", {}, ["fc"]),
        ("mlp", {}, ["fc1", "fc2", "fc3"]),  # flame.md, P12: 784-128-64-10
        ("cnn", {"conv1": 2, "conv2": 0}, ["head"]),  # fpfc-notes.md, P12
        ("cnn-cifar", {"conv1": 1, "conv2": 1}, ["fc1", "fc2"]),  # fedapm.md, P14
    ],
)
def test_a_model_is_the_one_of_its_paper(
    name: str, convolutions: dict[str, int], linears: list[str]
) -> None:
    """Convolutions by padding with ReLU and pooling, then layers with a ReLU between."""
    model = build(name, FITTING[name]).eval()
    p = dict(model.named_parameters())
    x = torch.randn(3, *FITTING[name].input_shape)
    h = x
    for layer, padding in convolutions.items():
        h = conv2d(h, p[f"{layer}.weight"], p[f"{layer}.bias"], padding=padding)
        h = max_pool2d(h.relu(), 2)
    h = h.flatten(1)
    for layer in linears:
        h = linear(h, p[f"{layer}.weight"], p[f"{layer}.bias"])
        h = h if layer == linears[-1] else h.relu()
    torch.testing.assert_close(model(x), h)


def test_har_is_the_one_of_the_spec() -> None:
    """docs/methods/fedapm-notes.md, P14: conv x3, a GRU a sensor, softmax over time, classifier."""
    model, x = build("har", data((6, 128), 8)).eval(), torch.randn(3, 6, 128)
    p = dict(model.named_parameters())
    sequences = []
    for part, sensor, channels in (
        ("personal", "accelerometer", x[:, :3]),
        ("shared", "gyroscope", x[:, 3:]),
    ):
        h = channels
        for layer in ("conv1", "conv2", "conv3"):
            weight, bias = p[f"{part}.{layer}.weight"], p[f"{part}.{layer}.bias"]
            h = max_pool1d(conv1d(h, weight, bias, padding=2).relu(), 2)
        assert h.shape == (3, 128, 16)
        gru = getattr(model.upper, f"gru_{sensor}")
        sequences.append(gru(h.transpose(1, 2))[0])
    steps = torch.cat(sequences, dim=1)
    hidden = linear(steps, p["upper.attention.0.weight"], p["upper.attention.0.bias"]).tanh()
    scores = linear(hidden, p["upper.attention.2.weight"], p["upper.attention.2.bias"])
    assert scores.shape == (3, 32, 6)
    weights = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
    pooled = torch.einsum("nth,ntd->nhd", weights, steps).reshape(3, 6 * 128)
    h = linear(pooled, p["upper.classifier.0.weight"], p["upper.classifier.0.bias"]).relu()
    expected = linear(h, p["upper.classifier.3.weight"], p["upper.classifier.3.bias"])
    torch.testing.assert_close(model(x), expected)
    # Dropout of 0.1 after each convolution and in the classifier.
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts == [0.1] * 7


def test_har_takes_total_acceleration_and_gyroscope_of_uci_har() -> None:
    """UCI HAR's channels: body acceleration, gyroscope, total acceleration, x y z of each."""
    nine = torch.randn(2, 9, 128)
    model = build("har", HAR).eval()
    six = build("har", data((6, 128), 6)).eval()
    six.load_state_dict(model.state_dict())
    both = torch.cat([nine[:, 6:9], nine[:, 3:6]], dim=1)
    torch.testing.assert_close(model(nine), six(both))


@pytest.mark.parametrize("scheme", ["pytorch", "normal"])
@pytest.mark.parametrize(("name", "like"), [("mlp", IMAGES), ("har", HAR)])
def test_initial_weights_follow_the_seed_alone(scheme: str, name: str, like: FederatedData) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.seed()  # whatever came before does not matter
        before = torch.get_rng_state()
        model = initialise(build(name, like), seed, scheme)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(1), weights(1))
    # But for a pair of the hundred thousands of numbers that may agree by chance.
    assert (weights(1) != weights(2)).float().mean() > 0.999


@pytest.mark.parametrize(
    ("name", "like", "named"),
    [
        ("softmx", VECTORS, ["softmx", "softmax", "cnn"]),
        ("softmax", IMAGES, ["(1, 28, 28)", "cnn", "mlr"]),
        ("har", data((128, 9)), ["(9, 128)", "(6, 128)", "mlr"]),
    ],
)
def test_models_that_do_not_exist_or_do_not_fit(
    name: str, like: FederatedData, named: list[str]
) -> None:
    with refused(ValueError, *named):
        build(name, like)


def test_the_loss_of_a_regression_is_half_the_squared_error() -> None:
    outputs, targets = torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0])
    assert loss_of("regression")(outputs, targets) == (1 + 9) / 2 / 2
