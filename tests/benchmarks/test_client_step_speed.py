"""One client's step without waste, beside what it was made of before.

Run with `pytest tests/benchmarks/test_client_step_speed.py --benchmark-enable`. Compare within a
group. "Epoch" is a pass over 200 samples of 10 numbers in batches of 20 (FPFC's synthetic data,
softmax), "personal phase" FedAPM's v-step on 500 images of CIFAR-10's shape (E_v = 5, batches of
50, personal "^fc"). Nothing here asserts a time. Without --benchmark-enable, few samples show that
it works.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from clients import FedAPMClient, Minibatches
from clients.toolkit.data.batches import split_batch
from clients.toolkit.solving.objective import LocalObjective, ProximalTerm
from clients.toolkit.solving.solvers import LocalProblem, gradient_descent
from simulations.data import ClientData, FederatedData
from simulations.problems.models import build

LOADERS = ["DataLoader", "DataLoader by slices", "Minibatches"]


def loader_of(kind: str, x: Tensor, y: Tensor, size: int) -> Iterable[Any]:
    samples = TensorDataset(x, y)
    if kind == "DataLoader":
        return DataLoader(samples, size, shuffle=True)
    slices = BatchSampler(RandomSampler(samples), size, drop_last=False)
    by_slices = DataLoader(samples, sampler=slices, batch_size=None)
    return Minibatches(x, y, size) if kind == "Minibatches" else by_slices


@pytest.mark.parametrize("kind", LOADERS)
def test_epoch(benchmark: Any, kind: str) -> None:
    benchmark.group = "epoch of softmax regression, 200 samples in batches of 20"
    torch.set_num_threads(1)
    n = 200 if benchmark.enabled else 40
    loader = loader_of(kind, torch.randn(n, 10), torch.arange(n) % 10, 20)
    problem = LocalProblem(
        nn.Linear(10, 10), loader, nn.CrossEntropyLoss(), split_batch, torch.device("cpu")
    )
    descend = partial(gradient_descent, lr=0.1, epochs=1, full_batch=False)
    benchmark(descend, problem, LocalObjective())


def cifar_cnn() -> nn.Module:
    x = torch.zeros(1, 3, 32, 32)
    own = ClientData((x, torch.zeros(1)), None, (x, torch.zeros(1)))
    data = FederatedData("made-up", [own], np.array([0]), "classification", (3, 32, 32), 10)
    return build("cnn-cifar", data)


@pytest.mark.parametrize("how", ["in every epoch", "once"])
def test_personal_phase(benchmark: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.group = "FedAPM's personal phase, shared features computed"
    torch.set_num_threads(1)
    if how == "in every epoch":
        monkeypatch.setattr(
            "clients.toolkit.round.torch_client.frozen_layers_applied", lambda own: own
        )
    n = 500 if benchmark.enabled else 10
    loader = Minibatches(torch.randn(n, 3, 32, 32), torch.arange(n) % 10, 50)
    context = Context(1, 2, {}, RecordDict(), {})
    client = FedAPMClient(context, cifar_cnn(), loader, nn.CrossEntropyLoss())
    own = {n: p.detach().clone() for n, p in client.model.named_parameters() if n[:2] == "fc"}
    objective = LocalObjective([ProximalTerm(0.1, own)], moving=[*own])
    benchmark(client.minimise, objective, lr=0.01, epochs=5)
