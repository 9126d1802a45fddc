"""A method's default form, with its fixed number of steps, ends at the minimiser of its objective.

Each client has f_i(x) = (x - c_i)^T H_i (x - c_i)/2 in two parameters, v of size 1 and u of size 2,
in float64, with curvatures of 0.1, 0.24 and 0.4. Gradients are of all samples, so that epochs are
steps; they are of 0.5. pFedMe is not among the methods: its w_i take 20 steps of their own in a
round, and w ends away from the minimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray
from torch import Tensor, nn

import clients as of
from clients import client_app
from fl_admm_strategies import (
    FLAME,
    FPFC,
    Ditto,
    FedADMM,
    FedAPM,
    FedDyn,
    FedGiA,
    LpProjADMM,
    SmoothedSCAD,
    StatefulStrategy,
)
from fl_admm_strategies.maths.projection import projection
from tests.support.federation import Federation, node_of
from tests.support.pace import fast

Vector = NDArray[np.float64]
M, D, SEED = 4, 3, 3
SIZES = np.array([1, 4, 2, 3])


def curvature(seed: int) -> Vector:
    turn, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((D, D)))
    return turn @ np.diag([0.1, 0.24, 0.4]) @ turn.T


H = np.array([curvature(i) for i in range(M)])
# Two and two are near each other, for FPFC; the local minimisers are up to 4 apart.
C = np.array([[1, 2, 0], [1.1, 1.9, 0], [-1, -1, 1.5], [-1, -1.1, 1.4]])


def slope(client: int, x: Vector) -> Vector:
    """Return grad f_i(x)."""
    return H[client] @ (x - C[client])


class Model(nn.Module):
    """x = (v, u), at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.u = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.v, self.u]).expand(len(inputs), -1)


def client_of(kind: Any, context: Context) -> Any:
    i = int(context.node_config["partition-id"])
    h, n = torch.tensor(H[i]), int(SIZES[i])

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        gap = outputs - targets
        return ((gap @ h) * gap).sum(dim=1).mean() / 2

    batch = torch.zeros(n, 1), torch.tensor(C[i]).expand(n, -1)
    return kind(context, Model(), [batch], loss_fn, full_batch=True)


@dataclass
class Ended:
    """A run that has ended: its strategy, and its clients."""

    strategy: Any
    grid: Federation
    kind: Any

    @property
    def alpha(self) -> Vector:
        """1/m, or n_i/n."""
        by_size = getattr(self.strategy, "weights", "uniform") == "size"
        return SIZES / SIZES.sum() if by_size else np.full(M, 1 / M)

    def shared(self) -> Vector:
        """Return the global model."""
        model = self.strategy.global_model()
        return np.concatenate([model["v"], model["u"]])

    def own(self) -> Vector:
        """Return the clients' own models, (m, d)."""
        models = [
            client_of(self.kind, self.grid.context(node_of(i))).personal_arrays() for i in range(M)
        ]
        return np.array([np.concatenate([model["v"], model["u"]]) for model in models])


def run(strategy: StatefulStrategy, rounds: int) -> Ended:
    kind = getattr(of, f"{strategy.method}Client")
    grid = Federation(client_app(lambda context: client_of(kind, context).to_client()), M)
    strategy.start(grid, ArrayRecord(Model().state_dict()), rounds)
    return Ended(strategy, grid, kind)


Gradient = Callable[[Vector], Vector]
Read = Callable[[Ended], tuple[Vector, Gradient]]
"""The variables at the end of a run, and the gradient of the method's objective at any."""


def one_model(ended: Ended) -> tuple[Vector, Gradient]:
    """sum_i alpha_i f_i(w)."""
    return ended.shared(), lambda w: sum(ended.alpha[i] * slope(i, w) for i in range(M))


def envelopes(ended: Ended, image: Vector | None = None) -> tuple[Vector, Gradient]:
    """sum_i alpha_i (f_i(theta_i) + lambda/2 |P theta_i - w|^2), for FLAME with P = 1."""
    lam, p = ended.strategy.lam, np.eye(D) if image is None else image
    w = ended.shared() if image is None else ended.strategy.state.w

    def gradient(z: Vector) -> Vector:
        w, theta = z[: len(p)], z[len(p) :].reshape(M, D)
        gaps = theta @ p.T - w
        own = [slope(i, theta[i]) + lam * p.T @ gaps[i] for i in range(M)]
        return np.concatenate([-ended.alpha @ gaps, *own])

    return np.concatenate([w, ended.own().ravel()]), gradient


def projected(ended: Ended) -> tuple[Vector, Gradient]:
    return envelopes(ended, projection(SEED, 2, D, "float64"))


def partly_shared(ended: Ended) -> tuple[Vector, Gradient]:
    """sum_i alpha_i f_i(v_i, u)."""

    def gradient(z: Vector) -> Vector:
        u, v = z[:2], z[2:]
        slopes = np.array([slope(i, np.array([v[i], *u])) for i in range(M)])
        return np.concatenate([ended.alpha @ slopes[:, 1:], slopes[:, 0]])

    return np.concatenate([ended.strategy.global_model()["u"], ended.own()[:, 0]]), gradient


def fused(ended: Ended) -> tuple[Vector, Gradient]:
    """sum_i f_i(omega_i) + 1/(2m) sum_ij g(sqrt(rho) |omega_i - omega_j|), g being (3)."""
    g, rho = ended.strategy.penalty, ended.strategy.state.pairs.rho

    def rate(t: float) -> float:
        """g'(t)/t."""
        if t <= g.xi:
            return float(g.lam / g.xi)
        return float(np.clip((g.a * g.lam - t) / (g.a - 1), 0, g.lam) / t)

    def gradient(z: Vector) -> Vector:
        omega = z.reshape(M, D)
        gaps = omega[:, None] - omega
        rates = np.array(
            [[rho * rate(float(np.sqrt(rho) * np.linalg.norm(gap))) for gap in row] for row in gaps]
        )
        pulls = (rates[:, :, None] * gaps).sum(axis=1) / M
        return np.concatenate([slope(i, omega[i]) + pulls[i] for i in range(M)])

    return ended.strategy.state.pairs.omega.ravel().copy(), gradient


def beside(ended: Ended) -> tuple[Vector, Gradient]:
    """sum_i f_i(w), and for each client f_i(v_i) + lambda/2 |v_i - w|^2 at that w."""

    def gradient(z: Vector) -> Vector:
        w, v = z[:D], z[D:].reshape(M, D)
        own = [slope(i, v[i]) + ended.strategy.lam * (v[i] - w) for i in range(M)]
        return np.concatenate([sum(slope(i, w) for i in range(M)), *own])

    return np.concatenate([ended.shared(), ended.own().ravel()]), gradient


def distance(point: Vector, gradient: Gradient) -> float:
    """Return how far the root of a piecewise affine gradient is from a point."""
    step = 1e-7
    columns = [(gradient(point + step * e) - gradient(point)) / step for e in np.eye(len(point))]
    return float(np.abs(np.linalg.solve(np.array(columns).T, gradient(point))).max())


CASES: dict[str, tuple[Any, Read, int]] = {
    "FedADMM": (FedADMM, one_model, 150),
    "FedADMM, by size": (partial(FedADMM, weights="size"), one_model, 210),
    "FedADMM, duals with the clients": (partial(FedADMM, duals="client"), one_model, 150),
    "FedDyn": (FedDyn, one_model, 150),
    "FedGiA": (FedGiA, one_model, 100),
    "FLAME": (FLAME, envelopes, 100),
    "FLAME, by size": (partial(FLAME, weights="size"), envelopes, 120),
    "FLAME, duals with the clients": (partial(FLAME, duals="client"), envelopes, 100),
    "FLAME, lambda .03": (partial(FLAME, lam=0.03), envelopes, 130),
    "FLAME, lambda 30": (partial(FLAME, lam=30.0), envelopes, 150),
    "FedAPM": (partial(FedAPM, "^v$"), partly_shared, 200),
    "Lp-Proj by ADMM": (partial(LpProjADMM, dimension=2), projected, 220),
    "FPFC": (partial(FPFC, SmoothedSCAD(0.2)), fused, 150),
    "Ditto": (Ditto, beside, 200),
}
"""The method, its objective, and rounds with all clients; twice as many with half of them."""


def ended(name: str, fraction: float) -> Ended:
    make, _, rounds = CASES[name]
    steps = {} if make is FedGiA else {"lr": 0.5}
    strategy = make(fraction_train=fraction, fraction_evaluate=0, seed=SEED, **steps)
    return run(strategy, rounds if fraction == 1 else 2 * rounds)


@pytest.mark.parametrize("name", fast(["FedADMM", "FLAME"], CASES))
def test_the_fixed_point_is_the_minimiser(name: str) -> None:
    assert distance(*CASES[name][1](ended(name, 1.0))) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "Ditto"])
def test_it_is_also_where_half_of_the_clients_take_part(name: str) -> None:
    # Ditto's w is FedAvg's, which follows the clients of the round.
    assert distance(*CASES[name][1](ended(name, 0.5))) < 1e-6
