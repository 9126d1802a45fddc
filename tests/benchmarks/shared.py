"""What the benchmarks share: a file of the runs that are done, the clients, tables, settings."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, TypeVar, get_type_hints

import torch
from flwr.app import Context
from torch import nn

from clients import Minibatches, accuracy
from simulations.data.federated import FederatedData

Line = TypeVar("Line", bound=tuple[Any, ...])


def read(path: Path, kind: type[Line]) -> list[Line]:
    """Return the lines of a CSV file as named tuples of a kind; none where there is no file."""
    if not path.exists():
        return []
    types = get_type_hints(kind).values()
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return [kind(*(of(text) for of, text in zip(types, row, strict=True))) for row in rows]


def append(path: Path, lines: Sequence[Any]) -> None:
    """Write named tuples of one kind behind the others, all at once."""
    heads = [] if path.exists() else [lines[0]._fields]
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([*heads, *lines])


def client_fn_of(
    client_class: Callable[..., Any],
    data: FederatedData,
    model: Callable[[], nn.Module],
    batch_size: int,
) -> Callable[[Context], Any]:
    """Return the clients of a classification, tested on samples of their own."""

    def client_fn(context: Context) -> Any:
        samples = data.clients[int(context.node_config["partition-id"])]
        return client_class(
            context,
            model(),
            Minibatches(*samples.train, batch_size),
            nn.CrossEntropyLoss(),
            test_loader=[samples.test],
            metrics={"accuracy": accuracy},
        )

    return client_fn


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


def percent(share: Any) -> float:
    """Return a share in percent, without the rounding errors of a mean over clients."""
    return round(100 * float(share), 4)


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation, of which one value has none."""
    return f"{mean(values):.1f}" + (f" ± {pstdev(values):.1f}" if len(values) > 1 else "")


def prepare(level: int = logging.ERROR) -> None:
    """Use one thread, and show no warnings and little of Flower's log."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(level)
