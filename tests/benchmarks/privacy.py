"""Which epsilon costs what accuracy: `ClientDP` in FedAvg, FedADMM and Ditto, on digits and HAR.

Run with `python -m tests.benchmarks.privacy --out docs/results/privacy` in the repository: ten
minutes of one processor. It needs the extra `privacy`, and reads files of data from $FL_ADMM_DATA.
For one seed all runs have the same data, initial model, clients and batches. Every run becomes a
line of OUT/curve.csv; one that stands there already is not repeated. Then a markdown table is
printed: mean and standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from flwr.app import ArrayRecord
from torch import nn

import clients
import fl_admm_strategies as library
from clients import client_app
from fl_admm_strategies import ClientDP, InProcessGrid
from simulations.data.federated import FederatedData
from simulations.data.registry import load
from simulations.problems.models import build, initialise
from tests.benchmarks.shared import append, client_fn_of, percent, prepare, read, spread


def softmax(data: FederatedData) -> nn.Module:
    """Return softmax regression: 650 parameters for digits."""
    return build("mlr", data)


def filters(data: FederatedData) -> nn.Module:
    """Return a network of 16 filters for nine sensors: 2,710 parameters, since noise is in each."""
    return nn.Sequential(
        nn.Conv1d(9, 16, kernel_size=16, stride=8),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(4),
        nn.Flatten(),
        nn.Linear(64, 6),
    )


@dataclass(frozen=True)
class Problem:
    """Data, a model and the local work, the same for all methods; everybody takes part.

    `clip` is about the median distance that clients move in FedAvg's first rounds.
    """

    title: str
    data: str
    options: dict[str, Any]
    model: Callable[[FederatedData], nn.Module]
    clip: float
    rounds: int = 20
    lr: float = 0.1
    local_epochs: int = 3
    batch_size: int = 16
    delta: float = 1e-3


PROBLEMS = {
    "digits": Problem(
        "digits, 100 clients, 650 parameters",
        "digits",
        {"partition": "noise", "sigma": 0.0, "clients": 100},
        softmax,
        clip=0.25,
    ),
    "har": Problem(
        "UCI HAR, 30 persons, 2,710 parameters",
        "uci-har",
        {},
        filters,
        clip=0.4,
        lr=0.2,
        local_epochs=2,
        batch_size=64,
    ),
}


@dataclass(frozen=True)
class Method:
    """A strategy with its settings and its client."""

    strategy: str
    client: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    noise_at: Any = "server"


METHODS = {
    "FedAvg": Method("FedAvg", "SGDClient"),
    "FedADMM": Method("FedADMM", settings={"rho": 0.1, "duals": "client"}),
    "Ditto": Method("Ditto"),
    "FedAvg, noise at the clients": Method("FedAvg", "SGDClient", noise_at="client"),
}
NOISE = (None, 0.3, 1.0, 3.0, 8.0)
"""Noise multipliers; None: nothing is clipped either."""


class Line(NamedTuple):
    """One kind of model at the end of one run."""

    problem: str
    method: str
    noise: float
    """The noise multiplier; NaN: no privacy at all."""
    seed: int
    kind: str
    epsilon: float
    accuracy: float
    """In percent, over the test samples of all clients."""


def run(name: str, title: str, noise: float | None, seed: int) -> list[Line]:
    """Return how well the models of a run do at its end."""
    problem, method = PROBLEMS[name], METHODS[title]
    data = load(problem.data, seed, None, **problem.options)
    assert isinstance(data, FederatedData)
    client_class = getattr(clients, method.client or f"{method.strategy}Client")

    def model() -> nn.Module:
        return initialise(problem.model(data), seed)

    client_fn = client_fn_of(client_class, data, model, problem.batch_size)
    privacy = None
    if noise is not None:
        privacy = ClientDP(
            clip=problem.clip,
            noise_multiplier=noise,
            delta=problem.delta,
            noise_at=method.noise_at,
        )
    strategy = getattr(library, method.strategy)(
        seed=seed,
        lr=problem.lr,
        local_epochs=problem.local_epochs,
        privacy=privacy,
        **method.settings,
    )
    start = ArrayRecord(model().state_dict())
    app = client_app(client_fn, num_clients=len(data.clients))
    with InProcessGrid(app, 1) as grid:
        rounds = problem.rounds
        result = strategy.start(grid, start, num_rounds=rounds, evaluate_every=rounds)
    epsilon = result.train_metrics_clientapp[rounds].get("epsilon", math.inf)
    found = result.evaluate_metrics_clientapp[rounds]
    return [
        Line(
            name,
            title,
            math.nan if noise is None else noise,
            seed,
            kind,
            round(float(epsilon), 3),
            percent(found[f"{kind}-accuracy"]),
        )
        for kind in strategy.kinds
    ]


def table(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a markdown table: a row for each problem and noise."""
    found = defaultdict(list)
    for line in lines:
        if (line.method, line.kind) != ("Ditto", "global"):  # which is FedAvg's
            name = line.method if line.kind == "global" else f"{line.method}, {line.kind}"
            found[line.problem, str(line.noise), name].append(line)
    shown: list[str] = []
    for problem in dict.fromkeys(problem for problem, _, _ in found):
        names = list(dict.fromkeys(name for of, _, name in found if of == problem))
        shown += ["", f"| {PROBLEMS[problem].title}: z | ε | {' | '.join(names)} |"]
        shown.append("|---" * (2 + len(names)) + "|")
        for noise in NOISE:
            rows = [found[problem, str(math.nan if noise is None else noise), n] for n in names]
            epsilon = mean(line.epsilon for line in rows[0])
            cells = [spread([line.accuracy for line in row]) for row in rows]
            first = "no privacy" if noise is None else f"{noise:g}"
            shown.append(f"| {' | '.join([first, f'{epsilon:.3g}', *cells])} |")
    return shown


def main() -> None:
    """Run what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="problems and methods; without, all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/privacy"))
    given = parser.parse_args()
    prepare()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "curve.csv"
    lines = read(path, Line)
    done = {(line.problem, line.method, str(line.noise), line.seed) for line in lines}
    names = [name for name in PROBLEMS if name in given.names] or [*PROBLEMS]
    methods = [name for name in METHODS if name in given.names] or [*METHODS]
    for name in names:
        for seed in range(given.seeds):
            for method in methods:
                for noise in NOISE:
                    value = math.nan if noise is None else noise
                    if (name, method, str(value), seed) in done:
                        continue
                    found = run(name, method, noise, seed)
                    append(path, found)
                    lines += found
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
