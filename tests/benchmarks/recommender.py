"""The recommenders beside the yardsticks, on MovieLens, over seeds: docs/results/recommender.

    PYTHONPATH=. python tests/benchmarks/recommender.py ml-100k --seeds 0 1 2 3 4
    PYTHONPATH=. python tests/benchmarks/recommender.py ml-1m --seeds 0 1 2 3 4
    PYTHONPATH=. python tests/benchmarks/recommender.py ml-100k --leave-one-out --seeds 0 1 2 3 4
    PYTHONPATH=. python tests/benchmarks/recommender.py noise --seeds 0 1 2 3 4

Each row of the CSV is a method and a seed: RMSE in stars, and HR, precision, recall, NDCG and
coverage at 10, of the whole catalogue. With the project's own split a fifth of each client's
ratings is for the test, and those of four stars or more are relevant. With ``--leave-one-out`` it
is one rating of each user, whatever its stars: on 100K the last by time, on 1M a random one, as the
times of the file used here are lost. ``noise`` is FedEASE with noise in the sum of counts. Numbers
up are all that clients send, in millions. Methods that rank see training ratings as interactions.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from clients import (
    FedALSClient,
    FedEASEClient,
    FedMCADMMClient,
    Ratings,
    client_app,
    leave_one_out,
    rank,
)
from clients.toolkit.solving.factors import predicted
from fl_admm_strategies import (
    FedALS,
    FedEASE,
    FedMCADMM,
    InProcessGrid,
    SquaredL2,
    initial_item_factors,
    initial_item_weights,
)
from fl_admm_strategies.algorithms.fedease import ease_weights
from simulations.data.ratings import RatingsData, movielens
from simulations.reports import yardsticks

ROOT = Path(os.environ.get("FL_ADMM_DATA", "~/.cache/fl-admm-strategies")).expanduser()
CLIENTS, SHARE = {"ml-100k": 20, "ml-1m": 100}, {"ml-100k": 0.25, "ml-1m": 0.1}
ROUNDS = {"ml-100k": 60, "ml-1m": 100}
EASE = {"ml-100k": 400.0, "ml-1m": 600.0}
RELEVANT = 4.0
Row = dict[str, Any]


class Data:
    """Ratings dealt to clients, and all of them together."""

    def __init__(self, name: str, seed: int, *, one_out: bool = False) -> None:
        self.name, self.seed = name, seed
        dealt: RatingsData = movielens(name, seed, ROOT, clients=CLIENTS[name])
        parts = [(client.train, client.test) for client in dealt.clients]
        self.relevant = RELEVANT
        if one_out:
            self.relevant = -math.inf
            times = _times(name, dealt)
            parts = [
                leave_one_out(_all_of(*part), np.random.default_rng([seed, i]), times(i))
                for i, part in enumerate(parts)
            ]
        self.parts = parts
        self.train, self.test = (yardsticks.joined(side) for side in zip(*parts, strict=True))
        self.num_items = dealt.num_items

    def ones(self, ratings: Ratings) -> Ratings:
        return replace(ratings, values=np.ones(len(ratings)))

    def row(self, method: str, scores: NDArray[Any] | None, rmse: float | None, **more: Any) -> Row:
        found: Row = {"method": method, "seed": self.seed}
        found |= {} if rmse is None else {"rmse": rmse}
        if scores is not None:
            found |= rank(scores, self.train, self.test, k=10, relevant=self.relevant).means()
        return found | more


def _all_of(train: Ratings, test: Ratings) -> Ratings:
    joined = (np.concatenate([getattr(p, n) for p in (train, test)]) for n in ("users", "items"))
    users, items = joined
    values = np.concatenate([train.values, test.values])
    return Ratings(users, items, values, train.num_users, train.num_items)


def _times(name: str, dealt: RatingsData) -> Callable[[int], NDArray[Any] | None]:
    """Return the times of each client's ratings; without times, None."""
    if name != "ml-100k":
        return lambda client: None
    table = np.loadtxt(ROOT / "ml-100k" / "u.data", dtype=np.int64)
    at = {(user, item): when for user, item, _, when in table.tolist()}

    def of_client(i: int) -> NDArray[Any]:
        client = dealt.clients[i]
        ratings = _all_of(client.train, client.test)
        users, items = client.user_ids[ratings.users], dealt.item_ids[ratings.items]
        return np.array([at[pair] for pair in zip(users.tolist(), items.tolist(), strict=True)])

    return of_client


# --- With all data in one place -------------------------------------------------------------------


def central(data: Data) -> Iterator[Row]:
    train, test, shape = data.train, data.test, (data.train.num_users, data.num_items)
    rng = np.random.default_rng(data.seed)
    counts = np.broadcast_to(yardsticks.counts(train), shape)
    yield data.row("popularity", counts, None)
    users, items, centre = yardsticks.least_squares(
        train, np.zeros((data.num_items, 1)), lam=4.0, sweeps=10
    )
    rmse = yardsticks.rmse_with_biases(test, users, items, centre)
    yield data.row("biases", np.broadcast_to(items[:, 0], shape), rmse)
    first = rng.random((data.num_items, 5))
    users, items = yardsticks.alternating_least_squares([train], first, lam=5.0, sweeps=20)
    yield data.row("ALS", users @ items.T, yardsticks.rmse_of_factors([test], users, items))
    first = np.hstack([rng.normal(0, 0.1, (data.num_items, 4)), np.zeros((data.num_items, 1))])
    users, items, centre = yardsticks.least_squares(train, first, lam=8.0, sweeps=20)
    scores = users[:, :-1] @ items[:, :-1].T + items[:, -1]
    rmse = yardsticks.rmse_with_biases(test, users, items, centre)
    yield data.row("ALS with biases", scores, rmse)
    first = rng.normal(0, 0.1, (data.num_items, 32))
    users, items, _ = yardsticks.least_squares(
        data.ones(train), first, lam=20.0, sweeps=8, feedback="implicit"
    )
    yield data.row("implicit ALS", users @ items.T, None)
    weights = ease_weights(yardsticks.pair_counts(train), EASE[data.name])
    yield data.row("EASE", yardsticks.item_scores(train, weights), None)


# --- Federated ------------------------------------------------------------------------------------


def federated(
    data: Data,
    method: str,
    strategy: Any,
    client: Callable[[Context, Ratings, Ratings], Any],
    first: ArrayRecord,
    rounds: int,
) -> Row:
    """Run a federation, and rank by what each client would recommend after it."""

    def client_fn(context: Context) -> Any:
        return client(context, *data.parts[int(context.node_config["partition-id"])])

    started, p = time.process_time(), len(data.parts)
    up = _counted(strategy)
    grid = InProcessGrid(client_app(lambda context: client_fn(context).to_client()), p)
    strategy.start(grid, first, rounds)
    seconds = time.process_time() - started
    more = {"rounds": rounds, "numbers-up": up() / 1e6, "seconds": round(seconds, 1)}
    if isinstance(strategy, FedEASE):
        scores = yardsticks.item_scores(data.train, strategy.state.weights)
        return data.row(method, scores, None, **more)
    found, errors = [], []
    for node in grid.get_node_ids():
        context = grid.context(node)
        own = client_fn(context)
        items = strategy.item_factors.T
        _, test = data.parts[int(context.node_config["partition-id"])]
        if getattr(strategy, "solve", "exact") == "linear":
            users = own.personal_arrays()["user-factors"]
            found.append(users @ items.T)
            products = np.einsum("kr,kr->k", users[test.users], items[test.items])
        else:
            solver = own.solver(strategy.feedback, strategy.confidence)
            users = solver.users(items, own.lam)
            if not solver.explicit:
                found.append(users @ items.T)
                continue
            found.append(users[:, :-1] @ items[:, :-1].T + items[:, -1])
            products = predicted(users, items, test.users, test.items, solver.mean)
        errors.append(products - test.values)
    rmse = float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else None
    return data.row(method, np.vstack(found), rmse, **more)


def _counted(strategy: Any) -> Callable[[], int]:
    """Return what says how many numbers clients have uploaded in training."""
    total, update = [0], strategy.update

    def counting(server_round: int, replies: Any) -> None:
        total[0] += sum(a.size for reply in replies.values() for a in reply.arrays.values())
        update(server_round, replies)

    strategy.update = counting
    return lambda: total[0]


def ours(data: Data) -> Iterator[Row]:
    name, n, seed = data.name, data.num_items, data.seed
    base = {"seed": seed, "fraction_evaluate": 0.0}
    few, rounds = {**base, "fraction_train": SHARE[name]}, ROUNDS[name]

    def rates(kind: Any, lam: float) -> Callable[..., Any]:
        return lambda context, train, test: kind(context, train, SquaredL2(lam))

    def listens(kind: Any, lam: float) -> Callable[..., Any]:
        return lambda context, train, test: kind(context, data.ones(train), SquaredL2(lam))

    start = initial_item_factors(5, n, seed=seed)
    tiny, of_paper = SquaredL2(1e-6), rates(FedMCADMMClient, 1e-6)
    yield federated(
        data, "FedMC-ADMM, paper", FedMCADMM(tiny, published=True, **few), of_paper, start, 100
    )
    start = initial_item_factors(5, n, seed=seed, scale=0.1)
    yield federated(
        data,
        "FedMC-ADMM",
        FedMCADMM(SquaredL2(8.0), **few),
        rates(FedMCADMMClient, 8.0),
        start,
        rounds,
    )
    for sweeps in (3, 8):
        yield federated(
            data,
            f"FedALS, {sweeps} rounds",
            FedALS(SquaredL2(8.0), **base),
            rates(FedALSClient, 8.0),
            start,
            sweeps,
        )
    start = initial_item_factors(16, n, seed=seed, scale=0.1)
    implicit: dict[str, Any] = {"feedback": "implicit"}
    yield federated(
        data,
        "FedMC-ADMM, implicit",
        FedMCADMM(SquaredL2(20.0), **implicit, **few),
        listens(FedMCADMMClient, 20.0),
        start,
        40,
    )
    yield federated(
        data,
        "FedALS, implicit",
        FedALS(SquaredL2(20.0), **implicit, **base),
        listens(FedALSClient, 20.0),
        start,
        6,
    )
    yield federated(
        data,
        "FedEASE",
        FedEASE(lam=EASE[name], **base),
        lambda context, train, test: FedEASEClient(context, train),
        initial_item_weights(n),
        1,
    )


def noise(name: str, seed: int) -> Iterator[Row]:
    """FedEASE's server with noise of standard deviation sigma in each number of the sum."""
    data = Data(name, seed)
    pairs = yardsticks.pair_counts(data.train)
    for clip in (math.inf, 100.0, 30.0):
        counted = pairs
        if clip < math.inf:
            seen = data.train.to_csr()
            count = np.diff(seen.indptr)
            share = np.minimum(1, clip / np.sqrt(np.maximum(count * (count + 1) / 2, 1)))
            seen.data = np.repeat(np.sqrt(share), count)
            counted = (seen.T @ seen).toarray()
        for sigma in (0.0, 1.0, 5.0):
            rng = np.random.default_rng([seed, int(sigma)])
            upper = np.triu(rng.normal(0, sigma, pairs.shape))
            noisy = counted + upper + np.triu(upper, 1).T
            scores = yardsticks.item_scores(data.train, ease_weights(noisy, EASE[name]))
            yield data.row(f"EASE, user clip {clip:g}, noise {sigma:g}", scores, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=[*CLIENTS, "noise"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--leave-one-out", action="store_true")
    asked = parser.parse_args()
    names = ["method", "seed", "rmse", "hr", "precision", "recall", "ndcg", "coverage"]
    names += ["rounds", "numbers-up", "seconds"]
    writer = csv.DictWriter(sys.stdout, names, restval="", lineterminator="\n")
    writer.writeheader()
    for seed in asked.seeds:
        if asked.what == "noise":
            rows = noise("ml-1m", seed)
        else:
            data = Data(asked.what, seed, one_out=asked.leave_one_out)
            rows = (row for side in (central(data), ours(data)) for row in side)
        for row in rows:
            shown = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(shown)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
