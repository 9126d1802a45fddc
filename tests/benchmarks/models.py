"""Networks of the comparison files in docs/results and of the benchmarks."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

import torch
from torch import Tensor, nn

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


def small_mlp(data: FederatedData) -> nn.Module:
    """Return a network with one hidden layer of 64 units."""
    size = prod(data.input_shape)
    layers = {
        "flat": nn.Flatten(),
        "hidden": nn.Linear(size, 64),
        "relu": nn.ReLU(),
        "head": nn.Linear(64, classes_of(data)),
    }
    return nn.Sequential(OrderedDict(layers))


class Recurrent(nn.Module):
    """A GRU over windows of a sensor, sixteen moments a step, and a head on its last state."""

    def __init__(self, channels: int, classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.gru = nn.GRU(16 * channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, windows: Tensor) -> Tensor:
        steps = windows.unflatten(2, (-1, 16)).transpose(1, 2).flatten(2)
        return self.head(self.gru(steps)[0][:, -1])


def gru(data: FederatedData) -> nn.Module:
    """Return a recurrent network for UCI HAR."""
    return Recurrent(data.input_shape[0], classes_of(data))


class Transformer(nn.Module):
    """One block of causal self-attention over characters, and a head on the last one."""

    def __init__(self, context: int, characters: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.1 * torch.randn(context, width))
        self.before, self.between, self.after = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.head = nn.Linear(width, characters)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters.long()) + self.position
        mixed = self.attention(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = weights.masked_fill(ahead, -torch.inf).softmax(-1)
        x = x + self.project((weights @ value).transpose(1, 2).flatten(2))
        x = x + self.feed(self.between(x))
        return self.head(self.after(x[:, -1]))


def transformer(data: FederatedData) -> nn.Module:
    """Return a small transformer for characters."""
    return Transformer(data.input_shape[0], classes_of(data))


def classes_of(data: FederatedData) -> int:
    """Return the number of classes."""
    assert data.num_classes is not None
    return data.num_classes
