"""One by one against together: what a round costs the clients of a node.

    PYTHONPATH=. python tests/benchmarks/cohort_training.py

prints a line for every federation: the processor time of a round of all its clients, `fit` by `fit`
and by `fit_together`, and their ratio. The two take turns, and of each the fastest turn counts.
Everything is on one thread. Nothing here asserts a time; the load of the machine is printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch import nn
from torch.utils.data import TensorDataset

from clients import Minibatches, SGDClient
from clients.toolkit.solving.cohort import fit_together
from simulations.data import load

EPOCHS, TURNS = 10, 3


@dataclass(frozen=True)
class Federation:
    """Clients with as many samples as `sizes` has it; `batch` None: all of them in every step."""

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: Sequence[int]
    batch: int | None = None


def s1(clients: int) -> list[int]:
    """Return the sizes of scenario S1, which are lognormal: 200 to 10,000."""
    data = load("synthetic-s1", 1, clients=clients)
    return [len(client.train[0]) for client in data.clients]


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5)),
        *(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10)),
    )


def federations() -> list[Federation]:
    softmax = lambda: nn.Linear(60, 10)  # noqa: E731
    image, digit = (1, 28, 28), (64,)
    return [
        Federation("FPFC's S1, 20 clients", softmax, (60,), s1(20)),
        Federation("FPFC's S1, 100 clients", softmax, (60,), s1(100)),
        Federation("softmax 610, 100 x 16", softmax, (60,), [16] * 100),
        Federation("softmax 610, 100 x 100", softmax, (60,), [100] * 100),
        Federation("softmax 610, 20 x 100", softmax, (60,), [100] * 20),
        Federation("softmax 610, 20 x 100 in 16s", softmax, (60,), [100] * 20, 16),
        Federation("MLP 2,410, 20 x 100 in 16s", lambda: mlp(64, 32, 10), digit, [100] * 20, 16),
        Federation("MLP 2,410, 20 x 500", lambda: mlp(64, 32, 10), digit, [500] * 20),
        Federation("MLR 7,850, 20 x 100 in 16s", lambda: mlp(784, 10), image, [100] * 20, 16),
        Federation("MLR 7,850, 20 x 200", lambda: mlp(784, 10), image, [200] * 20),
        Federation("MLP 25,450, 20 x 100 in 16s", lambda: mlp(784, 32, 10), image, [100] * 20, 16),
        Federation(
            "MLP 109,386, 20 x 48 in 16s", lambda: mlp(784, 128, 64, 10), image, [48] * 20, 16
        ),
        Federation("MLP 109,386, 20 x 200", lambda: mlp(784, 128, 64, 10), image, [200] * 20),
        Federation("CNN 6,582 (one by one)", cnn, image, [64] * 10, 16),
    ]


@cache
def samples(shape: tuple[int, ...], size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *shape, generator=generator)
    return TensorDataset(x, torch.randint(10, (size,), generator=generator))


def clients_of(federation: Federation) -> list[Any]:
    """Return what every client of a federation is to do."""
    config = {"lr": 0.01, "local-epochs": EPOCHS, "seed": 1, "server-round": 1}
    jobs = []
    for client, size in enumerate(federation.sizes):
        context = Context(1, client + 2, {"partition-id": client}, RecordDict(), {})
        x, y = samples(federation.shape, size, client).tensors
        own = SGDClient(
            context,
            federation.model(),
            Minibatches(x, y, federation.batch) if federation.batch else [(x, y)],
            nn.CrossEntropyLoss(),
            full_batch=federation.batch is None,
        )
        jobs.append((own, list(own.arrays().values()), config))
    return jobs


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(federation: Federation) -> tuple[float, float]:
    """Return the seconds of a round of all clients, one by one and together."""
    alone, together = [], []
    for _ in range(TURNS):
        jobs = clients_of(federation)
        alone.append(seconds(lambda: [own.fit(a, c) for own, a, c in jobs]))  # noqa: B023
        jobs = clients_of(federation)
        together.append(seconds(lambda: fit_together(jobs, True)))  # noqa: B023
    return min(alone), min(together)


def main() -> None:
    """Measure all federations."""
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} processors, {EPOCHS} epochs")
    for federation in federations():
        alone, together = measure(federation)
        print(
            f"{federation.title:32} one by one {1e3 * alone:7.1f} ms, together "
            f"{1e3 * together:7.1f} ms: {alone / together:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
