"""FedADMM by hand, its two placements of the duals, and what travels; docs/methods/fedadmm.md."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MessageType
from numpy.testing import assert_allclose

from clients import FedADMMClient
from fl_admm_strategies import FedADMM
from fl_admm_strategies.algorithms.shared import consensus
from fl_admm_strategies.runtime.messages.records import STEP_SUM
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, follow
from tests.support.refusals import refused


def scalar_grid(
    x: tuple[float, ...] = (1.0, 2.0), y: tuple[float, ...] = (1.0, 6.0), kind: Any = FedADMMClient
) -> Grid:
    """Return clients of f_i(u) = 1/2 (x_i u - y_i)^2."""
    return Grid(kind, losses=[(a * a, b / a, 1) for a, b in zip(x, y, strict=True)])


def start(strategy: FedADMM, rounds: int, grid: Grid | None = None, **options: Any) -> FedADMM:
    strategy.fraction_evaluate = 0.0
    strategy.start(grid or scalar_grid(), ArrayRecord({"w": Array(np.zeros(1))}), rounds, **options)
    return strategy


@pytest.mark.parametrize("duals", ["strategy", "client"])
def test_two_rounds_by_hand(duals: Any) -> None:
    # f = (u - 1)^2 / 2 and (2u - 6)^2 / 2, alpha = 1/2, rho = 1, eta = .2, beside f/2, so that
    # rho = 2, lr = .1 and twice the duals beside f; one step from zeros:
    # u_0 = .2 * .5 = .1, u_1 = .2 * .5 * 12 = 1.2; pi = u - 0; z = 2u; w = (.2 + 2.4)/2 = 1.3.
    # Round 2: u_0 = .1 - .2 [.5 (-.9) + .1 + (.1 - 1.3)] = .41, pi_0 = .1 + .41 - 1.3 = -.79;
    # u_1 = 1.2 - .2 [.5 (2.4 - 6) 2 + 1.2 + (1.2 - 1.3)] = 1.70, pi_1 = 1.2 + 1.7 - 1.3 = 1.6;
    # w = (.41 - .79 + 1.7 + 1.6)/2 = 1.46.
    strategy = start(FedADMM(published=True, rho=2.0, lr=0.1, local_epochs=1, duals=duals), 2)
    assert_allclose(strategy.global_arrays["w"].numpy(), [1.46], rtol=1e-14)
    residuals = strategy.metrics("train", {}, {})
    assert residuals["dual-residual"] == pytest.approx(2 * (1.46 - 1.3))
    if duals == "strategy":
        assert residuals["primal-residual"] == pytest.approx((0.89 + 0.4) / 2)
        own = strategy.state.clients
        assert_allclose(own.column("u"), [[0.41], [1.7]], rtol=1e-14)
        assert_allclose(2.0 * own.column("dual"), [[-1.58], [3.2]], rtol=1e-14)


def test_the_duals_balance_the_distances_whoever_takes_part() -> None:
    # FedAPM (79).
    strategy = FedADMM(published=True, rho=0.3, lr=0.2, fraction_train=0.5, seed=2)
    grid = scalar_grid((1.0, 2.0, -1.0, 0.5, 3.0, 1.0), (1.0, 6.0, 2.0, 2.0, -1.0, 0.0))
    start(strategy, 7, grid)
    own = strategy.state.clients
    u, duals = own.column("u"), 0.3 * own.column("dual")
    assert len(strategy.train_metrics[1]) == 3
    assert np.abs(duals).max() > 0.01
    assert_allclose(np.sum(duals + 0.3 * (u - strategy.state.w), axis=0), 0, atol=1e-10)


def test_the_worked_example() -> None:
    # docs/methods/fedadmm-notes.md, E1: u <- u - .1 [a_i (u - b_i) + (u - anchor)].
    strategy = FedADMM(published=True, rho=1.0, lr=0.1, local_epochs=2)

    def read() -> list[np.ndarray]:
        own = strategy.state.clients
        return [own.column("u")[:, 0].copy(), own.column("dual")[:, 0].copy(), strategy.state.w]

    grid = Grid(FedADMMClient)
    (u_1, pi_1, w_1), (u_2, pi_2, w_2) = follow(strategy, grid, ALL, ALL, read=read)
    assert_allclose(u_1, [0.18, -0.34, 1.8], atol=1e-10)
    assert_allclose(pi_1, [0.18, -0.34, 1.8], atol=1e-10)
    assert_allclose(w_1, [1.0933333333], atol=1e-10)
    assert_allclose(u_2, [0.4596, -0.2629333333, 2.144], atol=1e-10)
    assert_allclose(pi_2, [-0.4537333333, -1.6962666667, 2.8506666667], atol=1e-10)
    assert_allclose(w_2, [1.0137777778], atol=1e-10)


def test_the_running_sum_is_made_anew_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "REBUILD_EVERY", 3)
    strategy, excess = FedADMM(published=True, rho=1.0), []

    def on_round(server_round: int, _: Any) -> None:
        state = strategy.state
        messages = state.clients.column("u") + state.clients.column("dual")
        excess.append(state.total[0] - messages.sum())
        state.total += server_round == 1

    start(strategy, 3, on_round=on_round)
    assert_allclose(excess, [0, 1, 0], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "limit"), [("uniform", 11 / 7), ("size", 33 / 17)])
def test_the_weights_are_those_of_the_objective(weights: Any, limit: float) -> None:
    # P2: the minimisers of sum_i a_i/2 (w - b_i)^2, (1 - 2 + 12)/(1 + 2 + 4), and of the same sum
    # weighted by n_i, (10 - 40 + 360)/(10 + 40 + 120).
    strategy = FedADMM(
        published=True, rho=1.5, lr=0.1, local_epochs=5, weights=weights, fraction_evaluate=0.0
    )
    follow(strategy, Grid(FedADMMClient), *[ALL] * 80)
    assert_allclose(strategy.state.w, [limit], atol=1e-9)


def test_a_resumed_run_has_the_weights_of_before() -> None:
    def weighted() -> FedADMM:
        return FedADMM(rho=1.0, weights="size")

    grid = Grid(FedADMMClient)
    whole, half, resumed = weighted(), weighted(), weighted()
    follow(whole, grid, ALL, ALL)
    follow(half, grid, ALL)
    resumed.load_state_dict(half.state_dict())
    start(resumed, 2, Grid(FedADMMClient))
    assert_allclose(resumed.state.clients.column("alpha"), [1 / 6, 2 / 6, 3 / 6])
    assert_allclose(resumed.state.w, whole.state.w, rtol=1e-14)


# --- rho by the step sizes of a round (P9) --------------------------------------------------------


def reporting_grid(*reported: Any, x: tuple[float, ...] = (), y: tuple[float, ...] = ()) -> Grid:
    """Return clients of `scalar_grid`, all alike if left out, that report these S_i, or None."""

    class Reporting(FedADMMClient):
        def minimise(self, *args: Any, **given: Any) -> dict[str, Any]:
            metrics = super().minimise(*args, **given)
            found = reported[int(self.context.node_config["partition-id"])]
            return metrics | {STEP_SUM: math.nan if found is None else found}

    alike = (1.0,) * len(reported)
    return scalar_grid(x or alike, y or alike, Reporting)


def test_rho_follows_from_the_step_sizes_of_the_first_round() -> None:
    # They say S = 6, so rho = .3/6 = .05. Round 1, two steps of .1, with .1: on (u - 1)^2/2 u = .1,
    # .1 - .1 [-.9 + .01] = .189, on (2u - 6)^2/2 u = 1.2, 1.2 - .1 [-7.2 + .12] = 1.908. Then
    # pi = .05 u and w = 2 * mean u = 2.097. Round 2 at w, for client 0, with w - pi/rho = 1.908:
    # u <- u - .1 [(u - 1) + .05 (u - 1.908)], 2.097, 1.986355, 1.887327725;
    # pi = .05 (.189 + 1.887327725 - 2.097) = -.00103361375.
    strategy = FedADMM(lr=0.1, local_epochs=2)
    seen: list[tuple[float, Any, Any]] = []

    def on_round(*_: Any) -> None:
        rho, state = strategy.penalty, strategy.state
        seen.append((rho, rho * state.clients.column("dual")[:, 0], state.w[0]))

    grid = reporting_grid(6.0, 6.0, x=(1.0, 2.0), y=(1.0, 6.0))
    start(strategy, 2, grid, on_round=on_round)
    assert seen[0][0] == pytest.approx(0.05, rel=1e-14)
    assert_allclose(seen[0][1], [0.00945, 0.0954], rtol=1e-14)
    assert seen[0][2] == pytest.approx(2.097, rel=1e-14)
    assert seen[1][1][0] == pytest.approx(-0.00103361375, rel=1e-12)
    asked = [
        [message.content["config"] for message in grid.phase(MessageType.TRAIN, number)]
        for number in (1, 2)
    ]
    assert [one["wants-step-sum"] for one in asked[0] + asked[1]] == [True, True, False, False]


@pytest.mark.parametrize(
    "said", [(6.0, 6.0, 1e8), (6.0, 1e-8, 6.0), (6.0, 6.0, 6.0, math.inf, -1.0, math.nan)]
)
def test_one_liar_decides_nothing(said: tuple[float, ...]) -> None:
    strategy = start(FedADMM(), 1, reporting_grid(*said))
    assert strategy.penalty == pytest.approx(0.05)


@pytest.mark.parametrize(("said", "rho"), [(0.15, 0.2), (1.4, 0.2), (1.6, 0.3 / 1.6)])
def test_rho_is_at_most_a_fifth_where_steps_are_small(said: float, rho: float) -> None:
    strategy = start(FedADMM(), 1, reporting_grid(said, said, said))
    assert strategy.penalty == pytest.approx(rho, rel=1e-14)


def test_rho_waits_for_three_clients_and_no_dual_is_lost() -> None:
    # One of six a round. Until three have reported rho is .1 in the local steps.
    strategy = FedADMM(lr=0.1, local_epochs=2, fraction_train=1 / 6, seed=4)
    x, y = (1.0, 2.0, -1.0, 0.5, 3.0, 1.0), (1.0, 6.0, 2.0, 2.0, -1.0, 0.0)
    grid = reporting_grid(*[6.0] * 6, x=x, y=y)
    start(strategy, 8, grid)
    taken: list[int] = []
    for number in range(1, 9):
        before = len(set(taken))
        taken += strategy.train_metrics[number]
        (message,) = grid.phase(MessageType.TRAIN, number)
        rho = json.loads(message.content["config"]["rule"])["rho"]
        assert rho == pytest.approx(0.1 if before < 3 else 0.05)
    # FedDyn's identity: the sum of all pi_i/rho is that of all moves u_i - w, from the first on.
    total = strategy.state.clients.column("dual").sum(axis=0)
    assert_allclose(total, strategy.state.total, rtol=1e-12)
    assert abs(total[0]) > 0.01


@pytest.mark.parametrize("reported", [(None,) * 4, (6.0, 6.0, None, None)])
def test_without_step_sizes_rho_is_a_number(reported: tuple[float | None, ...]) -> None:
    assert start(FedADMM(), 2, reporting_grid(*reported)).penalty == 0.1


def test_rho_of_the_papers_form_is_a_number() -> None:
    assert start(FedADMM(published=True), 1).penalty == 0.1
    with refused(ValueError, "rho", "0"):
        FedADMM(rho=0)
