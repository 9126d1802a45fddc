"""What malicious clients do to every method, bounds and robust rules: docs/robustness.md's tables.

    PYTHONPATH=. python tests/benchmarks/robustness.py

Twenty clients, of which 0, 1 or 5 are malicious. A cell has the mean over the honest clients: the
accuracy in percent, of FedMC-ADMM the RMSE in stars. `--seeds 1 2 3` takes the mean over seeds.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from statistics import mean
from typing import Any, NamedTuple

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

CLIENTS = 20
ATTACKS = ("same-value", "sign-flip", "gaussian", "one-huge")
BOUNDS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"max_norm": math.inf},
    "clip": {"max_norm": "auto"},
}
RULES: dict[str, dict[str, Any]] = {
    rule: {"aggregation": rule, "malicious": 0.25}
    for rule in ("median", "trimmed-mean", "krum", "multi-krum")
}
"""Of Ditto, in the place of a bound."""
ROBUST = ("fedmedian", "fedtrimmedavg", "krum", "multi-krum")
"""FedAvg with a rule, which needs no bound."""
METHODS = {
    "robustness": [
        *("fpfc", "fedadmm", "fedapm", "flame", "lp-proj-admm", "fedgia"),
        *("ditto", "fedprox", "local", "fedavg", *ROBUST),
    ],
    "robustness-ratings": ["fedmc-admm"],
}


class Cell(NamedTuple):
    """One run."""

    experiment: str
    method: str
    bound: str
    kind: str
    count: int
    seed: int


def cells(bounds: list[str], seeds: list[int]) -> Iterator[Cell]:
    """Yield all runs."""
    attacks = [("none", 0), *((kind, count) for count in (1, 5) for kind in ATTACKS)]
    for experiment, methods in METHODS.items():
        for method, bound, (kind, count), seed in product(methods, bounds, attacks, seeds):
            if (bound in RULES and method != "ditto") or (bound != "none" and method in ROBUST):
                continue
            yield Cell(experiment, method, bound, kind, count, seed)


def score(cell: Cell) -> dict[str, float]:
    """Return the mean score of each kind of models; none where the run ended with an error."""
    import torch

    from simulations.experiments.experiment import RunConfig, load_experiment
    from simulations.methods import grid_of, run_method

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    attack = (f"attack.ratio={cell.count / CLIENTS}",)
    attack += (f"attack.kind={cell.kind}",) if cell.count else ()
    experiment = load_experiment(RunConfig(cell.experiment, changes=attack, seed=cell.seed))
    federation = experiment.baselines.get(cell.method, experiment.federation)
    problem = federation.problem
    strategy = federation.strategy(**{**BOUNDS, **RULES}[cell.bound])
    num_rounds = problem.settings.training.num_rounds
    with grid_of(federation, 1) as grid:
        try:
            history = run_method(
                problem,
                strategy,
                grid,
                problem.initial_arrays(strategy),
                num_rounds=num_rounds,
                evaluate_every=num_rounds,
                progress=False,
            )
        except RuntimeError as error:
            print(f"{cell}: {error}", flush=True)
            return {}
    return {kind: found.mean for kind, found in history.last.models.items()}


def main() -> None:
    """Run everything and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--bounds", nargs="+", default=["none", "clip", *RULES], choices=[*BOUNDS, *RULES]
    )
    known = [method for methods in METHODS.values() for method in methods]
    parser.add_argument("--methods", nargs="+", default=known, choices=known)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    wanted = [c for c in cells(options.bounds, options.seeds) if c.method in options.methods]
    found: dict[tuple[Any, ...], list[float]] = {}
    rows: dict[tuple[str, str, str], None] = {}
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for cell, scores in zip(wanted, pool.map(score, wanted), strict=True):
            print(cell, scores, flush=True)
            for title, value in scores.items():
                rows[cell.method, title, cell.bound] = None
                key = (cell.method, title, cell.bound, cell.kind, cell.count)
                found.setdefault(key, []).append(value)
    heads = [("none", 0), *((kind, count) for count in (1, 5) for kind in ATTACKS)]
    print("| method | model | bound | " + " | ".join(f"{k} {n}" for k, n in heads) + " |")
    print("|---" * (3 + len(heads)) + "|")
    for method, title, bound in rows:
        values = [found.get((method, title, bound, kind, count)) for kind, count in heads]
        percent = method not in METHODS["robustness-ratings"]
        texts = [
            "–" if v is None else f"{100 * mean(v):.1f}" if percent else f"{mean(v):.3g}"
            for v in values
        ]
        print(f"| {method} | {title} | {bound} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
