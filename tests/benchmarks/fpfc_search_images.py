"""How often FPFC without a lambda finds the groups of swapped labels of images: a CNN's head.

    python -m tests.benchmarks.fpfc_search_images fashion-mnist-swap 201-208

As `fpfc_search`, without a federation, from 3,000 images: the consensus trains the CNN client by
client; after it the layers in front of the head stay, so that the rest of the search is softmax
regression on their outputs. For each seed it says what the search takes and whether the truth was
among what it tried. About a minute of processor time a seed. Where "everybody alone" is taken the
search in a run goes on, which this does not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score
from torch import nn

from fl_admm_strategies.algorithms.fpfc.finding import CUTS, STANDARD_ERRORS
from fl_admm_strategies.algorithms.fpfc.stages import PROBE_FACTOR, REFIT_ROUNDS
from fl_admm_strategies.maths.candidates import Candidates
from fl_admm_strategies.maths.grouping import Labels, candidate_groups, compare, numbered
from simulations.data.images import images_swap
from simulations.problems.models import _cnn

DATASETS = {"mnist-swap": "MNIST", "fashion-mnist-swap": "FashionMNIST"}
SAMPLES, CONSENSUS_ROUNDS, ACTIVE, EPOCHS, LR, BATCH = 3000, 20, 10, 10, 0.05, 20

Array = NDArray[np.float32]
Parts = list[tuple[Array, NDArray[np.int64]]]
"""Of every client the outputs of the last shared layer, with a 1, and the labels."""


def features(name: str, seed: int) -> tuple[Parts, Parts, Array, Labels]:
    """Run the consensus; return the parts, trained on and held out, the head and the truth."""
    root = Path(os.environ.get("FL_ADMM_DATA", "."))
    data = images_swap(DATASETS[name], name, seed, root, samples=SAMPLES, validation=True)
    torch.manual_seed(seed)
    net: Any = _cnn(data)
    chance = torch.Generator().manual_seed(seed)
    draw = np.random.default_rng(seed)
    train, held_out = [], []
    for client in data.clients:
        inputs, labels = map(torch.cat, zip(client.train, client.validation, strict=True))
        order = torch.randperm(len(labels), generator=chance)
        count = len(labels) // 5
        held_out.append((inputs[order[:count]], labels[order[:count]]))
        train.append((inputs[order[count:]], labels[order[count:]]))
    m, head, body = len(train), list(net.head.parameters()), list(net[:-1].parameters())
    heads = [[p.detach().clone() for p in head] for _ in range(m)]
    shared = [p.detach().clone() for p in body]

    def put(parameters: list[Any], values: list[Any]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    def mean_head() -> list[Any]:
        return [torch.stack([own[k] for own in heads]).mean(0) for k in range(2)]

    for _ in range(CONSENSUS_ROUNDS):
        anchor, sums, total = mean_head(), [torch.zeros_like(p) for p in body], 0
        for i in np.sort(draw.choice(m, ACTIVE, replace=False)):
            put(body, shared)
            put(head, heads[i])
            inputs, labels = train[i]
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(labels), generator=chance).split(BATCH):
                    loss = nn.functional.cross_entropy(net(inputs[rows]), labels[rows])
                    gradients = torch.autograd.grad(loss, body + head)
                    with torch.no_grad():
                        for p, g in zip(body + head, gradients, strict=True):
                            p -= LR * g
                        for p, a in zip(head, anchor, strict=True):
                            p -= LR * (p - a)
            heads[i] = [p.detach().clone() for p in head]
            sums = [s + len(labels) * p.detach() for s, p in zip(sums, body, strict=True)]
            total += len(labels)
        shared = [s / total for s in sums]
    put(body, shared)
    with torch.no_grad():
        weight, bias = mean_head()
        parts = [
            (np.pad(net[:-1](x).numpy(), ((0, 0), (0, 1)), constant_values=1), y.numpy())
            for x, y in train + held_out
        ]
        center = torch.cat([weight, bias[:, None]], 1).numpy()
    return parts[:m], parts[m:], center, numbered(data.true_clusters)


def descend(
    models: Array, part: tuple[Array, NDArray[np.int64]], epochs: int, draw: np.random.Generator
) -> Array:
    """Return heads of shape (K, 10, 401) after so many epochs of softmax regression."""
    inputs, labels = part
    models, one_hot = models.copy(), np.eye(models.shape[1], dtype=np.float32)
    k = len(models)
    for _ in range(epochs):
        order = draw.permutation(len(labels))
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            made = np.exp(_log_softmax(models, inputs[rows]))
            slope = (made - one_hot[labels[rows]].T).reshape(-1, len(rows)) @ inputs[rows]
            models -= LR / len(rows) * slope.reshape(k, *models.shape[1:])
    return models


def _log_softmax(models: Array, inputs: Array) -> Array:
    """Return an array of shape (K, 10, n)."""
    made = (models.reshape(-1, models.shape[-1]) @ inputs.T).reshape(len(models), -1, len(inputs))
    made -= made.max(1, keepdims=True)
    logs: Array = made - np.log(np.exp(made).sum(1, keepdims=True))
    return logs


def losses(models: Array, part: tuple[Array, NDArray[np.int64]]) -> NDArray[np.float64]:
    """Return the loss of every sample under every model, shape (K, n)."""
    inputs, labels = part
    logs = _log_softmax(models, inputs).astype(float)
    own: NDArray[np.float64] = -logs[:, labels, np.arange(len(labels))]
    return own


def search(train: Parts, held_out: Parts, probes: Array, tried: list[Labels]) -> Labels:
    """Return the groups that are chosen; probes are (m, 10, 401)."""
    draw, clients, shape = np.random.default_rng(1), range(len(train)), probes.shape[1:]
    flat = dict(enumerate(probes.reshape(len(train), -1)))
    candidates = Candidates(clients, tried, np.stack(list(flat.values())))

    def stacked(models: list[Array]) -> Array:
        return np.stack(models).reshape(-1, *shape)

    for _ in range(REFIT_ROUNDS):
        made = {
            i: descend(stacked(candidates.models_of(i)), train[i], EPOCHS, draw) for i in clients
        }
        candidates.refit({i: own.reshape(len(own), -1) for i, own in made.items()})
    scores = [losses(stacked(candidates.models_of(i)), held_out[i]) for i in clients]
    between = [own[:, None] - own for own in scores]
    errors = np.stack([d.std(axis=2, ddof=1) / d.shape[2] ** 0.5 for d in between])
    means = np.stack([own.mean(1) for own in scores])
    return tried[compare(means, errors, np.array(tried).T, STANDARD_ERRORS).chosen]


def study(name: str, seed: int) -> list[bool]:
    """Print what the search takes; return whether it is the truth and whether that was tried."""
    train, held_out, center, truth = features(name, seed)
    draw, epochs = np.random.default_rng(0), PROBE_FACTOR * EPOCHS
    probes = np.stack([descend(center[None], part, epochs, draw)[0] for part in train])
    tried = candidate_groups((probes - center).reshape(len(train), -1), CUTS)
    chosen = search(train, held_out, probes, tried)
    counts = [max(labels) + 1 for labels in tried]
    print(f"{name} {seed}: ARI {adjusted_rand_score(truth, chosen):.2f} of {counts}", flush=True)
    return [chosen == truth, truth in tried]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=list(DATASETS))
    parser.add_argument("seeds", help="e.g. 201-208")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, given.seeds.split("-"))
    found = np.sum([study(given.data, seed) for seed in range(first, last + 1)], axis=0)
    print(f"{given.data}: of {last - first + 1} found {found[0]} (tried {found[1]})")


if __name__ == "__main__":
    main()
