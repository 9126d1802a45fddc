"""Networks of the comparison files in docs/results and of the benchmarks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from simulations.data.federated import FederatedData


def filters(first: int, second: int) -> list[nn.Module]:
    """Return the layers of a network for 8 x 8 digits in front of its dense ones."""
    return [
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, first, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
    ]


def digits_cnn(data: FederatedData) -> nn.Module:
    """Return a network for 8 x 8 digits: 18,154 parameters."""
    return nn.Sequential(*filters(16, 32), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10))


def quickstart_net(data: FederatedData) -> nn.Module:
    """Return the network of Flower's PyTorch quickstart."""
    layers = {
        "conv1": nn.Conv2d(3, 6, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(400, 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def resnet(data: FederatedData) -> nn.Module:
    """Return torchvision's ResNet-18."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)
    return model
