"""FedGiA's Table III and Figures 2 and 3: rounds (CR) until ||grad f(x)||^2 <= n 1e-9, over trials.

Run with `python -m tests.benchmarks.fedgia_paper` in the repository, or name tables:
`python -m tests.benchmarks.fedgia_paper table-v1 figure-2 --trials 5`. Every run becomes a line of
`--csv`; one that stands there is not repeated. Then the tables are printed. QSAR is read from
$FL_ADMM_DATA. A trial has data of its own; on them all methods start at x = 0.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from threadpoolctl import threadpool_limits

from clients import (
    FedGiALinearClient,
    LeastSquares,
    LocalSGDLinearClient,
    Logistic,
    client_app,
)
from fl_admm_strategies import FedGiA, InProcessGrid, LocalSGD
from simulations.data.registry import load
from tests.benchmarks.fpfc_end import read

TOLERANCE, MOST = 1e-9, 1000  # of ||grad f||^2/n; CR
FIELDS = ["data", "clients", "trial", "method", "k0", "s", "cr", "objective", "squared_gradient"]
FIELDS += ["seconds"]


@dataclass(frozen=True)
class Case:
    """One method on one data set."""

    data: str
    method: str
    k0: int
    s: float = 0.5
    clients: int = 64

    def line(self, trial: int) -> dict[str, str]:
        """Return what a line of the file says of a run before it is made."""
        return {**{k: str(v) for k, v in vars(self).items()}, "trial": str(trial)}

    def run(self, trial: int) -> dict[str, Any]:
        """Return a run's line."""
        data = load(self.data, trial, None, clients=self.clients)
        regulariser = {"mu": data.mu, "reg_scaling": data.reg_scaling}
        losses = [
            LeastSquares(*own) if data.loss == "least-squares" else Logistic(*own, **regulariser)
            for own in data.clients
        ]

        def client_fn(context: Context) -> Any:
            loss = losses[int(context.node_config["partition-id"])]
            if self.method.startswith("FedGiA"):
                return FedGiALinearClient(context, loss)
            share = 1.0 if self.method == "FedAvg" else 0.05
            return LocalSGDLinearClient(context, loss, batch_share=share)

        def is_over(server_round: int, metrics: Any) -> bool:
            """Note f and its gradient at x; return whether the gradient is small enough."""
            x = strategy.global_arrays["x"].numpy()
            found = [loss.value_and_gradient(x) for loss in losses]
            found_at_x["objective"] = float(np.mean([value for value, _ in found]))
            gradient = np.mean([own for _, own in found], axis=0)
            found_at_x["squared_gradient"] = float(gradient @ gradient)
            found_at_x["cr"] = server_round
            return found_at_x["squared_gradient"] <= data.num_features * TOLERANCE

        found_at_x: dict[str, Any] = {}
        strategy = self._strategy(data)
        first = ArrayRecord({"x": Array(np.zeros(data.num_features))})
        began = time.process_time()
        with InProcessGrid(client_app(client_fn, num_clients=self.clients), 1) as grid:
            strategy.start(grid, first, num_rounds=MOST, evaluate_every=MOST + 1, stop=is_over)
        return {**self.line(trial), **found_at_x, "seconds": time.process_time() - began}

    def _strategy(self, data: Any) -> Any:
        if self.method.startswith("FedGiA"):
            hessian = "gram" if self.method == "FedGiA_G" else "diagonal"
            t = 0.15 if data.loss == "least-squares" else 0.1  # Table II
            return FedGiA(t=t, hessian=hessian, local_steps=self.k0, fraction_admm=self.s)
        # a of section V.D: per problem, and another for mini-batches.
        share = sum(len(targets) for _, targets in data.clients) / self.clients
        a = {"FedAvg": (0.01, 0.5 * share), "LocalSGD": (0.005, 0.1 * share)}[self.method]
        return LocalSGD(lr=a[data.loss == "logistic"], local_steps=self.k0)


BOTH, K0 = ("FedGiA_G", "FedGiA_D"), (1, 5, 10)
TABLES = {
    "table-v1": [Case("synthetic-v1", *c) for c in product((*BOTH, "FedAvg", "LocalSGD"), K0)],
    "table-qsar": [Case("qsar", *c) for c in product((*BOTH, "FedAvg", "LocalSGD"), K0)],
    "figure-2": [Case("synthetic-v1", *c) for c in product(BOTH, range(1, 21))],
    "figure-3": [
        Case("synthetic-v1", *c) for c in product(BOTH, K0, (0.1, 0.2, 0.4, 0.6, 0.8, 1.0))
    ],
    "clients": [
        Case("synthetic-v1", method, 5, clients=m) for method in BOTH for m in (96, 128, 196, 256)
    ],
}


def rows(cases: Sequence[Case], lines: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the rows of a markdown table: mean ± deviation over the trials."""
    yield "| data | method | k0 | s | clients | trials | CR | objective | seconds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    runs = defaultdict(list)
    for line in lines:
        runs[tuple(line[name] for name in vars(Case("", "", 0)))].append(line)
    for case in cases:
        found = runs[tuple(str(value) for value in vars(case).values())]
        if not found:
            continue
        said = [
            f"{mean(values):.{digits}f} ± {pstdev(values):.{digits}f}"
            for name, digits in (("cr", 1), ("objective", 3), ("seconds", 2))
            for values in ([float(line[name]) for line in found],)
        ]
        told = [case.data, case.method, case.k0, case.s, case.clients, len(found), *said]
        yield f"| {' | '.join(map(str, told))} |"


def main() -> None:
    """Run what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; without, all")
    parser.add_argument("--trials", type=int, default=20, help="0: tables only")
    parser.add_argument("--csv", type=Path, default=Path("docs/results/fedgia/runs.csv"))
    given = parser.parse_args()
    if unknown := set(given.tables) - TABLES.keys():
        parser.error(f"tables has {sorted(unknown)}, expected some of {list(TABLES)}")
    threadpool_limits(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    given.csv.parent.mkdir(parents=True, exist_ok=True)
    wanted = {name: TABLES[name] for name in given.tables or TABLES}
    for trial in range(1, given.trials + 1):
        for case in dict.fromkeys(case for cases in wanted.values() for case in cases):
            if any(case.line(trial).items() <= line.items() for line in read(given.csv)):
                continue
            line, is_new = case.run(trial), not given.csv.exists()
            with given.csv.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if is_new:
                    writer.writeheader()
                writer.writerow(line)
    for name, cases in wanted.items():
        print(f"\n{name}\n")
        print("\n".join(rows(cases, read(given.csv))), flush=True)


if __name__ == "__main__":
    main()
