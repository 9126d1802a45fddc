"""The recommenders beside the yardsticks, on MovieLens, over seeds: docs/results/recommender.

    PYTHONPATH=. python tests/benchmarks/recommender.py ml-100k --seeds 0 1 2 3 4
    PYTHONPATH=. python tests/benchmarks/recommender.py ml-1m --seeds 0 1 2 3 4
    PYTHONPATH=. python tests/benchmarks/recommender.py ml-100k --leave-one-out --seeds 0 1 2 3 4
    PYTHONPATH=. python tests/benchmarks/recommender.py ml-1m --leave-one-out --seeds 0 1 2
    PYTHONPATH=. python tests/benchmarks/recommender.py noise --seeds 0 1 2
    PYTHONPATH=. python tests/benchmarks/recommender.py one-user --seeds 0

Each row of the CSV is a method and a seed: RMSE in stars, and HR, precision, recall, NDCG and
coverage at 10, of the whole catalogue. With the project's own split a fifth of each client's
ratings is for the test, and those of four stars or more are relevant. With ``--leave-one-out`` it
is one rating of each user, whatever its stars: on 100K the last by time, on 1M a random one, as the
times of the file used here are lost. Methods that rank see training ratings as interactions.

Every method's settings are chosen anew for each seed, one after the other, by runs on nine tenths
of each client's training ratings: the least RMSE of the tenth that is left, or the largest NDCG
where no stars are predicted. ``GRIDS`` has what is tried, ``settings`` of a row what was chosen.
Then the method runs on all training ratings. Numbers up are all that clients send in that run, in
millions; seconds are processor time.

``noise`` is FedEASE with noise in the sum of counts. ``one-user`` is MovieLens 1M with each of its
6,040 users a client: seconds are those of a round, and gigabytes the peak of the process, which has
server, clients and data.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
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
from clients.toolkit.solving.factors import FactorModel, FactorSolver
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
from tests.benchmarks import yardsticks

ROOT = Path(os.environ.get("FL_ADMM_DATA", "~/.cache/fl-admm-strategies")).expanduser()
CLIENTS, SHARE = {"ml-100k": 20, "ml-1m": 100}, {"ml-100k": 0.25, "ml-1m": 0.1}
ROUNDS = {"ml-100k": 60, "ml-1m": 100}
RELEVANT = 4.0
CLICKS, BETA = (10.0, 20.0, 40.0, 80.0), (0.1, 0.3, 1.0, 3.0)
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "biases": {"lam": (2.0, 4.0, 8.0)},
    "ALS": {"lam": (2.0, 4.0, 8.0)},
    "ALS with biases": {"lam": (4.0, 8.0, 16.0)},
    "implicit ALS": {"lam": CLICKS},
    "EASE": {"lam": (200.0, 400.0, 800.0, 1600.0, 3200.0)},
    "FedMC-ADMM": {"lam": (4.0, 8.0, 16.0), "beta": BETA},
    "FedALS, 3 rounds": {"lam": (4.0, 8.0, 16.0)},
    "FedALS, 8 rounds": {"lam": (4.0, 8.0, 16.0)},
    "FedMC-ADMM, implicit": {"lam": CLICKS, "beta": BETA},
    "FedALS, implicit": {"lam": CLICKS},
}
"""What is tried of each setting; those after it are at the middle of theirs meanwhile."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Data:
    """Ratings dealt to clients, to train on and to test with, and all of them together."""

    name: str
    seed: int
    parts: Sequence[tuple[Ratings, Ratings]]
    relevant: float = RELEVANT
    choosing: bool = False

    @classmethod
    def dealt(cls, name: str, seed: int, *, one_out: bool = False) -> Data:
        dealt: RatingsData = movielens(name, seed, ROOT, clients=CLIENTS[name])
        parts = [(client.train, client.test) for client in dealt.clients]
        if not one_out:
            return cls(name, seed, parts)
        times = _times(name, dealt)
        held = [
            leave_one_out(_all_of(*part), np.random.default_rng([seed, i]), times(i))
            for i, part in enumerate(parts)
        ]
        return cls(name, seed, held, relevant=-math.inf)

    def for_choosing(self) -> Data:
        """Return the training ratings alone, a tenth of each client's held out."""
        rng = np.random.default_rng([self.seed, 27])
        parts = [train.split(0.1, rng) for train, _ in self.parts]
        return replace(self, parts=parts, choosing=True)

    @cached_property
    def train(self) -> Ratings:
        return yardsticks.joined([train for train, _ in self.parts])

    @cached_property
    def test(self) -> Ratings:
        return yardsticks.joined([test for _, test in self.parts])

    @cached_property
    def pairs(self) -> NDArray[np.float64]:
        return yardsticks.pair_counts(self.train)

    @property
    def num_items(self) -> int:
        return self.train.num_items

    def row(self, scores: NDArray[Any] | None, rmse: float | None, **more: Any) -> Row:
        found: Row = {} if rmse is None else {"rmse": rmse}
        if scores is not None and not (self.choosing and found):
            found |= rank(scores, self.train, self.test, k=10, relevant=self.relevant).means()
        return found | more


def _all_of(train: Ratings, test: Ratings) -> Ratings:
    joined = (np.concatenate([getattr(p, n) for p in (train, test)]) for n in ("users", "items"))
    users, items = joined
    values = np.concatenate([train.values, test.values])
    return Ratings(users, items, values, train.num_users, train.num_items)


def _ones(ratings: Ratings) -> Ratings:
    return replace(ratings, values=np.ones(len(ratings)))


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


def popularity(data: Data) -> Row:
    shape = data.train.num_users, data.num_items
    return data.row(np.broadcast_to(yardsticks.counts(data.train), shape), None)


def als(data: Data, lam: float) -> Row:
    first = np.random.default_rng(data.seed).random((data.num_items, 5))
    users, items = yardsticks.alternating_least_squares(data.train, first, lam=lam, sweeps=20)
    scores, place = users @ items.T, (data.test.users, data.test.items)
    return data.row(scores, yardsticks.rmse(data.test, scores[place]))


def als_with_biases(data: Data, lam: float, factors: int, sweeps: int) -> Row:
    first = np.random.default_rng(data.seed).normal(0, 0.1, (data.num_items, factors + 1))
    first[:, -1] = 0
    users, items, centre = yardsticks.least_squares(data.train, first, lam=lam, sweeps=sweeps)
    scores = users[:, :-1] @ items[:, :-1].T + items[:, -1]
    stars, place = centre + users[:, -1:] + scores, (data.test.users, data.test.items)
    return data.row(scores, yardsticks.rmse(data.test, stars[place]))


def implicit_als(data: Data, lam: float) -> Row:
    first = np.random.default_rng(data.seed).normal(0, 0.1, (data.num_items, 32))
    users, items, _ = yardsticks.least_squares(
        _ones(data.train), first, lam=lam, sweeps=8, feedback="implicit"
    )
    return data.row(users @ items.T, None)


def ease(data: Data, lam: float) -> Row:
    return data.row(yardsticks.item_scores(data.train, ease_weights(data.pairs, lam)), None)


# --- Federated ------------------------------------------------------------------------------------


def federated(
    data: Data,
    strategy: Any,
    client: Callable[[Context, Ratings], Any],
    first: ArrayRecord,
    rounds: int,
) -> Row:
    """Run a federation, and rank by what each client would recommend after it."""

    def client_fn(context: Context) -> Any:
        return client(context, data.parts[int(context.node_config["partition-id"])][0])

    started, p = time.process_time(), len(data.parts)
    up = _counted(strategy)
    grid = InProcessGrid(client_app(lambda context: client_fn(context).to_client()), p)
    strategy.start(grid, first, rounds)
    seconds = time.process_time() - started
    more = {"rounds": rounds, "numbers-up": up() / 1e6, "seconds": round(seconds, 1)}
    if isinstance(strategy, FedEASE):
        return data.row(yardsticks.item_scores(data.train, strategy.state.weights), None, **more)
    found, errors = [], []
    for node in grid.get_node_ids():
        context = grid.context(node)
        own = client_fn(context)
        items = strategy.item_factors.T
        _, test = data.parts[int(context.node_config["partition-id"])]
        if getattr(strategy, "published", False):
            users = own.personal_arrays()["user-factors"]
            found.append(users @ items.T)
            products = np.einsum("kr,kr->k", users[test.users], items[test.items])
        else:
            solver = FactorSolver(own.train_ratings, strategy.feedback, strategy.confidence)
            users = solver.users(items, own.lam)
            if not solver.explicit:
                found.append(users @ items.T)
                continue
            found.append(users[:, :-1] @ items[:, :-1].T + items[:, -1])
            model = FactorModel(users, items, solver.mean)
            products = model.of_pairs(test.users, test.items)
        errors.append(products - test.values)
    rmse = float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else None
    return data.row(np.vstack(found), rmse, **more)


def _counted(strategy: Any) -> Callable[[], int]:
    """Return what says how many numbers clients have uploaded in training."""
    total, update = [0], strategy.update

    def counting(server_round: int, replies: Any) -> None:
        total[0] += sum(a.size for reply in replies.values() for a in reply.arrays.values())
        update(server_round, replies)

    strategy.update = counting
    return lambda: total[0]


def _client(kind: Any, lam: float, feedback: str = "explicit") -> Callable[..., Any]:
    def made(context: Context, train: Ratings) -> Any:
        return kind(context, train if feedback == "explicit" else _ones(train), SquaredL2(lam))

    return made


def _settings(data: Data) -> dict[str, Any]:
    return {"seed": data.seed, "fraction_evaluate": 0.0}


def _factors(data: Data, rank: int, scale: float = 0.1) -> ArrayRecord:
    return initial_item_factors(rank, data.num_items, seed=data.seed, scale=scale)


def fedmc_paper(data: Data) -> Row:
    weight, share = 1e-6, SHARE[data.name]
    strategy = FedMCADMM(SquaredL2(weight), published=True, fraction_train=share, **_settings(data))
    client = _client(FedMCADMMClient, weight)
    return federated(data, strategy, client, _factors(data, 5, 1.0), 100)


def fedmc(data: Data, lam: float, beta: float, feedback: str = "explicit") -> Row:
    more = {"feedback": feedback, "fraction_train": SHARE[data.name], **_settings(data)}
    rank, rounds = (5, ROUNDS[data.name]) if feedback == "explicit" else (16, 40)
    client = _client(FedMCADMMClient, lam, feedback)
    strategy = FedMCADMM(SquaredL2(lam), beta=beta, **more)
    return federated(data, strategy, client, _factors(data, rank), rounds)


def fedals(data: Data, lam: float, rounds: int, feedback: str = "explicit") -> Row:
    strategy = FedALS(SquaredL2(lam), feedback=feedback, **_settings(data))
    first = _factors(data, 5 if feedback == "explicit" else 16)
    return federated(data, strategy, _client(FedALSClient, lam, feedback), first, rounds)


def fedease(data: Data, lam: float) -> Row:
    strategy = FedEASE(lam=lam, **_settings(data))
    return federated(data, strategy, FedEASEClient, initial_item_weights(data.num_items), 1)


METHODS: dict[str, Callable[..., Row]] = {
    "popularity": popularity,
    "biases": partial(als_with_biases, factors=0, sweeps=10),
    "ALS": als,
    "ALS with biases": partial(als_with_biases, factors=4, sweeps=20),
    "implicit ALS": implicit_als,
    "EASE": ease,
    "FedMC-ADMM, paper": fedmc_paper,
    "FedMC-ADMM": fedmc,
    "FedALS, 3 rounds": partial(fedals, rounds=3),
    "FedALS, 8 rounds": partial(fedals, rounds=8),
    "FedMC-ADMM, implicit": partial(fedmc, feedback="implicit"),
    "FedALS, implicit": partial(fedals, rounds=6, feedback="implicit"),
    "FedEASE": fedease,
}


def chosen(
    run: Callable[..., Row], data: Data, grid: dict[str, Sequence[float]]
) -> dict[str, float]:
    """Return the settings with which a method predicts best what is held out to choose by."""
    best = {name: values[len(values) // 2] for name, values in grid.items()}

    @cache
    def loss(**settings: float) -> float:
        row = run(data, **settings)
        return float(row["rmse"] if "rmse" in row else -row["ndcg"])

    for name, values in grid.items():
        losses = {value: loss(**{**best, name: value}) for value in values}
        best[name] = min(losses, key=lambda value: losses[value])
    return best


def compared(data: Data) -> Iterator[Row]:
    """Choose the settings of every method, and run it with them."""
    held, settings = data.for_choosing(), {}
    for name, run in METHODS.items():
        if name == "FedEASE":  # the same as EASE, to rounding
            settings[name] = settings["EASE"]
        else:
            settings[name] = chosen(run, held, GRIDS.get(name, {}))
        said = " ".join(f"{key}={value:g}" for key, value in settings[name].items())
        yield {"method": name, **run(data, **settings[name]), "settings": said}


# --- Noise, and one user a client -----------------------------------------------------------------


def noise(seed: int) -> Iterator[Row]:
    """FedEASE's server with noise of standard deviation sigma in each number of the sum."""
    data = Data.dealt("ml-1m", seed)
    for clip in (math.inf, 100.0, 30.0):
        counted = data.pairs
        if clip < math.inf:
            seen = data.train.to_csr()
            count = np.diff(seen.indptr)
            share = np.minimum(1, clip / np.sqrt(np.maximum(count * (count + 1) / 2, 1)))
            seen.data = np.repeat(np.sqrt(share), count)
            counted = (seen.T @ seen).toarray()
        for sigma in (0.0, 1.0, 5.0):
            rng = np.random.default_rng([seed, int(sigma)])
            upper = np.triu(rng.normal(0, sigma, counted.shape))
            noisy = counted + upper + np.triu(upper, 1).T
            scores = yardsticks.item_scores(data.train, ease_weights(noisy, 600.0))
            yield {"method": f"EASE, user clip {clip:g}, noise {sigma:g}", **data.row(scores, None)}


ONE_USER: dict[str, tuple[type, type, dict[str, Any]]] = {
    "FedMC-ADMM, rows='rated'": (FedMCADMM, FedMCADMMClient, {"rows": "rated", "beta": 0.3}),
    "FedALS": (FedALS, FedALSClient, {}),
}


def one_user(method: str, seed: int, rounds: int) -> Row:
    """MovieLens 1M with each user a client, a tenth of them a round, all in the evaluation."""
    kind, client, settings = ONE_USER[method]
    dealt = movielens("ml-1m", seed, ROOT, clients=6040)

    def client_fn(context: Context) -> Any:
        own = dealt.clients[int(context.node_config["partition-id"])]
        more = {"test": own.test, "rank_at": 10, "relevant": RELEVANT}
        return client(context, own.train, SquaredL2(8.0), **more).to_client()

    strategy = kind(SquaredL2(8.0), fraction_train=0.1, seed=seed, **settings)
    first = initial_item_factors(5, dealt.num_items, seed=seed, scale=0.1)
    up, started = _counted(strategy), time.process_time()
    result = strategy.start(InProcessGrid(client_app(client_fn), 6040), first, rounds)
    found = result.evaluate_metrics_clientapp[rounds]
    return {
        "method": method,
        "rmse": found["rmse"],
        **{name: found[name] for name in ("hr", "precision", "recall", "ndcg")},
        "rounds": rounds,
        "numbers-up": up() / 1e6,
        "seconds": round((time.process_time() - started) / rounds, 1),
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def one_user_each(seed: int) -> Iterator[Row]:
    spawn = multiprocessing.get_context("spawn")  # so that each has a peak of its own
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for method in ONE_USER:
            yield pool.submit(one_user, method, seed, 3).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=[*CLIENTS, "noise", "one-user"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--leave-one-out", action="store_true")
    asked = parser.parse_args()
    names = ["method", "seed", "rmse", "hr", "precision", "recall", "ndcg", "coverage"]
    names += ["rounds", "numbers-up", "seconds"]
    names += {"noise": [], "one-user": ["gigabytes"]}.get(asked.what, ["settings"])
    writer = csv.DictWriter(sys.stdout, names, restval="", lineterminator="\n")
    writer.writeheader()
    for seed in asked.seeds:
        if asked.what == "noise":
            rows = noise(seed)
        elif asked.what == "one-user":
            rows = one_user_each(seed)
        else:
            rows = compared(Data.dealt(asked.what, seed, one_out=asked.leave_one_out))
        for row in rows:
            shown = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow({"seed": seed, **shown})
            sys.stdout.flush()


if __name__ == "__main__":
    main()
