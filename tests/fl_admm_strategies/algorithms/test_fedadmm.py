"""FedADMM by hand, its two placements of the duals, and what travels; docs/methods/fedadmm.md."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, MessageType
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn

from clients import FedADMMClient, client_app
from fl_admm_strategies import FedADMM, FedAPM, FedMCADMM, SquaredL2
from fl_admm_strategies.runtime.messages.records import STEP_SUM
from fl_admm_strategies.runtime.record import Traffic
from fl_admm_strategies.runtime.saving.state import arrays_of
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, follow
from tests.support.federation import WatchedGrid, client_fn_of, initial_arrays
from tests.support.pace import fast
from tests.support.refusals import Warned, names, refused


class Scalar(nn.Module):
    """u x in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.u * inputs


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


def scalar_grid(
    x: tuple[float, ...] = (1.0, 2.0), y: tuple[float, ...] = (1.0, 6.0), scale: float = 1.0
) -> WatchedGrid:
    """Return clients of f_i(u) = scale/2 (x_i u - y_i)^2."""

    def client_fn(context: Context) -> Any:
        i = int(context.node_config["partition-id"])
        batch = tuple(torch.tensor([value[i]], dtype=torch.float64) for value in (x, y))

        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            return scale * half_square(outputs, targets)

        return FedADMMClient(context, Scalar(), [batch], loss_fn, full_batch=True)

    return WatchedGrid(client_app(client_fn), len(x))


def start(strategy: FedADMM, rounds: int, grid: WatchedGrid | None = None) -> FedADMM:
    strategy.fraction_evaluate = 0.0
    initial = ArrayRecord({"u": Array(np.zeros(1))})
    strategy.start(grid or scalar_grid(), initial, rounds)
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
    assert_allclose(strategy.global_arrays["u"].numpy(), [1.46], rtol=1e-14)
    if duals == "strategy":
        own = strategy.state.consensus.clients
        assert_allclose(own.column("u"), [[0.41], [1.7]], rtol=1e-14)
        assert_allclose(own.column("pi"), [[-1.58], [3.2]], rtol=1e-14)
        assert_allclose(own[1].u, [1.7], rtol=1e-14)


@pytest.mark.slow
def test_it_converges_to_the_minimiser_by_the_clients_weights() -> None:
    # sum_i alpha_i f_i, alpha = 1/2: (u - 1) + 2 (2u - 6) = 0 at u = 13/5; plain averaging of the
    # clients' own minimisers 1 and 3 would give 2.
    strategy = start(FedADMM(published=True, rho=2.0, lr=0.15, fraction_train=0.5, seed=1), 60)
    assert_allclose(strategy.global_arrays["u"].numpy(), [2.6], atol=1e-3)


def test_settings_mean_the_same_whatever_the_number_of_clients() -> None:
    # P3: rho and lr stand beside the plain loss, so that every client twice is the same run.
    few = start(FedADMM(published=True, rho=0.8, lr=0.1), 10)
    many = start(
        FedADMM(published=True, rho=0.8, lr=0.1),
        10,
        scalar_grid((1.0, 1.0, 2.0, 2.0), (1.0, 1.0, 6.0, 6.0)),
    )
    there, here = many.state.consensus, few.state.consensus
    assert_allclose(there.clients.column("u")[::2], here.clients.column("u"), atol=1e-10)
    assert_allclose(there.clients.column("pi")[::2], here.clients.column("pi"), atol=1e-10)
    assert_allclose(there.w, here.w, atol=1e-10)
    assert here.w[0] > 1


def test_the_duals_balance_the_distances_whoever_takes_part() -> None:
    # FedAPM (79).
    strategy = FedADMM(published=True, rho=0.3, lr=0.2, fraction_train=0.5, seed=2)
    grid = scalar_grid((1.0, 2.0, -1.0, 0.5, 3.0, 1.0), (1.0, 6.0, 2.0, 2.0, -1.0, 0.0))
    start(strategy, 7, grid)
    own = strategy.state.consensus
    u, duals = own.clients.column("u"), own.clients.column("pi")
    assert len(strategy.train_metrics[1]) == 3
    assert np.abs(duals).max() > 0.01
    assert_allclose(np.sum(duals + 0.3 * (u - own.w), axis=0), 0, atol=1e-10)


@cache
def small(duals: Any, weights: Any) -> tuple[FedADMM, WatchedGrid]:
    """Return a run of four rounds and its grid, to look at only."""
    grid = WatchedGrid(client_app(client_fn_of(FedADMMClient)), 6)
    strategy = FedADMM(
        published=True, rho=0.1, lr=0.5, duals=duals, weights=weights, fraction_train=0.5, seed=3
    )
    strategy.start(grid, initial_arrays(), 4)
    return strategy, grid


@pytest.mark.parametrize("weights", fast(["size"], ["uniform", "size"]))
def test_duals_with_the_clients_give_the_same_model_for_the_same_bytes(weights: Any) -> None:
    (here, grid), (there, _) = small("strategy", weights), small("client", weights)
    for name, array in here.global_arrays.items():
        # float32: w - pi/rho is rounded on one side of the wire or on the other.
        assert_allclose(there.global_arrays[name].numpy(), array.numpy(), rtol=0, atol=1e-5)
    assert here.traffic == there.traffic
    # 12 + 4 + 12 + 3 numbers of 4 bytes for three clients; u_i^0 goes along at the first contact.
    size = 31 * 4
    seen: set[int] = set()
    for server_round in (1, 2, 3, 4):
        trained = set(here.train_metrics[server_round])
        assert here.traffic[server_round] == Traffic(
            down=(len(trained) + len(trained - seen)) * size, up=3 * size
        )
        seen |= trained
    # It is what the messages hold.
    for server_round, message_traffic in list(here.traffic.items())[-4:]:
        for phase, expected in zip((grid.phase, grid.replies), message_traffic, strict=True):
            messages = phase(MessageType.TRAIN, server_round)
            records = [r for m in messages for r in m.content.array_records.values()]
            arrays = [array.numpy() for record in records for array in record.values()]
            assert sum(array.nbytes for array in arrays) == expected


@pytest.mark.parametrize("start_at", ["global", "own"])
@pytest.mark.parametrize("averaging", fast(["all"], ["participants", "all"]))
def test_where_the_duals_live_does_not_matter_in_any_form(start_at: Any, averaging: Any) -> None:
    grid = scalar_grid((1.0, 2.0, -1.0, 0.5), (1.0, 6.0, 2.0, 2.0))
    here, there = (
        start(
            FedADMM(
                start_at=start_at, averaging=averaging, duals=duals, fraction_train=0.5, seed=2
            ),
            6,
            grid,
        )
        for duals in ("strategy", "client")
    )
    assert np.abs(here.state.consensus.clients.column("pi")).max() > 0.01
    assert_allclose(there.state.consensus.w, here.state.consensus.w, rtol=1e-12)
    assert_allclose(there.state.consensus.mean.total, here.state.consensus.mean.total, rtol=1e-12)


def test_the_server_needs_no_memory_for_every_client_where_they_keep_their_duals() -> None:
    (here, _), (there, _) = small("strategy", "uniform"), small("client", "uniform")
    sizes = [sum(a.size for a in arrays_of(s.state).values()) for s in (here, there)]
    # w, its first value, the sum of the z_i, a round, whether w was replaced, alpha_i of 6 clients;
    # u_i and pi_i of these, or nothing.
    assert sizes == [3 * 31 + 2 + 6 + 2 * 6 * 31, 3 * 31 + 2 + 6]


def test_a_model_that_is_read_is_a_copy_of_the_state() -> None:
    strategy = start(FedADMM(published=True), 1)
    before = strategy.state_dict()
    strategy.global_model()["u"] += 1
    for name, array in strategy.state_dict().items():
        assert_array_equal(array, before[name], err_msg=name)


def test_a_model_without_floating_point_arrays_is_refused() -> None:
    initial = ArrayRecord({"count": Array(np.zeros(1, np.int64))})
    with refused(ValueError, "floating point"):
        FedADMM(published=True).start(scalar_grid(), initial, 1)


def test_the_worked_example() -> None:
    # docs/methods/fedadmm-notes.md, E1: u <- u - .1 [a_i (u - b_i) + (u - anchor)].
    strategy = FedADMM(published=True, rho=1.0, lr=0.1, local_epochs=2)

    def read() -> list[np.ndarray]:
        own = strategy.state.consensus
        return [own.clients.column("u")[:, 0].copy(), own.clients.column("pi")[:, 0].copy(), own.w]

    grid = Grid(FedADMMClient)
    (u_1, pi_1, w_1), (u_2, pi_2, w_2) = follow(strategy, grid, ALL, ALL, read=read)
    assert_allclose(u_1, [0.18, -0.34, 1.8], atol=1e-10)
    assert_allclose(pi_1, [0.18, -0.34, 1.8], atol=1e-10)
    assert_allclose(w_1, [1.0933333333], atol=1e-10)
    assert_allclose(u_2, [0.4596, -0.2629333333, 2.144], atol=1e-10)
    assert_allclose(pi_2, [-0.4537333333, -1.6962666667, 2.8506666667], atol=1e-10)
    assert_allclose(w_2, [1.0137777778], atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "limit"), [("uniform", 11 / 7), ("size", 33 / 17)])
def test_the_weights_are_those_of_the_objective(weights: Any, limit: float) -> None:
    # P2: the minimisers of sum_i a_i/2 (w - b_i)^2, (1 - 2 + 12)/(1 + 2 + 4), and of the same sum
    # weighted by n_i, (10 - 40 + 360)/(10 + 40 + 120).
    strategy = FedADMM(
        published=True, rho=1.5, lr=0.1, local_epochs=5, weights=weights, fraction_evaluate=0.0
    )
    follow(strategy, Grid(FedADMMClient), *[ALL] * 80)
    assert_allclose(strategy.state.consensus.w, [limit], atol=1e-9)


def test_the_form_that_runs_is_said_in_the_methods_symbols() -> None:
    with refused(ValueError, "averaging", "published"):
        FedADMM(published=True, averaging="participants")
    assert FedADMM(published=True).form.startswith("the paper's form")
    assert "u_i" in FedADMM().form
    assert "published=True" in FedADMM().form
    assert "their own W_i" in FedMCADMM(SquaredL2(0.1), published=True).form
    assert "exact" in FedMCADMM(SquaredL2(0.1)).form


# --- rho by the step sizes of a round (P9) --------------------------------------------------------


def reporting_grid(*reported: Any) -> WatchedGrid:
    """Return clients, all alike, that report these S_i; None: they do not."""

    class Reporting(FedADMMClient):
        def minimise(self, *args: Any, **given: Any) -> dict[str, Any]:
            metrics = super().minimise(*args, **given)
            found = reported[int(self.context.node_config["partition-id"])]
            return metrics | {STEP_SUM: math.nan if found is None else found}

    def client_fn(context: Context) -> Any:
        batch = (torch.ones(1, dtype=torch.float64),) * 2
        return Reporting(context, Scalar(), [batch], half_square, full_batch=True)

    return WatchedGrid(client_app(client_fn), len(reported))


def test_rho_follows_from_the_step_sizes_of_the_first_round() -> None:
    # Two steps of .1, so S = .2 and rho = .3/.2 = 1.5. Round 1 with .1: on (u - 1)^2/2 u = .1,
    # .1 - .1 [-.9 + .01] = .189, on (2u - 6)^2/2 u = 1.2, 1.2 - .1 [-7.2 + .12] = 1.908. Then
    # pi = 1.5 u and w = 2 * mean u = 2.097. Round 2 at w, for client 0, with w - pi/rho = 1.908:
    # u <- u - .1 [(u - 1) + 1.5 (u - 1.908)], 2.097, 1.95895, 1.8554125;
    # pi = 1.5 (.189 + 1.8554125 - 2.097) = -.07888125.
    strategy = FedADMM(lr=0.1, local_epochs=2)
    assert strategy.rho == "auto"
    seen: list[tuple[float, Any, Any]] = []

    def on_round(*_: Any) -> None:
        consensus = strategy.state.consensus
        seen.append((consensus.rho, consensus.clients.column("pi")[:, 0].copy(), consensus.w[0]))

    strategy.fraction_evaluate = 0.0
    grid = scalar_grid()
    strategy.start(grid, ArrayRecord({"u": Array(np.zeros(1))}), 2, on_round=on_round)
    assert seen[0][0] == pytest.approx(1.5, rel=1e-14)
    assert_allclose(seen[0][1], [0.2835, 2.862], rtol=1e-14)
    assert seen[0][2] == pytest.approx(2.097, rel=1e-14)
    assert seen[1][1][0] == pytest.approx(-0.07888125, rel=1e-12)
    asked = [
        [message.content["config"] for message in grid.phase(MessageType.TRAIN, number)]
        for number in (1, 2)
    ]
    assert [one["wants-step-sum"] for one in asked[0] + asked[1]] == [True, True, False, False]
    assert all(0 < one["rho"] < 1e-15 for one in asked[0])  # it moves nobody
    means = strategy.run.record.result.train_metrics_clientapp
    assert means[1]["step-sum"] == pytest.approx(0.2, rel=1e-14)
    assert [means[number]["rho"] for number in (1, 2)] == pytest.approx([1.5, 1.5])


def test_rho_is_said_with_the_step_sizes_it_follows_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        start(FedADMM(lr=0.1, local_epochs=2), 3)
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("rho"))
    assert names(line, "1.5", "0.3", "0.2")


@pytest.mark.parametrize(
    "said", [(3.0, 3.0, 1e8), (3.0, 1e-8, 3.0), (3.0, 3.0, 3.0, math.inf, -1.0, math.nan)]
)
def test_one_liar_decides_nothing(said: tuple[float, ...]) -> None:
    strategy = start(FedADMM(), 1, reporting_grid(*said))
    assert strategy.state.consensus.rho == pytest.approx(0.1)


def test_rho_waits_for_three_clients_and_no_dual_is_lost() -> None:
    # One of six a round. Until three have reported rho is .1 in the local steps.
    strategy = FedADMM(lr=0.1, local_epochs=2, fraction_train=1 / 6, seed=4)
    x, y = (1.0, 2.0, -1.0, 0.5, 3.0, 1.0), (1.0, 6.0, 2.0, 2.0, -1.0, 0.0)
    grid = scalar_grid(x, y)
    start(strategy, 8, grid)
    means = strategy.run.record.result.train_metrics_clientapp
    taken: list[int] = []
    for number in range(1, 9):
        before = len(set(taken))
        taken += strategy.train_metrics[number]
        assert ("rho" in means[number]) == (len(set(taken)) >= 3)
        (message,) = grid.phase(MessageType.TRAIN, number)
        assert message.content["config"]["wants-step-sum"] == (before < 3)
    # FedDyn's identity: the sum of all pi_i/rho is that of all moves u_i - w, from the first on.
    consensus = strategy.state.consensus
    total = consensus.clients.column("pi").sum(axis=0) / consensus.rho
    assert_allclose(total, consensus.mean.total, rtol=1e-12)
    assert abs(total[0]) > 0.01


@pytest.mark.parametrize("reported", [(None,) * 4, (3.0, None), (3.0, 3.0, None, None)])
def test_without_step_sizes_rho_is_a_number_and_it_is_said(
    reported: tuple[float | None, ...], warned: Warned
) -> None:
    strategy = start(FedADMM(), 2, reporting_grid(*reported))
    assert strategy.state.consensus.rho == 0.1
    assert len(warned("step-sum", "rho")) == 1


def test_rho_of_the_papers_form_is_a_number() -> None:
    assert FedADMM(published=True).rho == FedADMM(start_at="own").rho == 0.1
    assert FedAPM(None, averaging="all").rho == 0.1
    with refused(ValueError, "rho", "'auto'", "number"):
        FedADMM(rho="auto", published=True)
    with refused(ValueError, "rho", "'best'", "'auto'"):
        FedADMM(rho="best")  # type: ignore[arg-type]
    with refused(ValueError, "rho", "0"):
        FedADMM(rho=0)
