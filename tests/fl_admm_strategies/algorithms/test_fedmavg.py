"""FedMAvg against numbers worked out beside a dense transcript, and who does what in a round."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from clients import FedMAvgClient
from fl_admm_strategies import FedMAvg, FedMGS, L1Norm, SquaredL2
from tests.support.ratings import NUM_CLIENTS, RatingsRun, dense, worked_example
from tests.support.refusals import refused


def users(run: RatingsRun) -> NDArray[Any]:
    return np.concatenate([run.held(i)["user-factors"].ravel() for i in run.train])


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            "paper",
            [
                (
                    [4.2323843117, 3.4503401361, 2.9805996473, 2.4544217687],
                    [0.9909916407, 0.551810751, 0.8244431063],
                    6.059655557,
                ),
                (
                    [4.2165486573, 3.6370214499, 3.4359053195, 2.6828252435],
                    [0.9430243102, 0.6143023697, 0.8636404176],
                    5.7798181765,
                ),
            ],
        ),
        (
            "unscaled",
            [
                (None, [0.9832364355, 0.5992690001, 0.8488994529], 5.8851817851),
                (None, [0.8836926041, 0.7135947111, 0.926755001], 5.6936367257),
            ],
        ),
    ],
)
def test_the_worked_example(step: Literal["paper", "unscaled"], expected: list[Any]) -> None:
    """Rank 1, Q_1 = Q_2 = 2, lam = gamma = 0.1; both clients are drawn, then the second alone."""
    run = worked_example(
        FedMAvg(SquaredL2(0.1), step=step, user_steps=2, item_steps=2), FedMAvgClient
    )
    for k, (sampled, (U, V, phi)) in enumerate(zip([[0, 1], [1]], expected, strict=True), 1):
        assert run.round(k, sampled) == [0, 1]  # everybody moves U_i
        if U is not None:
            np.testing.assert_allclose(users(run), U, rtol=0, atol=1e-8)
        found = run.strategy.global_model()["item-factors"]
        np.testing.assert_allclose(found, [V], rtol=0, atol=1e-8)
        assert run.evaluate(k)["loss"] == pytest.approx(phi, abs=1e-8)


def test_the_trajectory_is_that_of_the_formulas_where_only_the_drawn_train() -> None:
    strategy = FedMAvg(SquaredL2(0.2), step="paper", everyone_trains=False, item_steps=2)
    run = RatingsRun(strategy, SquaredL2(0.3), kind=FedMAvgClient)
    V, U = run.first["item-factors"], {i: run.first_users(i) for i in run.train}

    def error(i: int, W: NDArray[Any]) -> NDArray[Any]:
        values, mask = dense(run.train[i])
        return mask * (U[i] @ W - values)

    for k, drawn in enumerate([[0, 1], [1, 3], [2, 4]], start=1):
        assert run.round(k, drawn) == drawn
        uploads = []
        for i in drawn:
            for _ in range(10):
                slope = error(i, V) @ V.T + 0.3 * U[i]
                U[i] = U[i] - slope / np.linalg.eigvalsh(V @ V.T)[-1]
            W, d = V, 5 * np.linalg.eigvalsh(U[i].T @ U[i])[-1]
            for _ in range(2):
                W = W - (U[i].T @ error(i, W) / NUM_CLIENTS + 0.2 * W) / d
            uploads.append(W)
        V = np.mean(uploads, axis=0)
        np.testing.assert_allclose(run.strategy.item_factors, V, rtol=0, atol=1e-12)


def test_only_the_squared_norm_has_a_gradient() -> None:
    wrong: Any = L1Norm(0.1)
    for made in (FedMAvg, FedMGS):
        with refused(TypeError, "L1Norm", "SquaredL2"):
            made(wrong)
