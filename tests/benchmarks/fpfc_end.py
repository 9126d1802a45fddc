"""What a run of `FPFC()` has when it is over, on problems that it was not made for.

    python -m tests.benchmarks.fpfc_end --quick --csv quick.csv       # eight families
    python -m tests.benchmarks.fpfc_end 4x5 shared --seeds 1-3 --csv end.csv
    python -m tests.benchmarks.fpfc_end s1 --last 2000 --csv long.csv
    python -m tests.benchmarks.fpfc_end 50x100 --seeds 1 --methods FPFC --last 100 --csv large.csv
    python -m tests.benchmarks.fpfc_end --csv end.csv --print         # the tables of docs/methods

Real strategies and clients in this process. All methods of a seed have the same data, initial
model, participants, step size and local epochs; the oracle is FedAvg inside the true groups, with
the participants that all have. IFCA is told the number of groups and takes the best of five starts.
Ditto trains twice as much as the others: a model of its own beside the global one.

Every finished cell (family, seed, method) is appended to the CSV and not run again. The step size
and local epochs are the defaults of `FPFC` where a family says nothing else.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn
from torch.nn import functional

import clients
import fl_admm_strategies as library
from clients import CFLClient, Minibatches, accuracy, client_app, rmse
from fl_admm_strategies import FPFC, InProcessGrid
from fl_admm_strategies.algorithms.shared.clustered import (
    ClusteredState,
    ClusteredStrategy,
    Clusters,
)
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import Reply, from_array_record
from simulations.data.federated import ClientData, FederatedData
from simulations.data.images import read_images
from simulations.data.registry import load
from simulations.problems.models import build, initialise
from tests.benchmarks.models import filters

FIRST_LOOK, LAST_LOOK = 120, 300
Groups = NDArray[np.int64]
Parts = list[tuple[NDArray[Any], NDArray[Any], int]]
"""Inputs and labels of every client, and how many of them are to train on."""


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def dealt(name: str, parts: Parts, groups: Groups | None) -> FederatedData:
    """Return a classification of ten classes or fewer."""
    cut = [
        ClientData((x[:n], y[:n]), None, (x[n:], y[n:]))
        for x, y, n in (
            (torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64), n)
            for x, y, n in parts
        )
    ]
    classes = 1 + max(int(y.max()) for _, y, _ in parts)
    return FederatedData(name, cut, groups, "classification", parts[0][0].shape[1:], classes)


def teachers(
    seed: int,
    sizes: Sequence[int] = (5, 5, 5, 5),
    common: float = 0.0,
    own: float = 1.0,
    samples: tuple[int, int] = (50, 50),
    scaled: bool = False,
) -> FederatedData:
    """Return groups of linear teachers with 20 features and 10 classes.

    A group's teacher is `common` x everybody's + `own` x the group's. Clients have between the
    first and the second number of `samples` to train on, evenly spaced on a logarithmic scale, and
    200 to test. `scaled`: every client's features are of units of their own.
    """
    rng = np.random.default_rng([seed, *b"teachers"])
    groups = np.repeat(np.arange(len(sizes)), sizes)
    everybody = rng.normal(size=(20, 10))
    matrices = common * everybody + own * rng.normal(size=(len(sizes), 20, 10))
    numbers = np.geomspace(*samples, len(groups)).round().astype(int)
    parts: Parts = []
    for group, n in zip(groups, rng.permutation(numbers), strict=True):
        x = rng.normal(size=(n + 200, 20))
        y = (x @ matrices[group]).argmax(axis=1)
        scales = np.geomspace(0.3, 2, 20)[rng.permutation(20)] if scaled else 1.0
        parts.append((x * scales, y, int(n)))
    return dealt("teachers", parts, groups if max(sizes) > 1 else None)


def swap(*labels: int) -> NDArray[np.int64]:
    """Return the labels 0 to 9 with each pair of these exchanged."""
    mapped = np.arange(10)
    mapped[list(labels)] = np.array(labels).reshape(-1, 2)[:, ::-1].ravel()
    return mapped


SHIFTS = [(np.arange(10) + 3 * g) % 10 for g in range(3)]
SWAPS = [swap(0, 1), swap(2, 3), swap(4, 5), swap(6, 7), swap(8, 9), swap(0, 2), swap(1, 3)]
SWAPS += [swap(4, 6)]
PRETRAINED = 600
"""Digits that the frozen model of "lora" has learned from, and no client has."""


def digits(
    seed: int, conventions: Sequence[NDArray[np.int64]], clients: int, test: int, skip: int = 0
) -> FederatedData:
    """Deal scikit-learn's digits to clients in equal groups, each of which names them its way."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, *b"digits"]).permutation(len(labels) - skip) + skip
    groups = np.arange(clients) * len(conventions) // clients
    each = len(order) // clients
    parts = [
        (images[index] / 16, conventions[group][labels[index]], each - test)
        for group, index in zip(groups, order[: each * clients].reshape(clients, -1), strict=True)
    ]
    return dealt("digits", parts, groups)


@cache
def mnist() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return MNIST's training images and labels."""
    return read_images("MNIST", Path(os.environ["FL_ADMM_DATA"]))["train"]


def rotated(seed: int, angles: Sequence[int]) -> FederatedData:
    """Return 20 clients with 100 images of MNIST to train on, turned by group, 14 x 14 pixels."""
    images, labels = mnist()
    order = np.random.default_rng([seed, *b"rotated"]).permutation(len(labels))[: 20 * 200]
    groups = np.arange(20) * len(angles) // 20
    parts = []
    for group, index in zip(groups, order.reshape(20, 200), strict=True):
        turned = rotate(images[index].astype(float), angles[group], axes=(1, 2), reshape=False)
        small = turned.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)) / 255
        parts.append((small.reshape(200, -1), labels[index].astype(int), 100))
    return dealt("rotated", parts, groups)


def persons(seed: int, samples: int | None = None) -> FederatedData:
    """Return UCI HAR's 30 persons, with at most so many windows; features in the place of signals.

    Of each channel mean, deviation, extremes and deviation of its differences, standardised over
    everybody.
    """
    data = load("uci-har", 0)
    rng = np.random.default_rng([seed, *b"persons"])
    table: Parts = []
    for client in data.clients:
        kept = rng.permutation(len(client.train[1]))[:samples]
        x = torch.cat([client.train[0][kept], client.test[0]]).numpy()
        moments = [x.mean(2), x.std(2), x.min(2), x.max(2), np.diff(x, axis=2).std(2)]
        y = torch.cat([client.train[1][kept], client.test[1]]).numpy()
        table.append((np.concatenate(moments, axis=1), y, len(kept)))
    everything = np.concatenate([x[:n] for x, _, n in table])
    center, scale = everything.mean(axis=0), everything.std(axis=0)
    return dealt("persons", [((x - center) / scale, y, n) for x, y, n in table], None)


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


softmax = partial(build, "softmax")


def cnn(data: FederatedData) -> nn.Module:
    """Return a network for 8 x 8 digits: 4,490 parameters."""
    return nn.Sequential(*filters(8, 16), nn.Linear(64, 10))


def mlp(data: FederatedData, norm: bool = False) -> nn.Module:
    """Return a network with 32 hidden units, with batch norm or without."""
    hidden = [nn.BatchNorm1d(32)] if norm else []
    return nn.Sequential(
        nn.Linear(data.input_shape[0], 32), *hidden, nn.ReLU(), nn.Linear(32, data.num_classes or 1)
    )


class Adapted(nn.Module):
    """A frozen linear layer with a trained addition of rank 4."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, with the addition's."""
        outputs: Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        return outputs


def lora(data: FederatedData) -> nn.Module:
    """Return a pretrained network whose layers have adapters."""
    first, last = pretrained()
    return nn.Sequential(Adapted(first), nn.ReLU(), Adapted(last))


@cache
def pretrained() -> tuple[nn.Linear, nn.Linear]:
    """Return two layers that know the digits, from samples that no client has."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:PRETRAINED] / 16, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), torch.tensor(labels[:PRETRAINED])).backward()
        optimizer.step()
    return model[0], model[2]  # type: ignore[return-value]


def keep_frozen(model: nn.Module, seed: int, init: str) -> nn.Module:
    """Draw a model's trained parameters; what is frozen stays."""
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = {name: frozen[name] for name, p in model.named_parameters() if not p.requires_grad}
    initialise(model, seed, init)
    if frozen:
        model.load_state_dict(frozen, strict=False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for part in model.modules():
                if isinstance(part, Adapted):
                    nn.init.normal_(part.lora_a, std=1 / 8)
    return model


# --------------------------------------------------------------------------------------------------
# Families of problems
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Problems of a kind, one for each seed.

    Attributes
    ----------
    data : callable
        Returns the clients' data of a seed.
    model : callable
    participation : float
    lr, local_epochs, batch_size
        The local work of all methods; without a batch size full gradients.
    init : str
        Of the weights: 'pytorch' or 'normal'.
    """

    data: Callable[[int], FederatedData]
    model: Callable[[FederatedData], nn.Module] = softmax
    participation: float = 0.5
    lr: float = 0.1
    local_epochs: int = 10
    batch_size: int | None = None
    init: str = "pytorch"

    def initial(self, data: FederatedData, seed: int) -> nn.Module:
        """Return the model as everybody starts with it."""
        return keep_frozen(self.model(data), seed, self.init)


def synthetic(scenario: str) -> Family:
    """Return one of FPFC's own scenarios."""
    return Family(
        lambda seed: load(f"synthetic-{scenario}", seed), participation=0.3, init="normal"
    )


CONTINUUM = partial(teachers, sizes=(1,) * 20, common=1.0)
FAMILIES = {
    "4x5": Family(teachers),
    "4x5 at 10 %": Family(teachers, participation=0.1),
    "1, 2, 3, 10": Family(partial(teachers, sizes=(1, 2, 3, 10))),
    "10x2": Family(partial(teachers, sizes=(2,) * 10)),
    "40 + 1": Family(partial(teachers, sizes=(40, 1))),
    "shared + own": Family(partial(teachers, common=1.0, own=0.5)),
    "5 to 20 samples": Family(partial(teachers, samples=(5, 20))),
    "imbalance 1:50": Family(partial(teachers, samples=(10, 500))),
    "100 at 10 %": Family(partial(teachers, sizes=(25,) * 4), participation=0.1),
    "continuum .05": Family(partial(CONTINUUM, own=0.05)),
    "continuum .3": Family(partial(CONTINUUM, own=0.3)),
    "one group": Family(partial(teachers, sizes=(20,))),
    "50x100": Family(partial(teachers, sizes=(100,) * 50), participation=0.3),
    "feature scales": Family(partial(teachers, scaled=True)),
    "rotated 0 to 270": Family(partial(rotated, angles=(0, 90, 180, 270))),
    "rotated 0 to 45": Family(partial(rotated, angles=(0, 15, 30, 45))),
    "digits, 8 swaps": Family(partial(digits, conventions=SWAPS, clients=24, test=15), lr=0.3),
    "HAR, 15": Family(partial(persons, samples=15)),
    "HAR, 40": Family(partial(persons, samples=40)),
    "HAR, all": Family(persons),
    "MLP": Family(partial(digits, conventions=SHIFTS, clients=18, test=20), mlp),
    "CNN": Family(
        partial(digits, conventions=SHIFTS, clients=12, test=30), cnn, local_epochs=2, batch_size=20
    ),
    "batch norm": Family(  # 76 samples to train on: 61 while some are held out
        partial(digits, conventions=SHIFTS, clients=18, test=23),
        partial(mlp, norm=True),
        local_epochs=2,
        batch_size=20,
    ),
    "LoRA": Family(
        partial(digits, conventions=SWAPS[:4], clients=12, test=20, skip=PRETRAINED), lora
    ),
    **{name: synthetic(name) for name in ("s1", "s2", "s3", "s4", "s5")},
    "Housing, Body fat": Family(
        lambda seed: load("housing-bodyfat", seed),
        partial(build, "linear"),
        lr=0.01,
        local_epochs=20,
    ),
}
RMSE = {"Housing, Body fat"}
"""Those that are scored by an error; their gains are percent of it, positive where it is less."""
LARGE = ["50x100"]
"""Run where it is named only: 5,000 clients."""
QUICK = ["4x5", "1, 2, 3, 10", "40 + 1", "shared + own", "5 to 20 samples", "continuum .05"]
QUICK += ["digits, 8 swaps", "Housing, Body fat"]


# --------------------------------------------------------------------------------------------------
# Methods
# --------------------------------------------------------------------------------------------------


class Oracle(ClusteredStrategy):
    """FedAvg inside given groups; the participants are drawn from all, as for other methods."""

    method: ClassVar = "Oracle"
    groups: Sequence[int] = ()

    def init_state(self, arrays: Arrays) -> ClusteredState:
        """Start every group at the initial model."""
        return ClusteredState(Clusters([arrays] * (1 + max(self.groups))))

    def train_instructions(self, server_round: int, client_ids: Sequence[int]) -> Mapping[int, Any]:
        """Send every client its group's model."""
        self.state.clusters.of |= dict(enumerate(map(int, self.groups)))
        return super().train_instructions(server_round, client_ids)

    def update(self, server_round: int, replies: Mapping[int, Reply]) -> None:
        """Set every group's model to its participants' mean, weighted by examples."""
        for group, members in self.state.clusters.members(replies).items():
            self.state.clusters.average(group, {c: replies[c] for c in members}, "size")


class OracleClient(CFLClient):
    """Its client."""

    strategy = Oracle


METHODS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "FPFC": (lambda groups: FPFC, clients.FPFCClient, "cluster"),
    "Local": (lambda groups: library.Local, clients.LocalClient, "personal"),
    "FedAvg": (lambda groups: library.FedAvg, clients.SGDClient, "global"),
    "Ditto": (lambda groups: library.Ditto, clients.DittoClient, "personal"),
    "IFCA": (
        lambda groups: partial(
            library.IFCA, num_clusters=1 + int(max(groups)), restarts=5, restart_rounds=5
        ),
        clients.IFCAClient,
        "cluster",
    ),
    "oracle": (lambda groups: partial(Oracle, groups=groups), OracleClient, "cluster"),
}
"""What makes the strategy of given groups, its client, and the kind of model that is looked at."""

FIELDS = ["family", "seed", "method", "look", "kind", "score", "ari", "groups", "megabytes"]
FIELDS += ["rounds", "seconds"]
Row = dict[str, Any]


def run(name: str, seed: int, method: str, last: int) -> list[Row]:
    """Return what a method's models score at each look, in percent or as RMSE."""
    family = FAMILIES[name]
    data = family.data(seed)
    strategy_of, client_class, _ = METHODS[method]
    regression = data.task == "regression"
    key, unit = ("rmse", 1.0) if regression else ("accuracy", 100.0)
    loss = nn.MSELoss() if regression else nn.CrossEntropyLoss()
    truth = data.true_clusters

    def client_fn(context: Context) -> Any:
        samples = data.clients[int(context.node_config["partition-id"])]
        size = family.batch_size
        return client_class(
            context,
            family.initial(data, seed),
            [samples.train] if size is None else Minibatches(*samples.train, size),
            loss,
            test_loader=[samples.test],
            metrics={key: rmse if regression else accuracy},
            full_batch=size is None,
        )

    strategy = strategy_of(truth)(
        lr=family.lr,
        local_epochs=family.local_epochs,
        fraction_train=family.participation,
        min_available_nodes=len(data.clients),
        seed=seed,
    )
    rows: list[Row] = []
    began = time.process_time()

    def note(look: str, kind: str, score: float, labels: Mapping[int, int] | None) -> None:
        """Keep the score of a kind of models."""
        ari = math.nan
        if labels and truth is not None:
            ari = adjusted_rand_score(truth[list(labels)], list(labels.values()))
        traffic = [t for t in strategy.traffic.values() if t is not None]
        row = (name, seed, method, look, kind, round(unit * score, 4), round(ari, 4))
        sent = round(sum(t.down + t.up for t in traffic) / 1e6, 3)
        groups = len(set(labels.values())) if labels else ""
        spent = round(time.process_time() - began, 1)
        rows.append(dict(zip(FIELDS, (*row, groups, sent, last, spent), strict=True)))

    def clusters_of(strategy: Any) -> dict[int, int] | None:
        """Return the cluster of every client, where the method has clusters."""
        clusters = strategy.clusters()
        if clusters is None:
            return None
        return dict(zip(strategy.client_ids, clusters.tolist(), strict=True))

    def score_here(kind: str) -> float:
        """Return the mean score of a kind of models, measured outside the federation."""
        model, scores = family.initial(data, seed), []
        model.eval()
        for client, samples in enumerate(data.clients):
            arrays = from_array_record(strategy.model_arrays(kind, client))
            tensors = {array: torch.from_numpy(np.array(value)) for array, value in arrays.items()}
            model.load_state_dict(tensors, strict=False)
            x, y = samples.test
            with torch.no_grad():
                outputs = model(x)
            scores.append(
                float(((outputs - y) ** 2).mean().sqrt())
                if regression
                else float((outputs.argmax(1) == y).float().mean())
            )
        return mean(scores)

    def look(server_round: int, metrics: Any) -> None:
        if method == "FPFC" and not rows and not strategy.state.source.is_searching:
            for kind in ("personal", "cluster"):
                note("search", kind, score_here(kind), clusters_of(strategy))
        if server_round in (FIRST_LOOK, last):
            labels = clusters_of(strategy)
            reported = strategy.evaluate_metrics[server_round].values()
            for kind in strategy.kinds:
                scores = [metrics[f"{kind}-{key}"] for metrics in reported]
                note(str(server_round), kind, mean(scores), labels)

    app = client_app(client_fn, num_clients=len(data.clients), cohort=True)
    start = ArrayRecord(family.initial(data, seed).state_dict())
    with InProcessGrid(app, 1) as grid:
        every = math.gcd(FIRST_LOOK, last)
        strategy.start(grid, start, last, evaluate_every=every, on_round=look, progress=False)
    return rows


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


class Table:
    """The rows of a CSV, by what they are of."""

    def __init__(self, rows: Iterable[Row], last: int) -> None:
        self.last = str(last)
        self.rows = [row for row in rows if row["rounds"] == str(last)]
        self.families = [name for name in FAMILIES if self.seeds(name)]

    def seeds(self, family: str) -> list[str]:
        """Return the seeds of a family's FPFC runs."""
        of = {r["seed"] for r in self.rows if (r["family"], r["method"]) == (family, "FPFC")}
        return sorted(of, key=int)

    def values(
        self, family: str, method: str, look: str, kind: str = "", what: str = "score"
    ) -> dict[str, float]:
        """Return a column's values by seed."""
        of = (family, method, look, kind or METHODS[method][2])
        found = {
            row["seed"]: float(row[what])
            for row in self.rows
            if (row["family"], row["method"], row["look"], row["kind"]) == of
        }
        return {seed: value for seed, value in found.items() if not math.isnan(value)}

    def cell(self, *of: str) -> str:
        """Return mean and deviation over the seeds."""
        if not (values := self.values(*of).values()):
            return ""
        digits = 2 if of[0] in RMSE or of[-1] == "ari" else 1
        return f"{mean(values):.{digits}f} ± {pstdev(values):.{digits}f}"

    def results(self) -> str:
        """Return the table of scores."""
        last, methods = self.last, [method for method in METHODS if method != "FPFC"]
        looks = ["search", str(FIRST_LOOK), last]
        head = [
            "family (seeds)",
            "ARI: search",
            f"ARI: {last}",
            *(f"cluster's: {look}" for look in looks),
            *(f"own: {look}" for look in looks),
            *methods,
        ]
        lines = [head, ["---"] * len(head)]
        for family in self.families:
            aris = [self.cell(family, "FPFC", look, "cluster", "ari") for look in ("search", last)]
            models = [
                self.cell(family, "FPFC", look, kind)
                for kind, look in product(("cluster", "personal"), looks)
            ]
            others = [self.cell(family, method, last) for method in methods]
            lines.append([f"{family} ({len(self.seeds(family))})", *aris, *models, *others])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def aims(self) -> str:
        """Return how far each family is from its aims with the cluster's model, paired by seed."""
        head = ["family", "ARI kept", "not worse than at the search's end", "to the oracle"]
        head += ["to the better of Local and FedAvg"]
        lines, last = [head, ["---"] * len(head)], self.last
        for family in self.families:
            end = self.values(family, "FPFC", last)
            searched, oracle, local, fedavg = (
                self.values(family, *of)
                for of in (
                    ("FPFC", "search"),
                    *((method, last) for method in ("oracle", "Local", "FedAvg")),
                )
            )
            pick = min if family in RMSE else max
            simple = {seed: pick(local[seed], fedavg[seed]) for seed in local if seed in fedavg}
            before, after = (
                self.values(family, "FPFC", look, what="ari") for look in ("search", last)
            )
            ari = _gain(after, before, 1.0)
            grouped = _gain(oracle, fedavg, 1.0) > 1.0 or family in RMSE
            unit = [1.0, 0.0] if family not in RMSE else [-100.0, 1.0]
            limits = (0.5, 3.0 if family in RMSE else 1.0, 0.0 if grouped else 1.0)
            cells = ["" if math.isnan(ari) else f"{ari:+.2f}{' no' if ari < -0.02 else ''}"]
            for other, limit in zip((searched, oracle, simple), limits, strict=True):
                gain = _gain(end, other, *unit)
                text = f"{gain:+.1f}{' %' if family in RMSE else ''}"
                missed = " no" if gain < -limit else ""
                cells.append("" if math.isnan(gain) else text + missed)
            lines.append([family, *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gain(
    ours: Mapping[str, float], theirs: Mapping[str, float], unit: float, relative: float = 0.0
) -> float:
    """Return the mean gain over the seeds that both have, as a share of theirs if `relative`."""
    gains = [
        unit * (ours[seed] - theirs[seed]) / theirs[seed] ** relative
        for seed in ours.keys() & theirs.keys()
    ]
    return mean(gains) if gains else math.nan


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV; none where there is none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Run what is missing in the CSV, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help="by default all but the large one")
    parser.add_argument("--quick", action="store_true", help="eight families")
    parser.add_argument("--seeds", default="1-3", help="e.g. 1-3")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--last", type=int, default=LAST_LOOK, help="the last round")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--print", action="store_true", help="run nothing")
    given = parser.parse_args()
    if unknown := given.families - FAMILIES.keys() if given.families else set():
        parser.error(f"families has {sorted(unknown)}, expected some of {list(FAMILIES)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    first, _, end = given.seeds.partition("-")
    seeds = range(int(first), int(end or first) + 1)
    all_of_them = [name for name in FAMILIES if name not in LARGE]
    names = given.families or (QUICK if given.quick else all_of_them)
    for seed, name, method in () if given.print else product(seeds, names, given.methods):
        cell = {"family": name, "seed": str(seed), "method": method, "rounds": str(given.last)}
        is_done = any(cell.items() <= row.items() for row in read(given.csv))
        grouped = FAMILIES[name].data(seed).true_clusters is not None
        if is_done or (method in ("IFCA", "oracle") and not grouped):
            continue
        try:
            rows, is_new = run(name, seed, method, given.last), not given.csv.exists()
        except RuntimeError as error:  # no cell: it is run again the next time
            print(f"{name}, seed {seed}, {method}: FAILED, {error}", flush=True)
            continue
        with given.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
        told = ", ".join(f"{r['look']} {r['kind']} {r['score']}" for r in rows)
        print(f"{name}, seed {seed}, {method}: {told} ({rows[-1]['seconds']} s)", flush=True)
    table = Table(read(given.csv), given.last)
    print(f"\n{table.results()}\n\n{table.aims()}")


if __name__ == "__main__":
    main()
