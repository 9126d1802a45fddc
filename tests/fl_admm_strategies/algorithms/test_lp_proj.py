"""Lp-Proj-2 by ADMM, strategy and client together, on quadratics f_i = b/2 ||theta - c_i||^2.

See docs/methods/lp-proj-admm.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from torch import nn

from clients import LpProjADMMClient, client_app
from fl_admm_strategies import LpProjADMM
from fl_admm_strategies.maths.projection import projection
from tests.fl_admm_strategies.algorithms.quadratics import PAIR, Point, point_client
from tests.support.federation import Federation, node_of
from tests.support.refusals import refused

M, D, K, B = 4, 6, 2, 1.3
C = np.random.default_rng(5).standard_normal((M, D))
START = np.random.default_rng(6).standard_normal(D)
SIZES = (1, 4, 2, 3)


class Two(nn.Module):
    """theta in two parameters, of shapes (2, 2) and (2,)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(START[:4]).reshape(2, 2))
        self.second = nn.Parameter(torch.tensor(START[4:]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first.flatten(), self.second]).expand(len(inputs), -1)


def make_client(context: Context) -> LpProjADMMClient:
    client: LpProjADMMClient = point_client(LpProjADMMClient, context, [B] * M, C, SIZES, Two())
    return client


def grid() -> Federation:
    return Federation(client_app(lambda context: make_client(context).to_client()), M)


def run(
    strategy: LpProjADMM, num_rounds: int, watched: Federation | None = None, **kw: Any
) -> None:
    strategy.start(watched or grid(), ArrayRecord(Two().state_dict()), num_rounds, **kw)


def personal(watched: Federation) -> np.ndarray:
    """Return theta_i of every client, shape (m, d)."""
    models = [make_client(watched.context(node_of(i))).personal_arrays() for i in range(M)]
    return np.stack([np.concatenate([m["first"].ravel(), m["second"]]) for m in models])


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_the_projection_has_unit_rows_and_follows_from_the_seed() -> None:
    p = projection(3, 10, 5000, "float64")
    close((p**2).sum(axis=1), np.ones(10))
    # The scaled entries are standard normal: 50,000 of them have mean 0 +- 0.0045, kurtosis 3
    # +- 0.022 (one standard deviation each).
    scaled = p * np.sqrt(5000)
    assert abs(scaled.mean()) < 0.02
    assert abs((scaled**4).mean() - 3) < 0.1
    np.testing.assert_array_equal(projection(3, 10, 5000, "float64"), p)
    projection.cache_clear()
    np.testing.assert_array_equal(projection(3, 10, 5000, "float64"), p)
    assert np.abs(projection(4, 10, 5000, "float64") - p).max() > 0.01


@pytest.mark.parametrize(("weights", "fraction"), [("uniform", 1.0), ("size", 0.5)])
def test_rounds_are_those_of_algorithm_2(weights: str, fraction: float) -> None:
    lam, rho, eta, epochs = 0.8, 0.3, 0.2, 2
    strategy = LpProjADMM(
        lam=lam,
        rho=rho,
        lr=eta,
        local_epochs=epochs,
        dimension=K,
        weights=weights,
        fraction_train=fraction,
        seed=7,
    )
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    watched = grid()
    run(
        strategy,
        6,
        watched,
        on_round=lambda r, metrics: seen.append(
            (strategy.state.w, strategy.state.clients.column("dual").copy())
        ),
    )
    p = projection(7, K, D, "float64")
    alpha = np.array(SIZES) / 10 if weights == "size" else np.full(M, 1 / M)
    theta = np.tile(START, (M, 1))
    w_i = theta @ p.T
    w, pi = w_i[0].copy(), np.zeros((M, K))
    for server_round, (got_w, got_dual) in enumerate(seen, start=1):
        for i in strategy.train_metrics[server_round]:
            a = lam * alpha[i]
            for _ in range(epochs):
                pull = lam * p.T @ (p @ theta[i] - w_i[i])
                theta[i] = theta[i] - eta * (B * (theta[i] - C[i]) + pull)  # (185)
            w_i[i] = (a * p @ theta[i] + rho * w - pi[i]) / (a + rho)  # (186)
            pi[i] = pi[i] + rho * (w_i[i] - w)  # (187)
        w = (w_i + pi / rho).mean(axis=0)  # (188)
        close(got_w, w)
        close(rho * got_dual, pi)
        # docs/methods/lp-proj-admm-notes.md, T1
        close(pi, lam * alpha[:, None] * (theta @ p.T - w_i))
    close(personal(watched), theta)


def test_what_is_not_projected_is_trained_alone() -> None:
    # theta <- theta - eta B (theta - c): theta_1 = c + (1 - eta B)^2 (theta_0 - c) after 2 steps.
    strategy = LpProjADMM(lr=0.2, local_epochs=2, dimension=K, unprojected="second", seed=7)
    watched = grid()
    run(strategy, 1, watched)
    expected = C[:, 4:] + (1 - 0.2 * B) ** 2 * (START[4:] - C[:, 4:])
    close(personal(watched)[:, 4:], expected)
    p = projection(7, K, 4, "float64")
    close(strategy.state.clients.column("theta"), personal(watched)[:, :4] @ p.T)


def test_more_rows_than_numbers_are_refused() -> None:
    with refused(ValueError, "dimension", 7, 6):
        LpProjADMM(dimension=7).run.begin({"theta": np.zeros(6)}, range(2))


def test_the_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/methods/lp-proj-admm-notes.md, E1: P = (.6, .8), a = (1, 2), c = (1, 2), (-1, .5), lambda
    # = 1, rho = .5, lr = .1, two steps. Client 1: theta = .1 c_1 = (.1, .2) with P theta = .22,
    # then (.1, .2) + .1 [(.9, 1.8) - .22 (.6, .8)] = (.1768, .3624).
    p = np.array([[0.6, 0.8]])
    for half in ("fl_admm_strategies.algorithms.lp_proj", "clients.methods.lp_proj"):
        monkeypatch.setattr(f"{half}.projection", lambda *_: p)

    new_client = partial(point_client, LpProjADMMClient, b=PAIR[0], c=PAIR[1])
    watched = Federation(client_app(lambda context: new_client(context).to_client()), 2)
    strategy = LpProjADMM(
        lam=1.0, rho=0.5, lr=0.1, local_epochs=2, dimension=1, fraction_evaluate=0.0
    )
    seen: list[list[Any]] = []

    def on_round(*_: Any) -> None:
        models = [new_client(watched.context(node_of(i))).personal_arrays() for i in (0, 1)]
        seen.append([strategy.state.w, *(model["theta"] for model in models)])

    strategy.start(watched, ArrayRecord(Point().state_dict()), 2, on_round=on_round)
    (w_1, *theta_1), (w_2, *theta_2) = seen
    close(theta_1, [[0.1768, 0.3624], [-0.3576, 0.1832]], 1e-10)
    close(w_1, [0.164], 1e-10)
    close(theta_2, [[0.301, 0.6306], [-0.583812, 0.303984]], 1e-10)
    close(w_2, [0.28899], 1e-10)
