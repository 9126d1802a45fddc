"""Training and test of an ordinary project; `model` is one of the files beside this one."""

from collections import OrderedDict

import torch
from flwr.client import NumPyClient
from own.model import Net as Net
from own.model import load_data as load_data
from torch import nn

LR = 0.05


def train(net, loader, lr):
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def test(net, loader):
    net.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for inputs, targets in loader:
            scores = net(inputs)
            loss += nn.functional.cross_entropy(scores, targets, reduction="sum").item()
            right += (scores.argmax(1) == targets).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)


class FlowerClient(NumPyClient):
    def __init__(self, net, train_loader, test_loader):
        self.net, self.train_loader, self.test_loader = net, train_loader, test_loader

    def load(self, parameters):
        names = self.net.state_dict()
        arrays = (torch.tensor(array) for array in parameters)
        self.net.load_state_dict(OrderedDict(zip(names, arrays, strict=True)))

    def get_parameters(self, config):
        return [tensor.numpy() for tensor in self.net.state_dict().values()]

    def fit(self, parameters, config):
        self.load(parameters)
        loss = train(self.net, self.train_loader, LR)
        return self.get_parameters({}), len(self.train_loader.dataset), {"loss": loss}

    def evaluate(self, parameters, config):
        self.load(parameters)
        loss, accuracy = test(self.net, self.test_loader)
        return loss, len(self.test_loader.dataset), {"accuracy": accuracy}
