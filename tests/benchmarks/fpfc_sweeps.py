"""FPFC over xi, nu and the local epochs, on the digits with three labelling conventions.

python -m tests.benchmarks.fpfc_sweeps xi       # figure E.6 of the paper
python -m tests.benchmarks.fpfc_sweeps nu       # Remark 2
python -m tests.benchmarks.fpfc_sweeps epochs   # figures 9 and E.5, 400 local epochs each
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from fl_admm_strategies.maths.clustering import clusters
from simulations.experiments.experiment import load_experiment
from simulations.experiments.run_config import RunConfig
from simulations.methods import grid_of, run_method
from simulations.reports.clusters import clustering_scores

SCAD = 'algorithm.penalty={{type = "scad", lam = 0.6, xi = {xi:g}}}'
NUS = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 2.22, 4.0)


def run(num_rounds: int, *changes: str) -> tuple[Any, float]:
    """Return the strategy after a run, and the mean test accuracy of the clients' own models."""
    rounds = (f"training.num-rounds={num_rounds}", f"training.evaluate-every={num_rounds}")
    federation = load_experiment(RunConfig("digits-fpfc", changes=(*changes, *rounds))).federation
    strategy = federation.strategy()
    with grid_of(federation, 1) as grid:
        history = run_method(
            federation.problem,
            strategy,
            grid,
            federation.initial_arrays(strategy),
            num_rounds=num_rounds,
            evaluate_every=num_rounds,
        )
    return strategy, 100 * history.last.models["personal model"].mean


def main(what: str) -> None:
    """Print a table."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    true = load_experiment(RunConfig("digits-fpfc")).problem.data.true_clusters
    if what == "nu":
        strategy, _ = run(120, SCAD.format(xi=1e-4))
        norms = strategy.state.pairs.theta_norms()
        for row in clustering_scores(norms, true, NUS):
            print(f"nu {row.nu:g}: {row.num} clusters, ARI {row.ari:.2f}")
    if what == "xi":
        for xi in (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.3):
            strategy, accuracy = run(120, SCAD.format(xi=xi))
            found = int(clusters(strategy.state.pairs.theta_norms(), max(0.1, xi)).max()) + 1
            print(f"xi {xi:g}: {accuracy:.2f} %, {found} clusters at nu = {max(0.1, xi):g}")
    if what == "epochs":
        for num_rounds, epochs in (
            (80, "5"),
            (40, "10"),
            (39, '{ type = "growing", every = 2 }'),
            (73, '{ type = "random", most = 10 }'),
        ):
            own = f"algorithm.local-epochs={epochs}"
            strategy, accuracy = run(num_rounds, SCAD.format(xi=1e-4), own)
            found = int(clusters(strategy.state.pairs.theta_norms(), 0.1).max()) + 1
            print(f"{epochs}, {num_rounds} rounds: {accuracy:.2f} %, {found} clusters at nu = 0.1")


if __name__ == "__main__":
    main(sys.argv[1])
