"""Processor time of a round beside a plain loop, fluke and Flower's own FedAvg, in one process.

    PYTHONPATH=. python tests/benchmarks/peers.py  # all cases and methods
    PYTHONPATH=. python tests/benchmarks/peers.py --case digits --method Ditto

All on one thread, with the same models, data, batches and numbers of steps; everybody takes part in
every round, and nobody evaluates. The plain loop is what one writes without a library: a model, an
iterator over batches and an optimizer for each client, no messages and no checks. fluke is
`pip install fluke-fl`; where it is not installed its column is empty. Flower's FedAvg has a node
for each client, in this process, and the client of its quickstart. Prints milliseconds of the
processor, the median over rounds of several turns, and what the others take as a multiple of ours.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import flwr.serverapp.strategy as flowers
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from clients import DittoClient, Minibatches, PFedMeClient, SGDClient, client_app
from fl_admm_strategies import Ditto, FedAvg, InProcessGrid, PFedMe

ROUNDS, TURNS = 4, 2  # rounds that are measured, after the first; and how often each has its turn
LR, LAM, INNER = 0.05, 1.0, 5


@dataclass(frozen=True)
class Case:
    """A federation.

    Attributes
    ----------
    clients, samples, batch_size, epochs : int
        Samples of each client.
    shape : tuple of int
        Of a sample.
    model : callable
    """

    clients: int
    samples: int
    batch_size: int
    epochs: int
    shape: tuple[int, ...]
    model: Callable[[], nn.Module]

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's samples: what they are changes no time."""
        return _data(self.samples, self.shape, client)

    @property
    def steps(self) -> int:
        """Mini-batches of a round."""
        return self.epochs * -(-self.samples // self.batch_size)


@cache
def _data(samples: int, shape: tuple[int, ...], client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(samples, *shape, generator=generator)
    return x, torch.randint(0, 10, (samples,), generator=generator)


def mlp(*sizes: int) -> Callable[[], nn.Module]:
    """Return what makes a network of linear layers with ReLU between them."""

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *layers[:-1])

    return make


def cnn() -> nn.Module:
    """Return LeNet-5's convolutions with one layer above them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(400, 10)),
    )


CASES = {
    "digits": Case(100, 18, 10, 3, (64,), mlp(64, 64, 10)),
    "MLP of 101,770": Case(60, 100, 20, 1, (784,), mlp(784, 128, 10)),
    "CNN": Case(30, 100, 20, 1, (1, 28, 28), cnn),
    "softmax": Case(1_000, 18, 10, 1, (64,), mlp(64, 10)),
    "digits, 3 steps": Case(1_000, 30, 10, 1, (64,), mlp(64, 64, 10)),
}
METHODS = ("FedAvg", "Ditto", "pFedMe")


def initial(case: Case) -> nn.Module:
    """Return the model that all begin with."""
    torch.manual_seed(0)
    return case.model()


# ----------------------------------------------------------------------------------------------
# Each runs some rounds and returns the processor's seconds of all but the first
# ----------------------------------------------------------------------------------------------


def apart(stamps: list[float]) -> list[float]:
    """Return the seconds between the ends of rounds."""
    return [after - before for before, after in pairwise(stamps)]


def ours(case: Case, method: str, rounds: int) -> list[float]:
    """Run this library's method, packed on one node in this process, which keeps its clients."""
    net = initial(case)
    options: dict[str, Any] = {"fraction_evaluate": 0.0, "lr": LR}
    strategy: Any
    if method == "pFedMe":
        client_class: Any = PFedMeClient
        strategy = PFedMe(
            lam=LAM, outer_lr=LR, local_rounds=case.steps, inner_steps=INNER, **options
        )
    elif method == "Ditto":
        client_class = DittoClient
        strategy = Ditto(lam=LAM, local_epochs=case.epochs, **options)
    else:
        client_class = SGDClient
        strategy = FedAvg(local_epochs=case.epochs, **options)

    @cache  # a model a client, as the others have it
    def model(client: int) -> nn.Module:
        return copy.deepcopy(net)

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        loader = Minibatches(*case.data(client), case.batch_size)
        return client_class(context, model(client), loader, nn.CrossEntropyLoss()).to_client()

    stamps: list[float] = []
    app = client_app(client_fn, num_clients=case.clients, keep_clients=True)
    with InProcessGrid(app, 1) as grid:
        strategy.start(
            grid,
            ArrayRecord(net.state_dict()),
            rounds + 1,
            on_round=lambda *_: stamps.append(time.process_time()),
        )
    return apart(stamps)


class Loop:
    """A client of the plain loop."""

    def __init__(self, case: Case, client: int, net: nn.Module) -> None:
        self.model, self.own = copy.deepcopy(net), copy.deepcopy(net)
        self.case, self.data = case, case.data(client)
        self.loss_fn = nn.CrossEntropyLoss()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of all epochs."""
        x, y = self.data
        for _ in range(self.case.epochs):
            for places in torch.randperm(len(x)).split(self.case.batch_size):
                yield x[places], y[places]

    def descend(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], near: list[Tensor] | None = None
    ) -> None:
        """Take one step of SGD, with a proximal term where there is something to be near to."""
        model.zero_grad()
        self.loss_fn(model(batch[0]), batch[1]).backward()
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                if near is not None:
                    parameter.grad.add_(parameter - near[place], alpha=LAM)
                parameter.add_(parameter.grad, alpha=-LR)

    def train(self, method: str, received: list[Tensor]) -> list[Tensor]:
        """Take part in a round; return the upload."""
        self.load(self.model, received)
        if method == "pFedMe":
            return self.envelope(received)
        for batch in self.batches():
            self.descend(self.model, batch)
        if method == "Ditto":
            for batch in self.batches():
                self.descend(self.own, batch, received)
        return [parameter.detach() for parameter in self.model.parameters()]

    def envelope(self, received: list[Tensor]) -> list[Tensor]:
        """Take pFedMe's steps: some of theta on a batch, then one of w."""
        w = [tensor.clone() for tensor in received]
        for batch in self.batches():
            for _ in range(INNER):
                self.descend(self.model, batch, w)
            for tensor, theta in zip(w, self.model.parameters(), strict=True):
                tensor.sub_(tensor - theta.detach(), alpha=LR * LAM)
        return w

    @staticmethod
    def load(model: nn.Module, arrays: list[Tensor]) -> None:
        """Overwrite a model."""
        with torch.no_grad():
            for parameter, array in zip(model.parameters(), arrays, strict=True):
                parameter.copy_(array)


def plain(case: Case, method: str, rounds: int) -> list[float]:
    """Run the plain loop."""
    net = initial(case)
    clients = [Loop(case, client, net) for client in range(case.clients)]
    model = [parameter.detach().clone() for parameter in net.parameters()]
    stamps = []
    for _ in range(rounds + 1):
        uploads = [client.train(method, model) for client in clients]
        model = [torch.stack(arrays).mean(0) for arrays in zip(*uploads, strict=True)]
        stamps.append(time.process_time())
    return apart(stamps)


def flower(case: Case, method: str, rounds: int) -> list[float] | None:
    """Run Flower's FedAvg with the client of its quickstart, a node for each."""
    if method != "FedAvg":
        return None
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        net, (x, y) = case.model(), case.data(client)
        arrays: Any = message.content["arrays"]
        net.load_state_dict(arrays.to_torch_state_dict())
        loader, loss_fn = Minibatches(x, y, case.batch_size), nn.CrossEntropyLoss()
        optimizer, running = torch.optim.SGD(net.parameters(), lr=LR), 0.0
        for _ in range(case.epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = loss_fn(net(inputs), targets)
                loss.backward()
                optimizer.step()
                running += loss.item()
        metrics = MetricRecord({"train_loss": running, "num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    stamps: list[float] = []
    strategy = flowers.FedAvg(fraction_evaluate=0.0)
    strategy.start(
        InProcessGrid(app, case.clients),
        ArrayRecord(initial(case).state_dict()),
        rounds + 1,
        evaluate_fn=lambda number, _: stamps.append(time.process_time()) if number else None,
    )
    return apart(stamps)


def fluke(case: Case, method: str, rounds: int) -> list[float] | None:
    """Run fluke's algorithm of the name; None where it is not installed."""
    try:
        from fluke import FlukeENV
        from fluke.algorithms.ditto import Ditto as FlukesDitto
        from fluke.algorithms.fedavg import FedAVG
        from fluke.algorithms.pfedme import PFedMe as FlukesPFedMe
        from fluke.data import FastDataLoader
    except ImportError:
        return None

    class Splitter:
        def assign(self, count: int, batch_size: int) -> Any:
            loaders = [
                FastDataLoader(
                    *case.data(client), num_labels=10, batch_size=batch_size, shuffle=True
                )
                for client in range(count)
            ]
            return (loaders, [None] * count), None

    stamps: list[float] = []

    class Clock:
        def end_round(self, round: int) -> None:  # noqa: A002 (fluke's name for it)
            stamps.append(time.process_time())

    settings = FlukeENV()
    settings.set_seed(0)
    settings.set_device("cpu")
    settings.set_inmemory(True)
    settings.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    net = initial(case)
    client: dict[str, Any] = {
        "batch_size": case.batch_size,
        "local_epochs": case.epochs,
        "loss": nn.CrossEntropyLoss,
        "optimizer": {"lr": LR},
        "scheduler": {"gamma": 1, "step_size": 1},
    }
    if method == "Ditto":
        client |= {"tau": case.epochs, "lam": LAM, "model": net}
    if method == "pFedMe":
        client |= {"k": INNER}
        client["optimizer"] = {"lr": LR, "lamda": LAM}
    kind = {"FedAvg": FedAVG, "Ditto": FlukesDitto, "pFedMe": FlukesPFedMe}[method]
    hyper = {"client": client, "server": {"weighted": True}, "model": net}
    algorithm = kind(case.clients, Splitter(), hyper)
    algorithm.attach(Clock())
    algorithm.run(rounds + 1, 1.0, finalize=False)
    return apart(stamps)


RUNNERS: dict[str, Callable[[Case, str, int], list[float] | None]] = {
    "ours": ours,
    "plain": plain,
    "fluke": fluke,
    "Flower": flower,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| case, clients | method | ours | plain loop | fluke | Flower |")
    print("|---|---|---|---|---|---|")
    for name in given.case or CASES:
        case = CASES[name]
        for method in given.method or METHODS:
            times: dict[str, list[float]] = {runner: [] for runner in RUNNERS}
            for _ in range(given.turns):
                for runner, run in RUNNERS.items():
                    times[runner] += run(case, method, given.rounds) or []
            found = {runner: median(each) for runner, each in times.items() if each}
            cells = [
                f"{found[r] * 1e3:.0f} ms ({found[r] / found['ours']:.1f})" if r in found else ""
                for r in RUNNERS
            ]
            cells[0] = f"{found['ours'] * 1e3:.0f} ms"
            print(f"| {name}, {case.clients:,} | {method} | {' | '.join(cells)} |", flush=True)
    if importlib.util.find_spec("fluke") is None:
        print("\nfluke is not installed: pip install fluke-fl")
    print(f"\nLoad {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.")


if __name__ == "__main__":
    main()
