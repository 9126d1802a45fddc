"""Which parameters a selector names as personal, the split input, and what is refused."""

import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from clients.toolkit.models.personalization import (
    SplitInput,
    input_layers,
    output_layers,
    split_input,
)
from simulations.data import ClientData, FederatedData
from simulations.problems.models import build
from tests.support.refusals import refused

Select = Callable[[nn.Module, int], str]


def model_of(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64)
    client = ClientData((x, y), None, (x, y))
    return build(name, FederatedData("made-up", [client], None, "classification", shape, classes))


def parts(model: nn.Module, pattern: str) -> tuple[list[str], list[str]]:
    """Personal and other names of the state_dict, as FedAPM's `re.search` divides them."""
    names = list(model.state_dict())
    personal = [name for name in names if re.search(pattern, name)]
    return personal, [name for name in names if name not in personal]


def size(model: nn.Module, names: list[str]) -> int:
    return sum(model.state_dict()[name].numel() for name in names)


def normalised() -> nn.Module:
    """Two convolutions with batch norm, a nested block with one more, and a head."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 2, 3),
            bn1=nn.BatchNorm2d(2),
            relu=nn.ReLU(),
            block=nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)),
            flatten=nn.Flatten(),
            head=nn.Linear(3, 2),
        )
    )


def test_parts_have_the_sizes_of_the_papers_table() -> None:
    """docs/methods/fedapm-notes.md, P14: CIFAR-10 with output, KU-HAR with split input."""
    cnn = model_of("cnn-cifar", (3, 32, 32), 10)
    v, u = parts(cnn, output_layers(cnn, 2))
    assert (size(cnn, v), size(cnn, u)) == (263_562, 5_088)
    assert parts(cnn, input_layers(cnn, 2)) == (u, v)

    har = model_of("har", (6, 128), 8)
    assert isinstance(har, SplitInput)
    v, u = parts(har, split_input(har))
    assert (size(har, v), size(har, u)) == (51_904, 368_910)


def test_names_are_matched_whole() -> None:
    """Layer '1' is neither '11' nor '2.1', and the dot is a dot."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)), nn.Sequential(nn.Linear(2, 2)))
    assert parts(model, input_layers(model, 2))[0] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert parts(model, output_layers(model, 1))[0] == ["12.0.weight", "12.0.bias"]
    assert re.search(input_layers(model, 2), "10weight") is None


def test_parameters_beside_submodules() -> None:
    """A parameter that stands in a module is a layer of its own, without what is nested in it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.fc = nn.Linear(2, 2)

    inner = nn.Sequential(OrderedDict(a=Scaled(), b=nn.Linear(2, 2)))
    assert parts(inner, input_layers(inner, 1))[0] == ["a.scale"]
    assert parts(inner, input_layers(inner, 2))[0] == ["a.scale", "a.fc.weight", "a.fc.bias"]
    model = Scaled()
    assert parts(model, input_layers(model, 1)) == (["scale"], ["fc.weight", "fc.bias"])
    assert parts(model, output_layers(model, 1)) == (["fc.weight", "fc.bias"], ["scale"])


@pytest.mark.parametrize("select", [input_layers, output_layers])
def test_affine_weights_go_with_their_layer_and_statistics_stay_local(select: Select) -> None:
    """docs/methods/fedapm-notes.md, P4."""
    model = normalised()
    v, u = parts(model, select(model, 1))
    affine = ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"]
    buffers = [name for name, _ in model.named_buffers()]
    assert len(buffers) == 6  # mean, variance and count of two
    assert set(v) == {*(affine if select is input_layers else ["head.weight", "head.bias"])} | {
        *buffers
    }
    assert set(v) | set(u) == set(model.state_dict())
    v, u = parts(model, input_layers(model, 2))
    assert u == ["head.weight", "head.bias"]
    assert parts(model, output_layers(model, 2))[1] == affine


def split_model(personal: nn.Module, shared: nn.Module, upper: nn.Module) -> SplitInput:
    return SplitInput(
        personal=personal, shared=shared, upper=upper, split=lambda x: (x[:, :2], x[:, 2:])
    )


def test_split_input_feeds_each_part_its_portion() -> None:
    """By hand: personal gives 1 + 2 = 3, shared 10 * 3 = 30; the upper layer their difference."""

    def filled(weights: list[list[float]]) -> nn.Linear:
        layer = nn.Linear(len(weights[0]), len(weights), bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(weights))
        return layer

    model = split_model(filled([[1.0, 1.0]]), filled([[10.0]]), filled([[1.0, -1.0]]))
    assert model(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[3.0 - 30.0]]
    assert split_input(model) == "^personal[.]"
    assert parts(model, split_input(model)) == (
        ["personal.weight"],
        ["shared.weight", "upper.weight"],
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "n", "named"),
    [
        (nn.Sequential(nn.ReLU()), 1, "Sequential"),
        (nn.Linear(2, 2), 1, "FedADMM"),
        (normalised(), 0, "n is 0"),
        (normalised(), 3, "conv1, block.0, head"),
        (tied(), 1, "'0.weight'"),
    ],
)
@pytest.mark.parametrize("select", [input_layers, output_layers])
def test_what_cannot_be_divided(select: Select, model: nn.Module, n: int, named: str) -> None:
    with refused(ValueError, named):
        select(model, n)


def test_split_inputs_that_cannot_be() -> None:
    with refused(TypeError, "SplitInput", "Linear"):
        split_input(nn.Linear(1, 1))  # type: ignore[arg-type]
    layer = nn.Linear(2, 2)
    with refused(ValueError, "'personal.weight'", "'shared.weight'"):
        split_input(split_model(layer, layer, nn.Linear(4, 1)))
    model = split_model(nn.Linear(2, 2), nn.Linear(1, 1), nn.Linear(3, 1))
    model.split = lambda x: x[:, :2]
    with refused(TypeError, "split(inputs)", "Tensor"):
        model(torch.zeros(1, 3))
