"""Our runs beside plain loops of the same algorithms, written for the purpose, in one process.

Run with `PYTHONPATH=. python tests/benchmarks/beside_plain_loops.py` (minutes; FL_ADMM_DATA names
the data folder), or name some cases: `... beside_plain_loops.py fpfc-20 fedgia`. A plain loop has
no messages, no checks and nobody who may fail: clients one by one, a model and `torch.optim.SGD`
each, batches of a `DataLoader`, server variables in a dict by pair or client. It gets our data and,
round by round, our participants. Both take processor time, one thread, the first round left out;
the ratio is plain over ours. Where nothing is drawn at random (FPFC, FedGiA) both must end at the
same models.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from fl_admm_strategies import StatefulStrategy
from simulations.experiments.experiment import load_experiment
from simulations.experiments.run_config import RunConfig
from simulations.methods import Federation
from simulations.methods.federation import grid_of
from simulations.problems import Problem

Vector = NDArray[Any]
Round = Callable[[int, list[int]], None]
Loop = Callable[[Problem, StatefulStrategy], tuple[Round, Callable[[], list[Vector]]]]

FEW = 3  # rounds that every case is given at least


def ours(problem: Problem, rounds: int) -> tuple[float, StatefulStrategy]:
    """Return the seconds of rounds 2 to `rounds`, and the strategy after them."""
    federation = Federation(problem, problem.settings.algorithm, problem.settings.client)
    strategy = federation.strategy(fraction_evaluate=0)
    ends: list[float] = []
    with grid_of(federation, 1) as grid:
        strategy.start(
            grid,
            problem.initial_arrays(strategy),
            rounds,
            on_round=lambda *_: ends.append(time.process_time()),
        )
    return ends[-1] - ends[0], strategy


def plain(loop: Round, strategy: StatefulStrategy, rounds: int) -> float:
    """Return the seconds of rounds 2 to `rounds` with the same participants."""
    for server_round in range(1, rounds + 1):
        if server_round == 2:
            began = time.process_time()
        loop(server_round, sorted(strategy.train_metrics[server_round]))
    return time.process_time() - began


# --- The clients' half, in PyTorch ----------------------------------------------------------------


class Client:
    """A model, its loss and its batches."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.model: nn.Module = copy.deepcopy(arguments["model"])
        self.loss = arguments["loss_fn"]
        self.make_optimizer = arguments["optimizer_fn"]
        if arguments["full_batch"]:
            self.loader: Any = [*arguments["train_loader"]]
        else:
            own = arguments["train_loader"]
            dataset = TensorDataset(*own.dataset.tensors)
            self.loader = DataLoader(dataset, own.batch_size, shuffle=True)

    def vector(self) -> Vector:
        """Return the model's parameters."""
        return parameters_to_vector(self.model.parameters()).detach().numpy().copy()

    def descend(
        self,
        lr: float,
        epochs: int,
        pulls: Callable[[str], tuple[float, torch.Tensor] | None],
        moving: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Take `epochs` of SGD on the loss with a proximal term for each parameter."""
        self.model.train()
        named = [(name, p) for name, p in self.model.named_parameters() if moving(name)]
        terms = [(p, pulls(name)) for name, p in named]
        optimizer = self.make_optimizer([p for _, p in named], lr=lr)
        for _ in range(epochs):
            for x, y in self.loader:
                self.model.zero_grad()
                self.loss(self.model(x), y).backward()
                for parameter, term in terms:
                    if term is not None and parameter.grad is not None:
                        parameter.grad.add_(parameter.detach() - term[1], alpha=term[0])
                optimizer.step()

    def parts(self, vector: Vector) -> Iterator[tuple[str, torch.Tensor]]:
        """Cut a vector into the parameters, by name."""
        whole = torch.from_numpy(vector)
        for name, parameter in self.model.named_parameters():
            part, whole = whole[: parameter.numel()], whole[parameter.numel() :]
            yield name, part.view_as(parameter)


def towards(client: Client, weight: float, anchor: Vector) -> Callable[[str], Any]:
    """Return the proximal term (weight/2) ||u - anchor||^2, by parameter."""
    parts = dict(client.parts(anchor))
    return lambda name: (weight, parts[name])


def clients_of(problem: Problem) -> list[Client]:
    """Return all clients."""
    torch.manual_seed(0)
    return [Client(problem.client_arguments(i)) for i in range(problem.num_clients)]


# --- The methods ----------------------------------------------------------------------------------


def fpfc(problem: Problem, strategy: Any) -> tuple[Round, Callable[[], list[Vector]]]:
    """Return FPFC, Algorithm 2 with (5), (6) and (A.3), pair by pair."""
    clients, m = clients_of(problem), problem.num_clients
    rho, lr, epochs = strategy.rho, strategy.lr, strategy.local_epochs
    lam, a, xi = strategy.penalty.lam, strategy.penalty.a, strategy.penalty.xi
    omega = [client.vector() for client in clients]
    zero = np.zeros_like(omega[0])
    theta = dict.fromkeys(combinations(range(m), 2), zero)
    v = dict(theta)
    zeta = list(omega)

    def prox(delta: Vector) -> Vector:
        r = float(np.linalg.norm(delta))
        if r <= xi + lam / rho:
            return xi * rho / (lam + xi * rho) * delta
        if r <= lam + lam / rho:
            return (1 - lam / (rho * r)) * delta
        if r <= a * lam:
            left = max(0.0, 1 - a * lam / ((a - 1) * rho * r))
            return left / (1 - 1 / ((a - 1) * rho)) * delta
        return delta

    def one_round(server_round: int, active: list[int]) -> None:
        for i in active:
            vector_to_parameters(torch.tensor(omega[i]), clients[i].model.parameters())
            clients[i].descend(lr, epochs, towards(clients[i], rho, zeta[i]))
            omega[i] = clients[i].vector()
        taking_part = set(active)
        for i, j in combinations(range(m), 2):
            if i in taking_part or j in taking_part:
                delta = omega[i] - omega[j] + v[i, j] / rho
                theta[i, j] = prox(delta)
                v[i, j] = rho * (delta - theta[i, j])
        for i in range(m):
            total = omega[i].copy()
            for j in range(m):
                if j != i:
                    sign, pair = (1, (i, j)) if i < j else (-1, (j, i))
                    total += omega[j] + sign * (theta[pair] - v[pair] / rho)
            zeta[i] = total / m

    return one_round, lambda: omega


def flame(problem: Problem, strategy: Any) -> tuple[Round, Callable[[], list[Vector]]]:
    """Return FLAME with a fixed number of epochs: the theta-step, (12), (13), the mean."""
    clients, m = clients_of(problem), problem.num_clients
    lam, rho, a = strategy.lam, strategy.penalty, strategy.lam / problem.num_clients
    theta = [client.vector() for client in clients]
    local, pi, w = list(theta), [np.zeros_like(theta[0])] * m, theta[0]

    def one_round(server_round: int, active: list[int]) -> None:
        nonlocal w
        for i in active:
            term = towards(clients[i], lam, local[i])
            clients[i].descend(strategy.lr, strategy.local_epochs, term)
            theta[i] = clients[i].vector()
            local[i] = (a * theta[i] + rho * w - pi[i]) / (a + rho)
            pi[i] = pi[i] + rho * (local[i] - w)
        w = np.mean([x + y / rho for x, y in zip(local, pi, strict=True)], axis=0)

    return one_round, lambda: theta


def fedapm(problem: Problem, strategy: Any) -> tuple[Round, Callable[[], list[Vector]]]:
    """Return FedAPM: the v-step, the u-step, the duals, the mean of the shared parts."""
    clients, m = clients_of(problem), problem.num_clients
    rho, sigma = strategy.rho, strategy.sigma
    model = clients[0].model
    own = {n for n, _ in model.named_parameters() if strategy._personal.search(n)}
    first = {n: p.detach().clone() for n, p in model.named_parameters() if n not in own}
    w = first
    pi = [{n: torch.zeros_like(p) for n, p in first.items()} for _ in range(m)]
    z = [dict(first) for _ in range(m)]

    def one_round(server_round: int, active: list[int]) -> None:
        nonlocal w
        for i in active:
            client = clients[i]
            before = {n: p.detach().clone() for n, p in client.model.named_parameters()}
            step = (strategy.lr, strategy.personal_epochs)
            client.descend(*step, lambda n, at=before: (sigma, at[n]), lambda n: n in own)
            anchor = {n: w[n] - pi[i][n] / rho for n in w}
            step = (strategy.lr, strategy.local_epochs)
            client.descend(*step, lambda n, at=anchor: (rho, at[n]), lambda n: n not in own)
            for n, p in client.model.named_parameters():
                if n not in own:
                    pi[i][n] = pi[i][n] + rho * (p.detach() - w[n])
                    z[i][n] = p.detach() + pi[i][n] / rho
        w = {n: torch.stack([z_i[n] for z_i in z]).mean(dim=0) for n in w}

    return one_round, lambda: []


def fedgia(problem: Any, strategy: Any) -> tuple[Round, Callable[[], list[Vector]]]:
    """Return FedGiA_D, Algorithm 1 with every one of its k0 steps taken."""
    m, k0, sigma = problem.num_clients, strategy.local_steps, strategy.sigma
    losses = problem.losses  # Logistic; its own gradient leaves out the zeros of A

    def slope(loss: Any) -> Vector:
        over = 1 / (1 + np.exp(-(loss.matrix @ x))) - loss.targets
        return np.asarray(over @ loss.matrix / len(over) + loss.reg * x)

    r = [loss.largest_curvature() for loss in losses]
    x = np.zeros(problem.data.num_features)
    messages, duals = [x] * m, [np.zeros_like(x)] * m

    def one_round(server_round: int, active: list[int]) -> None:
        nonlocal x
        group = strategy.admm_group(server_round)
        for i in active:
            gradient = slope(losses[i]) / m
            if group[i]:
                for _ in range(k0):
                    iterate = x - (gradient + duals[i]) / (r[i] / m + sigma)
                    duals[i] = duals[i] + sigma * (iterate - x)
            else:
                iterate, duals[i] = x, -gradient
            messages[i] = iterate + duals[i] / sigma
        x = np.mean(messages, axis=0)

    return one_round, lambda: [x]


def fedmc(problem: Any, strategy: Any) -> tuple[Round, Callable[[], list[Vector]]]:
    """Return FedMC-ADMM, (66), (67) and the server's step, in scipy.sparse."""
    from scipy.sparse import csr_matrix

    p, beta, steps = problem.num_clients, strategy.beta, strategy.inner_steps
    ratings = [problem.client_arguments(i)["train"] for i in range(p)]
    observed = [one.to_csr() for one in ratings]
    rng = np.random.default_rng(0)
    rank, items = problem.settings.model.rank, observed[0].shape[1]
    V = rng.random((rank, items))
    U = [rng.random((M.shape[0], rank)) for M in observed]
    Y = [np.zeros_like(V) for _ in range(p)]
    W = [V] * p
    lam, gamma = 1e-6, strategy.regularizer.lam

    def error(i: int, U: Vector, W: Vector) -> Any:
        M = observed[i]
        predicted = np.einsum("kr,kr->k", U[ratings[i].users], W.T[M.indices])
        return csr_matrix((predicted - M.data, M.indices, M.indptr), M.shape)

    def one_round(server_round: int, active: list[int]) -> None:
        nonlocal V
        for i in active:
            u, w = U[i], V
            L = np.linalg.norm(w @ w.T)
            for _ in range(steps):
                u = (L * u - error(i, u, w) @ w.T) / (L + lam)
            L = np.linalg.norm(u.T @ u)
            for _ in range(steps):
                w = (L / p * w + beta * V - (error(i, u, w).T @ u).T / p - Y[i]) / (L / p + beta)
            U[i], W[i], Y[i] = u, w, Y[i] + beta * (w - V)
        V = sum(W[i] + Y[i] / beta for i in range(p)) * beta / (p * beta + gamma)

    return one_round, lambda: [V]


CASES: dict[str, tuple[str, tuple[str, ...], int, Loop, float | None]] = {
    "fpfc-20": ("synthetic-s1", ("data.options.clients=20",), 30, fpfc, 1e-4),
    "fpfc-100": ("synthetic-s1", (), 30, fpfc, 1e-4),
    "flame": ("flame-mnist", ("data.options.samples=10000",), 8, flame, None),
    "fedapm": ("fedapm-cifar10", ("data.options.samples=4000",), 4, fedapm, None),
    "fedgia": ("fedgia-qsar", ("report.sweep=[]",), 40, fedgia, 1e-9),
    "fedmc": ("movielens-1m", (), 20, fedmc, None),
}
"""Experiment, changes, rounds, the plain loop and how far apart, relatively, both may end."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--rounds", type=int, help=f"of every case, at least {FEW}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    threadpool_limits(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print("| case | rounds | plain, ms a round | ours, ms a round | ratio |\n|---|---|---|---|---|")
    for name in asked.cases or CASES:
        experiment, changes, rounds, loop, tolerance = CASES[name]
        rounds = max(asked.rounds or rounds, FEW)
        changes = (*changes, "baselines={}", f"training.num-rounds={rounds}")
        problem = load_experiment(RunConfig(experiment, changes=changes)).problem
        own, strategy = ours(problem, rounds)
        one_round, models = loop(problem, strategy)
        beside = plain(one_round, strategy, rounds)
        if tolerance is not None:
            check(strategy, models(), tolerance)
        a, b = 1000 * beside / (rounds - 1), 1000 * own / (rounds - 1)
        print(f"| {name} | {rounds} | {a:.1f} | {b:.1f} | {a / b:.2f} |", flush=True)


def check(strategy: StatefulStrategy, models: list[Vector], tolerance: float) -> None:
    """Raise RuntimeError if our models are not those of the plain loop."""
    kind = next(iter(strategy.kinds))
    for client, expected in zip(strategy.client_ids, models, strict=False):
        arrays: Any = strategy.model_arrays(kind, client)
        found = np.concatenate([array.numpy().ravel() for array in arrays.values()])
        away = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        if not away <= tolerance:
            raise RuntimeError(f"client {client}'s model is {away:.2g} from the plain loop's")


if __name__ == "__main__":
    main()
