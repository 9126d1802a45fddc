"""Whether the re-check of FPFC without a lambda mends groups that were made wrong on purpose.

    python -m tests.benchmarks.fpfc_recheck 4x5,shared,uneven,few,noise 10-11 split,two,tenth
    python -m tests.benchmarks.fpfc_recheck 4x5,shared,uneven,few,noise,imbalance 10-15 truth

Softmax regression, 20 features to 10 classes, in the strategy, half of the clients a round. When
the search ends, its groups are replaced: by the true ones ("truth"), with two as one, one split, or
a tenth of the clients elsewhere. Of every change: the round, the ARI and the re-checks so far;
behind them what each re-check sent down and up, in models a client.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, InProcessGrid
from fl_admm_strategies.algorithms.fpfc.finding import Score
from fl_admm_strategies.algorithms.fpfc.recheck import Judge
from fl_admm_strategies.maths.grouping import numbered
from fl_admm_strategies.maths.pairs import PairwiseStore

ROUNDS = 110
TEST = 200
SIZES = {"uneven": [3] * 5 + [1] * 3, "pairs": [2] * 8, "sizes": [1, 2, 3, 10]}


def family(name: str, seed: int) -> tuple[list[tuple[Tensor, Tensor]], NDArray[np.int64]]:
    """Return the clients' training samples, and their groups."""
    draw = np.random.default_rng([seed, 77])
    sizes = SIZES.get(name, [5] * 4)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    common, own = (1.0, 0.5) if name == "shared" else (0.0, 1.0)
    base = draw.normal(size=(10, 20))
    teachers = [common * base + own * draw.normal(size=(10, 20)) for _ in sizes]
    clients = []
    for group in truth:
        count = {
            "few": lambda: int(draw.integers(5, 21)),
            "imbalance": lambda: int(np.exp(draw.uniform(np.log(8), np.log(400)))),
        }.get(name, lambda: 50)()
        inputs = draw.normal(size=(count + TEST, 20)).astype(np.float32)
        scores = inputs @ teachers[group].T + 0.0 * draw.normal(size=(count + TEST, 10))
        labels = scores.argmax(axis=1)
        if name == "noise":
            flip = draw.random(len(labels)) < 0.2
            labels[flip] = draw.integers(0, 10, flip.sum())
        with_one = np.hstack([inputs, np.ones((len(inputs), 1), np.float32)])
        clients.append((torch.tensor(with_one[:count]), torch.tensor(labels[:count])))
    return clients, truth


def wrong(truth: NDArray[np.int64], kind: str, seed: int) -> list[int]:
    draw = np.random.default_rng([seed, 9])
    labels, sizes = truth.copy(), np.bincount(truth)
    several = np.flatnonzero(sizes > 1)
    if kind == "two":
        kept, lost = draw.choice(np.argsort(-sizes, kind="stable")[: len(several)], 2, False)
        labels[labels == kept] = lost
    elif kind == "split":
        members = draw.permutation(np.flatnonzero(truth == draw.choice(several)))
        labels[members[: len(members) // 2]] = len(sizes)
    elif kind == "tenth":
        movable = np.flatnonzero(sizes[truth] > 1)
        for client in draw.choice(movable, max(1, len(truth) // 10), replace=False):
            labels[client] = draw.choice([g for g in range(len(sizes)) if g != labels[client]])
    return list(numbered(labels))


def run(name: str, seed: int, kind: str) -> tuple[list[tuple[int, float, int]], list[float]]:
    clients, truth = family(name, seed)
    groups, found, sent = wrong(truth, kind, seed), [], []
    score, tasks = Score.take, Judge.tasks

    def net() -> nn.Module:
        made = nn.Linear(21, 10, bias=False)
        nn.init.zeros_(made.weight)
        return made

    def client(context: Context) -> Any:
        batch = clients[int(context.node_config["partition-id"])]
        return FPFCClient(
            context, net(), [batch], nn.CrossEntropyLoss(), full_batch=True
        ).to_client()

    def replaced(self: Any, search: Any, server_round: int, state: Any, replies: Any) -> Any:
        following = score(self, search, server_round, state, replies)
        search.groups = {c: groups[c] for c in search.groups}
        models = {
            g: np.mean([p for c, p in search.probes.items() if groups[c] == g], axis=0)
            for g in set(groups)
        }
        omega = np.stack([models[groups[c]] for c in state.clients.ids])
        state.pairs = PairwiseStore(omega, state.source.penalty, state.pairs.rho)
        return following

    def counted(self: Any, search: Any, start: Any) -> Any:
        asked = tasks(self, search, start)
        sent.append(2 + sum(t.settings["candidates"] for t in asked.values()) / len(truth))
        return asked

    strategy = FPFC(lr=0.5, fraction_train=0.5, fraction_evaluate=0.0, seed=seed)

    def look(server_round: int, metrics: Any) -> None:
        search = strategy.state.source.found  # type: ignore[attr-defined]
        labels = [search.groups.get(c, -1) for c in strategy.client_ids]
        now = round(adjusted_rand_score(truth, labels), 2), search.rechecks
        if not found or found[-1][1:] != now:
            found.append((server_round, *now))

    Score.take, Judge.tasks = replaced, counted  # type: ignore[method-assign]
    try:
        grid = InProcessGrid(client_app(client, num_clients=len(truth), cohort=True), 1)
        strategy.start(grid, ArrayRecord(net().state_dict()), ROUNDS, on_round=look)
    finally:
        Score.take, Judge.tasks = score, tasks  # type: ignore[method-assign]
    return found, [round(part, 1) for part in sent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "families", help="of 4x5, shared, uneven, pairs, sizes, few, noise, imbalance"
    )
    parser.add_argument("seeds", help="e.g. 10-15")
    parser.add_argument("kinds", help="of truth, split, two, tenth")
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    first, last = map(int, given.seeds.split("-"))
    for kind in given.kinds.split(","):
        ends = []
        for name in given.families.split(","):
            for seed in range(first, last + 1):
                found, sent = run(name, seed, kind)
                ends.append(found[-1][1])
                print(kind, name, seed, found, sent, flush=True)
        print(f"{kind}: {ends.count(1.0)} of {len(ends)} exact, mean ARI {np.mean(ends):.3f}")


if __name__ == "__main__":
    main()
