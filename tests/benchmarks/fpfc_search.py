"""How often FPFC without a lambda finds the true groups: its search, over many seeds.

    python -m tests.benchmarks.fpfc_search digits 201-230 --participation 0.5
    python -m tests.benchmarks.fpfc_search s1 201-225 --participation 0.3 --rounds 80

The mathematics is the library's (`candidate_groups`, `SearchState`, `compare`,
`PairwiseStore`), the data its loaders'; the clients are not: all of them train at once, as stacked
matrices, which takes seconds where a federation takes minutes. Softmax and linear regression by
full gradients, with the step sizes, epochs and initial models of the experiments. In the synthetic
scenarios, whose largest clients hold tens of thousands of samples, a client keeps at most 320 to
train and 80 to validate.
With `--rounds` FPFC's own rounds follow.

    python -m tests.benchmarks.fpfc_search digits 601-630 --participation 0.5 --validation few

`few`: a quarter of the clients have `FEW` samples, of which they hold one out; beside it the groups
that are found without their votes.
"""

from __future__ import annotations

import argparse
import os
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from clients.methods.fpfc import PARTS, error_of_mean
from fl_admm_strategies.algorithms.fpfc.finding import (
    CUTS,
    LONGER,
    MOST_REFITS,
    STANDARD_ERRORS,
    VOTERS,
)
from fl_admm_strategies.algorithms.fpfc.search import (
    PROBE_FACTOR,
    REFIT_ROUNDS,
    SearchState,
    lambda_between,
)
from fl_admm_strategies.algorithms.fpfc.source import NO_FUSION, scad
from fl_admm_strategies.algorithms.fpfc.together import RENEWAL
from fl_admm_strategies.maths.candidates import voters as voters_of
from fl_admm_strategies.maths.clustering import cluster_models, clusters
from fl_admm_strategies.maths.grouping import (
    Labels,
    candidate_groups,
    compare,
    holding_lambda,
    numbered,
    smallest_distance,
)
from fl_admm_strategies.maths.pairs import Groups, PairwiseStore
from simulations.data.federated import FederatedData, Samples
from simulations.data.housing_bodyfat import housing_bodyfat
from simulations.data.images import digits_swap
from simulations.data.synthetic import synthetic

FEW = 4
VALIDATIONS = ["share", "few"]
CHUNK = 12  # clients of like size, which share a block of samples


class Task(NamedTuple):
    """A data set with the settings of its experiment."""

    data: FederatedData
    lr: float
    epochs: int
    start: str
    most: int  # samples of a client, before they are split


def task_of(name: str, seed: int) -> Task:
    root = Path(os.environ.get("FL_ADMM_DATA", "."))
    if name == "digits":
        return Task(digits_swap(seed, root, validation=True), 0.3, 10, "uniform", 10**9)
    if name == "housing":
        return Task(housing_bodyfat(seed, root, validation=True), 0.01, 20, "zero", 10**9)
    return Task(synthetic(name, seed, root, validation=True), 0.1, 10, "normal", 500)


class Clients:
    """The samples of many clients as blocks; models are of shape (m, S, outputs, features)."""

    def __init__(self, samples: list[Samples], outputs: int) -> None:
        self.outputs, self.m = outputs, len(samples)
        order = np.argsort([len(labels) for _, labels in samples], kind="stable")
        self.blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for part in np.array_split(order, max(1, self.m // CHUNK)):
            most = max(len(samples[i][1]) for i in part)
            inputs = torch.zeros(len(part), most, samples[0][0].shape[1] + 1)
            labels = torch.zeros(len(part), most, dtype=samples[0][1].dtype)
            weight = torch.zeros(len(part), most)
            for row, i in enumerate(part):
                x, y = samples[i]
                inputs[row, : len(y), :-1], inputs[row, : len(y), -1] = x, 1
                labels[row, : len(y)], weight[row, : len(y)] = y, 1 / len(y)
            self.blocks.append((torch.tensor(part), inputs, labels, weight))

    def only(self, clients: Tensor) -> Clients:
        """Return some of them."""
        place = {int(client): row for row, client in enumerate(clients)}
        some = object.__new__(Clients)
        some.outputs, some.m, some.blocks = self.outputs, len(clients), []
        for part, inputs, labels, weight in self.blocks:
            rows = [row for row, client in enumerate(part.tolist()) if client in place]
            if rows:
                ids = torch.tensor([place[int(part[row])] for row in rows])
                some.blocks.append((ids, inputs[rows], labels[rows], weight[rows]))
        return some

    def loss(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, shape (m, S), and their gradients."""
        m, tried, outputs, features = models.shape
        losses, gradients = torch.zeros(m, tried), torch.zeros_like(models)
        for part, inputs, labels, weight in self.blocks:
            own = models[part].reshape(len(part), tried * outputs, features)
            made = torch.bmm(inputs, own.transpose(1, 2)).reshape(len(part), -1, tried, outputs)
            if labels.is_floating_point():
                residual = made[..., 0] - labels[:, :, None]
                losses[part] = (residual**2 / 2 * weight[:, :, None]).sum(1)
                slope = residual[..., None]
            else:
                log = torch.log_softmax(made, -1)
                index = labels[:, :, None, None].expand(-1, -1, tried, 1)
                losses[part] = -(log.gather(-1, index)[..., 0] * weight[:, :, None]).sum(1)
                slope = log.exp().scatter_add(-1, index, -torch.ones(index.shape))
            slope = (slope * weight[:, :, None, None]).reshape(len(part), -1, tried * outputs)
            gradients[part] = torch.bmm(slope.transpose(1, 2), inputs).reshape(
                len(part), tried, outputs, features
            )
        return losses, gradients

    def descend(
        self, models: Tensor, steps: int, lr: float, anchor: Tensor | float = 0.0, rho: float = 0.0
    ) -> Tensor:
        """Return the models after some steps of (5)."""
        for _ in range(steps):
            models = models - lr * (self.loss(models)[1] + rho * (models - anchor))
        return models


def errors_of_differences(
    samples: list[Samples], outputs: int, models: Tensor
) -> NDArray[np.float64]:
    """Return what `FPFCClient` reports with its losses, shape (m, S, S); models as of `Clients`."""
    m, tried = models.shape[:2]
    losses, sizes = np.full((m, PARTS, tried), np.nan), np.zeros((m, PARTS))
    for part in range(PARTS):
        rows = [i for i, (_, y) in enumerate(samples) if len(y) > part]
        some = [(samples[i][0][part::PARTS], samples[i][1][part::PARTS]) for i in rows]
        if some:
            losses[rows, part] = Clients(some, outputs).loss(models[rows])[0].double().numpy()
            sizes[rows, part] = [len(y) for _, y in some]
    errors = np.full((m, tried, tried), np.nan)
    for i, there in enumerate(sizes > 0):
        for j, k in combinations(range(tried), 2):
            if there.sum() > 1:
                between = losses[i, there, j] - losses[i, there, k]
                errors[i, j, k] = errors[i, k, j] = error_of_mean(between, sizes[i, there])
    return errors


def study(
    name: str, seed: int, participation: float, rounds: int, validation: str
) -> tuple[bool, bool, bool]:
    """Search in one draw of the data and print what was found.

    Returns whether it is the truth; whether the truth was tried; and whether it is found without
    the votes of clients with few samples.
    """
    data, lr, epochs, start, most = task_of(name, seed)
    outputs, features, m = data.num_classes or 1, data.input_shape[0] + 1, len(data.clients)
    train, held_out = [], []
    for client in data.clients:
        train.append((client.train[0][: most * 64 // 100], client.train[1][: most * 64 // 100]))
        part = most * 16 // 100
        held_out.append((client.validation[0][:part], client.validation[1][:part]))
    few = np.zeros(m, dtype=bool)
    if validation == "few":
        few[np.random.default_rng(10**6 + seed).permutation(m)[: m // 4]] = True
        for i in np.flatnonzero(few):
            train[i] = train[i][0][: FEW - 1], train[i][1][: FEW - 1]
            held_out[i] = held_out[i][0][:1], held_out[i][1][:1]
    trained, scored = Clients(train, outputs), Clients(held_out, outputs)
    generator = torch.Generator().manual_seed(seed)
    first = {
        "normal": torch.randn(outputs, features, generator=generator),
        "uniform": (2 * torch.rand(outputs, features, generator=generator) - 1)
        / (features - 1) ** 0.5,
        "zero": torch.zeros(outputs, features),
    }[start]
    draw = np.random.default_rng(seed)

    def active() -> Tensor:
        return torch.tensor(np.sort(draw.choice(m, max(1, int(participation * m)), replace=False)))

    omega = first.expand(m, 1, outputs, features).clone()
    are_many, is_new = m > VOTERS, torch.ones(m, dtype=torch.bool)
    for _ in range(20):
        some, mean = active(), omega.mean(0, keepdim=True)
        old, new = some[~is_new[some] | (not are_many)], some[is_new[some] & are_many]
        old_models = trained.only(old).descend(omega[old], epochs, lr, mean, 1.0)
        omega[new] = trained.only(new).descend(mean.expand_as(omega[new]), epochs, lr)
        omega[old], is_new[some] = old_models, False
    center = omega.mean(0, keepdim=True).expand_as(omega)
    probes = trained.descend(center, PROBE_FACTOR * epochs, lr)
    tried = candidate_groups((probes - center).reshape(m, -1).numpy(), CUTS)
    flat = dict(enumerate(probes.flatten(1).numpy()))
    state, voters = SearchState(), list(range(m))
    state.try_groupings(range(m), tried, np.stack(list(flat.values())))
    if are_many:
        in_turn = np.random.default_rng(seed).permutation(m).tolist()
        voters = voters_of(state.labels, in_turn, VOTERS)

    def of_clients() -> Tensor:
        models = np.stack([state.models[state.labels[i]] for i in range(m)])
        return torch.from_numpy(models).reshape(m, -1, outputs, features)

    def refit(some: Tensor) -> None:
        made = trained.only(some).descend(of_clients()[some], epochs, lr)
        state.refit(dict(zip(some.tolist(), made.flatten(2).numpy(), strict=True)))

    def scores() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        losses = scored.loss(of_clients())[0].double().numpy()
        training = trained.loss(of_clients())[0].double().numpy()
        errors = errors_of_differences(held_out, outputs, of_clients())
        return losses, errors, training

    for _ in range(0 if are_many else REFIT_ROUNDS):
        refit(torch.arange(m))
    counts, is_tried, refits = [max(of) + 1 for of in tried], set(tried), REFIT_ROUNDS
    while True:
        (losses, errors, training), groups = scores(), np.array(tried).T
        found = compare(
            *(of[voters] for of in (losses, errors, groups)), STANDARD_ERRORS, training[voters]
        )
        if are_many or refits == MOST_REFITS or found.chosen < len(tried) - 1:
            break
        coarser = losses[:, :-1], errors[:, :-1, :-1], groups[:, :-1]
        kept = [compare(*coarser, STANDARD_ERRORS, training[:, :-1]).chosen, len(tried) - 1]
        state.keep(kept)
        tried, refits = [tried[k] for k in kept], refits + LONGER
        for _ in range(LONGER):
            refit(active())
    with_many = compare(
        *(of[~few] for of in (losses, errors, groups)), STANDARD_ERRORS, training[~few]
    )
    of_voters = tried[with_many.chosen]
    labels = tried[found.chosen]
    starts = np.stack([state.models[state.labels[i][found.chosen]] for i in range(m)])
    gradients = trained.loss(of_clients())[1][:, found.chosen].flatten(1)
    needed = holding_lambda(labels, gradients.norm(dim=1).double().numpy())
    truth = numbered(np.arange(m) if data.true_clusters is None else data.true_clusters)
    lam = lambda_between(smallest_distance(np.unique(starts, axis=0)), needed, 1.0)
    print(
        f"{name} {seed}: {'found' if labels == truth else 'MISSED'}, of "
        f"{counts} groups {max(labels) + 1} were taken "
        f"(ARI {adjusted_rand_score(truth, labels):.2f}); lambda {lam:.3g}, needed {needed:.3g}",
        flush=True,
    )
    if rounds:
        fuse(trained, starts, (lam, needed), (truth, labels), active, (epochs, lr, rounds))
    return labels == truth, truth in is_tried, of_voters == truth


def fuse(
    clients: Clients,
    omega: Any,
    lams: tuple[float, float],
    of_clients: tuple[Labels, Labels],
    active: Any,
    settings: tuple[int, float, int],
) -> None:
    """Go on with FPFC's own rounds; print the groups that the pairs have every so often."""
    epochs, lr, rounds = settings
    (lam, needed), (truth, groups) = lams, of_clients
    store = PairwiseStore(omega, scad(lam), 1.0)
    store.groups = Groups(np.array(groups), scad(max(2 * needed, lam)), move=True)
    shape = (1, clients.outputs, omega.shape[1] // clients.outputs)
    for number in range(1, rounds + 1):
        some = active()
        rows = some.numpy()
        zeta = torch.from_numpy(store.zeta(rows)).reshape(-1, *shape).float()
        own = torch.from_numpy(store.omega[rows]).reshape(-1, *shape)
        made = clients.only(some).descend(own, epochs, lr, zeta, 1.0)
        store.update(rows, made.flatten(1).numpy())
        if number % RENEWAL == 0:
            norms = store.theta_norms()
            labels = clusters(norms, NO_FUSION.a * lam / 2)
            at = [int(clusters(norms, nu).max()) + 1 for nu in (0.001, 0.1)]
            print(
                f"    round {number}: {labels.max() + 1} groups, ARI "
                f"{adjusted_rand_score(truth, labels):.2f} (at nu = 0.001 and 0.1: {at}); "
                f"lambda {lam:.3g}",
                flush=True,
            )
            b = smallest_distance(cluster_models(store.omega, np.ones(len(groups)), groups))
            lam = lambda_between(b, needed, 1.0)
            store.penalty = scad(lam)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=["digits", "housing", "s1", "s2", "s3", "s4", "s5"])
    parser.add_argument("seeds", help="e.g. 201-230")
    parser.add_argument("--participation", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--validation", choices=VALIDATIONS, default="share")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, given.seeds.split("-"))
    results = [
        study(given.data, seed, given.participation, given.rounds, given.validation)
        for seed in range(first, last + 1)
    ]
    right, possible, without = np.sum(results, axis=0)
    print(f"{given.data}: {right} of {len(results)}; {possible} tried it", end="")
    print(f"; without their votes {without}" if given.validation == "few" else "")


if __name__ == "__main__":
    main()
