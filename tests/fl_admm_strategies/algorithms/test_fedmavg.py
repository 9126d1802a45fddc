"""FedMAvg against numbers worked out beside a dense transcript, and who does what in a round."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from clients import FedMAvgClient
from fl_admm_strategies import FedMAvg, FedMGS, L1Norm, SquaredL2
from tests.support.ratings import (
    NUM_CLIENTS,
    NUM_ITEMS,
    RANK,
    RatingsRun,
    dense,
    ratings,
    worked_example,
)
from tests.support.refusals import refused

GAMMA, LAM = 0.2, 0.3
OF_V = RANK * NUM_ITEMS * 8  # bytes


def federation(**settings: Any) -> RatingsRun:
    options = {"user_steps": 3, "item_steps": 2, "fraction_train": 0.4, "seed": 1} | settings
    return RatingsRun(FedMAvg(SquaredL2(GAMMA), **options), SquaredL2(LAM), kind=FedMAvgClient)


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


@pytest.mark.parametrize("everyone_trains", [True, False])
def test_the_trajectory_is_that_of_the_formulas(everyone_trains: bool) -> None:
    run = federation(step="paper", everyone_trains=everyone_trains)
    V = run.first["item-factors"]
    U = {i: run.first_users(i) for i in run.train}
    data = {i: dense(own) for i, own in run.train.items()}

    def error(i: int, W: NDArray[Any]) -> NDArray[Any]:
        values, mask = data[i]
        return mask * (U[i] @ W - values)

    for k in range(1, 7):
        asked = run.round(k)
        drawn = [i for i in asked if i not in run.strategy._idle]
        assert len(drawn) == 2
        assert asked == (list(run.train) if everyone_trains else drawn)
        received, uploads = V, []
        for i in asked:
            c = np.linalg.eigvalsh(received @ received.T)[-1]
            for _ in range(3):
                U[i] = U[i] - (error(i, received) @ received.T + LAM * U[i]) / c
            if i in drawn:
                W, d = received, 5 * np.linalg.eigvalsh(U[i].T @ U[i])[-1]
                for _ in range(2):
                    W = W - (U[i].T @ error(i, W) / NUM_CLIENTS + GAMMA * W) / d
                uploads.append(W)
        V = np.mean(uploads, axis=0)
        found = run.strategy.global_model()["item-factors"]
        np.testing.assert_allclose(found, V, rtol=0, atol=1e-12)
        for i in asked:
            np.testing.assert_allclose(run.held(i)["user-factors"], U[i], rtol=0, atol=1e-12)


def test_one_client_unscaled_is_alternating_gradient_descent() -> None:
    """The same for p = 1, where both forms are one."""
    finals = []
    for step in ("paper", "unscaled"):
        run = RatingsRun(
            FedMAvg(SquaredL2(GAMMA), step=step, user_steps=3, item_steps=2),
            SquaredL2(LAM),
            kind=FedMAvgClient,
            train={0: ratings(0)},
        )
        losses = []
        for k in range(1, 6):
            run.round(k)
            losses.append(run.evaluate(k)["loss"])
        assert losses == sorted(losses, reverse=True)
        finals.append(run.strategy.global_model()["item-factors"])
    np.testing.assert_array_equal(*finals)


def test_only_the_squared_norm_has_a_gradient() -> None:
    wrong: Any = L1Norm(0.1)
    for made in (FedMAvg, FedMGS):
        with refused(TypeError, "L1Norm", "SquaredL2"):
            made(wrong)
