"""What the base adds to a round of FedAvg: seeds, versions, checks of replies, metrics by client.

Both sides average, over the same grid, with the same app: Flower's own `FedAvg`, and the least
strategy of this library. The work is that of McMahan et al. 2017: 10 clients a round, 600 images
each, the network "2NN" (199,210 parameters), one epoch of SGD in batches of 10.

Run with `pytest tests/benchmarks/test_overhead.py --benchmark-enable -s`. The two take turns, and
what is compared is the processor time of a round (all of it is in this process, on one thread),
so that a busy machine changes little. What counts is the ratio of the medians, in `extra_info` too.
Aim: at most 1.10. Nothing here asserts a time.
"""

from __future__ import annotations

import copy
import time
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import flwr.serverapp.strategy as flowers
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fl_admm_strategies import FedAvg, InProcessGrid

NUM_CLIENTS, NUM_IMAGES, BATCH = 10, 600, 10
FEW = 10  # images are enough to see that it runs


@cache
def first_two_nn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def two_nn() -> nn.Module:
    return copy.deepcopy(first_two_nn())


def fedavg_app(num_images: int) -> ClientApp:
    images = torch.randn(num_images, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(num_images) % 10
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = two_nn()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for start in range(0, num_images, BATCH):
            batch = slice(start, start + BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": num_images}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def round_seconds(strategy: Any, num_rounds: int, num_images: int) -> list[float]:
    """Return the seconds of every round: `evaluate_fn` is called before the first, after each."""
    times: list[float] = []

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        times.append(time.process_time())

    grid = InProcessGrid(fedavg_app(num_images), NUM_CLIENTS)
    strategy.start(grid, ArrayRecord(two_nn().state_dict()), num_rounds, evaluate_fn=evaluate_fn)
    return [after - before for before, after in pairwise(times)]


def test_a_round_beside_fedavg(benchmark: Any) -> None:
    turns, num_rounds, images = (4, 2, NUM_IMAGES) if benchmark.enabled else (1, 1, FEW)
    theirs: list[float] = []
    ours: list[float] = []

    def both() -> None:
        for _ in range(turns):
            theirs.extend(round_seconds(flowers.FedAvg(fraction_evaluate=0.0), num_rounds, images))
            ours.extend(round_seconds(FedAvg(fraction_evaluate=0.0), num_rounds, images))

    benchmark.pedantic(both, rounds=1)
    ratio = median(ours) / median(theirs)
    benchmark.extra_info.update(ratio=ratio, fedavg=median(theirs), ours=median(ours))
    print(f"\nFedAvg {median(theirs):.3f} s, ours {median(ours):.3f} s a round: ratio {ratio:.3f}")
    assert len(ours) == len(theirs) == turns * num_rounds
