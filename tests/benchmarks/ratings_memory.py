"""Memory of FedMC-ADMM with one user a client: MovieLens 1M's users, 20,000 items, rank 32.

    PYTHONPATH=. python tests/benchmarks/ratings_memory.py [--rows all] [--users 6040] [--rounds 20]

Clients and strategy run in this one process, packed on four nodes, with 165 ratings a user on
average (as in MovieLens 1M, lognormal), a tenth of the clients a round, an evaluation by all at the
end, and a checkpoint of the last round, which is read again. It prints the peak of the process'
resident memory and the time of a round. What is counted includes PyTorch-free Python and Flower.
``--rows all`` needs 16 bytes for each user, item and factor on the server and as much in the
clients: with 20,000 items of rank 32 that is 62 GB twice; take fewer users to compare.
"""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
import time
from functools import cache

import numpy as np
from flwr.app import Context

from clients import FedMCADMMClient, Ratings, client_app
from fl_admm_strategies import FedMCADMM, InProcessGrid, SquaredL2, initial_item_factors

NODES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", choices=["all", "rated"], default="rated")
    parser.add_argument("--users", type=int, default=6040)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)

    popularity = 1 / (np.arange(given.items) + 50.0)
    popularity /= popularity.sum()

    @cache  # the data, which every client has on its own machine
    def ratings(user: int) -> Ratings:
        rng = np.random.default_rng(user)
        count = int(np.clip(rng.lognormal(4.6, 1.0), 20, given.items // 2))
        items = np.unique(rng.choice(given.items, count, p=popularity))
        stars = rng.integers(1, 6, len(items)).astype(float)
        return Ratings(np.zeros(len(items), int), items, stars, 1, given.items)

    def client_fn(context: Context) -> FedMCADMMClient:
        own = ratings(int(context.node_config["partition-id"]))
        return FedMCADMMClient(context, own, SquaredL2(8.0), test=own)

    total = sum(len(ratings(user)) for user in range(given.users))
    print(f"{given.users} users, {given.items} items, rank {given.rank}, {total:,} ratings")
    print(f"data and libraries: {peak():.2f} GB")
    first = initial_item_factors(given.rank, given.items, seed=0, scale=0.3)
    times = [time.perf_counter()]

    def new() -> FedMCADMM:
        return FedMCADMM(
            SquaredL2(8.0),
            rows=given.rows,
            fraction_train=0.1,
            seed=0,
        )

    with (
        tempfile.TemporaryDirectory() as folder,
        InProcessGrid(client_app(client_fn, num_clients=given.users), NODES) as grid,
    ):
        strategy = new()
        result = strategy.start(
            grid,
            first,
            given.rounds,
            evaluate_every=given.rounds,
            checkpoint_dir=folder,
            checkpoint_every=given.rounds,
            on_round=lambda *_: times.append(time.perf_counter()),
        )
        print(f"rmse: {result.evaluate_metrics_clientapp[given.rounds]['rmse']:.3f}")
        print(f"after {given.rounds} rounds and a checkpoint: {peak():.2f} GB")
        new().start(grid, first, given.rounds + 1, checkpoint_dir=folder, resume=True)
    print(f"resumed for another round: {peak():.2f} GB")
    print(f"seconds a round (median): {np.median(np.diff(times)):.2f}")


def peak() -> float:
    """Return the peak of the resident memory so far in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
