"""A run that diverges is said to, once and with the setting to change; one that learns is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context
from torch import nn

from clients import FedADMMClient, client_app
from fl_admm_strategies import FedADMM, FedAvg, FedGiA, InProcessGrid, StatefulStrategy
from fl_admm_strategies.runtime.messages.records import Reply
from fl_admm_strategies.runtime.trust.divergence import DivergenceMonitor
from tests.support.refusals import names, refused

START = 2.3


def watched(
    losses: Sequence[float], caplog: pytest.LogCaptureFixture, *, start: float = START
) -> list[str]:
    """Return the warnings over rounds of two clients with these training losses."""
    health = DivergenceMonitor(FedGiA())
    for server_round, loss in enumerate(losses, start=1):
        first = {"initial-loss": start} if server_round == 1 else {}
        replies = {c: Reply({}, 10.0, {"loss": loss, **first}) for c in (0, 1)}
        health.watch(server_round, replies, 0)
        assert [reply.metrics for reply in replies.values()] == [{"loss": loss}] * 2
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("losses", "server_round"),
    [
        ([2.4, 2.5, 2.6, 2.7, 2.8], 4),  # the start and four rounds: 5 values that all rise
        ([2.4, 2.6, 2.5, 2.9, 3.3, 3.6], 5),  # with a step back: S = 13 of 15 at 6 values
        ([2.3, 24.0, 24.0], 2),  # far above
        ([2.3, math.nan], 2),
        ([math.inf], 1),
        # It swings at a few times its start, without a trend, and nothing is learned.
        ([6.1, 9.2, 4.0, 7.5, 8.8, 3.9, 6.9, 9.0, 5.0, 8.0], 8),
    ],
)
def test_a_loss_above_its_start_is_said_once(losses, server_round, caplog):
    (said,) = watched(losses, caplog)
    assert names(said, f"round {server_round}", 2.3, "may diverge", "FedGiA smaller steps")


@pytest.mark.parametrize(
    "losses",
    [
        [2.2, 1.0, 0.5],
        [2.5, 2.4, 2.6, 2.2, 1.0],  # noise
        [0.05, 0.4, 0.9, 1.2, 1.1],  # few labels: what it could alone, and then together
        [2.3, 2.31, 2.32, 2.3, 2.31],  # stands still
        [8.0, 9.0, 2.0, 1.0],  # a catapult
        [3.6, 3.0, 2.59, 2.6, 2.2, 1.8],  # a large first step, and from there it learns
        [2.9, 2.7, 3.0, 2.8, 2.7, 2.9, 2.6, 2.8, 2.5, 2.7],  # above the start, without a trend
        [9.0, 8.0, 8.2, 7.1, 6.0, 6.2, 5.5, 5.1, 4.0, 3.0, 2.0],  # far above, and it falls
        [5.0, 9.0, 6.0, 8.0, 4.0, 3.0, 2.0, 2.1, 1.5],  # high for a while
    ],
)
def test_a_run_that_learns_is_left_alone(losses, caplog):
    assert watched(losses, caplog) == []


def test_a_loss_may_be_negative(caplog: pytest.LogCaptureFixture) -> None:
    assert watched([-5.0, -5.5, -6.0, -6.0], caplog, start=-5.0) == []
    assert watched([-4.8, -4.6, -4.4, -4.2], caplog, start=-5.0)


def test_clients_are_compared_with_their_own_start(caplog: pytest.LogCaptureFixture) -> None:
    # Client 1, whose loss is large from the start, takes part from the third round on.
    health = DivergenceMonitor(FedADMM())
    for server_round in range(1, 9):
        client, start, loss = (0, 1.0, 0.5) if server_round < 3 else (1, 40.0, 20.0)
        metrics = {"loss": loss} | ({"initial-loss": start} if server_round in (1, 3) else {})
        health.watch(server_round, {client: Reply({}, 5.0, metrics)}, 0)
    assert not caplog.records


def test_who_comes_late_starts_from_a_model_that_others_have_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So its start counts as no less than the median of those in round 1."""
    monitor = DivergenceMonitor(FedADMM())
    for server_round, loss in enumerate([2.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], start=1):
        metrics = {"loss": loss, "initial-loss": START if server_round == 1 else 0.05}
        monitor.watch(server_round, {server_round: Reply({}, 5.0, metrics)}, 0)
    assert not caplog.records


@pytest.mark.parametrize("said", [1e300, math.nan, math.inf])
def test_one_client_of_several_does_not_spend_the_warning(
    said: float, caplog: pytest.LogCaptureFixture
) -> None:
    health = DivergenceMonitor(FedADMM())
    for server_round in range(1, 9):
        first = {"initial-loss": START} if server_round == 1 else {}
        losses = {0: said, 1: 2.0, 2: 1.9}
        health.watch(
            server_round,
            {client: Reply({}, 2.0**53, {"loss": x, **first}) for client, x in losses.items()},
            0,
        )
    assert not caplog.records


# --- A run that stands still ----------------------------------------------------------------------


def still(
    losses: Sequence[float],
    caplog: pytest.LogCaptureFixture,
    strategy: StatefulStrategy,
    *,
    start: float = START,
    constant: float | None = START,
    num_rounds: int = 0,
    each: int = 1,
) -> list[str]:
    """Return the warnings over rounds of three clients each; they come again after `each` more."""
    monitor = DivergenceMonitor(strategy)
    for server_round, loss in enumerate(losses, start=1):
        first = {"initial-loss": start} if server_round <= each else {}
        if first and constant is not None:
            first["constant-loss"] = constant
        members = [3 * (server_round % each) + place for place in range(3)]
        # One client's loss falls, and another's rises.
        said = {members[0]: loss / server_round, members[1]: loss, members[2]: loss * server_round}
        replies = {c: Reply({}, 10.0, {"loss": value, **first}) for c, value in said.items()}
        monitor.watch(server_round, replies, 0, num_rounds)
        assert all(reply.metrics.keys() == {"loss"} for reply in replies.values())
    return [record.getMessage() for record in caplog.records]


AVG = FedAvg(lr=1e-4)


@pytest.mark.parametrize(
    ("losses", "options", "strategy", "server_round", "advice"),
    [
        ([2.3] * 15, {}, AVG, 9, "larger steps (lr) or more local epochs"),
        ([2.3] * 45, {"num_rounds": 300}, AVG, 30, "larger steps (lr)"),
        ([2.3] * 45, {"each": 3}, AVG, 11, "larger steps (lr)"),
        ([2.29] * 15, {"constant": 2.36}, AVG, 9, "larger steps (lr)"),
        # A fall by .28 %, and one from above the start to above it.
        ([2.3 - 0.0008 * r for r in range(9)], {}, AVG, 9, "larger steps (lr)"),
        ([2.4] + [2.38] * 14, {}, AVG, 9, "smaller steps (lr)"),
        ([2.3] * 15, {}, FedADMM(rho=1.0), 9, "weaker pull to the common model (a smaller rho)"),
        ([2.4] * 15, {}, FedADMM(rho=1.0), 9, "smaller steps (lr)"),
        ([2.3] * 15, {}, FedADMM(rho=0.9), 9, "larger steps (lr)"),
        ([2.3] * 15, {}, FedADMM(lr=lambda r: 0.1), 9, "larger steps (lr)"),
    ],
)
def test_a_standstill_is_said_once_with_its_setting(
    losses, options, strategy, server_round, advice, caplog
):
    (said,) = still(losses, caplog, strategy, **options)
    assert names(said, f"round {server_round}:", type(strategy).__name__, advice, "learned")


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        ([2.3] * 8, {}),  # eight rounds are seven comparisons
        ([2.3] * 29, {"num_rounds": 300}),
        ([2.3] * 15, {"constant": 2.45}),  # the minimiser of before: it tells its samples apart
        ([2.3] * 15, {"constant": None}),  # clients that do not say
        ([2.3, 2.292] + [2.3] * 15, {}),  # it fell, though little: a plateau that is left
        ([2.1] * 15, {}),  # soon below its start, with few labels, and there from then on
        ([2.6] + [2.4] * 15, {}),  # above its start, and it falls
        ([2.3] * 30, {"each": 30}),  # clients that come once compare with nothing
        ([2.3, 2.29, 2.28, 2.27, 2.26, 2.25, 2.24, 2.23, 2.22, 2.2], {"start": 2.25}),
    ],
)
def test_no_false_alarm_of_a_standstill(losses, options, caplog):
    assert still(losses, caplog, AVG, **options) == []


@pytest.mark.parametrize(
    ("worse", "warns"), [(0.9, True), (1.04, True), (1.06, False), (math.nan, True)]
)
def test_one_client_knows_a_trained_model(
    worse: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On one batch a constant may be as good by chance; of a model of little use it often is."""
    monitor = DivergenceMonitor(AVG)
    for server_round in range(1, 10):
        replies = {c: Reply({}, 10.0, {"loss": START}) for c in range(8)}
        for client, reply in replies.items() if server_round == 1 else ():
            constant = START * (worse if client == 3 else 0.9)
            reply.metrics |= {"initial-loss": START, "constant-loss": constant}
        monitor.watch(server_round, replies, 0)
    assert ("nothing is learned" in caplog.text) == warns


def test_a_resumed_run_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    """Its clients have reported their starts already."""
    monitor = DivergenceMonitor(AVG)
    for server_round in range(11, 31):
        replies = {c: Reply({}, 10.0, {"loss": START}) for c in range(3)}
        monitor.watch(server_round, replies, 0, 30)
    assert not caplog.records


def test_an_early_end_names_the_rounds() -> None:
    monitor = DivergenceMonitor(AVG)
    with refused(RuntimeError, "could train in the first round, so", "of another method"):
        monitor.count_empty_round("of another method", hopeless=True)
    monitor = DivergenceMonitor(AVG)
    for _ in range(2):
        monitor.count_empty_round("out of memory")
    with refused(RuntimeError, "could train in the first 3 rounds, so", "out of memory"):
        monitor.count_empty_round("out of memory")


# --- With the real strategies and clients ---------------------------------------------------------


class Line(nn.Module):
    """w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.w * inputs


def run(
    strategy: StatefulStrategy, client_class: Any, rounds: int = 8, **options: Any
) -> StatefulStrategy:
    """Run it with four clients that all hold f = (2 w - 3)^2, curvature 8."""
    batch = (torch.tensor([2.0, 2.0]), torch.tensor([3.0, 3.0]))

    def client_fn(context: Context) -> Any:
        return client_class(context, Line(), [batch], nn.MSELoss()).to_client()

    initial = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    with InProcessGrid(client_app(client_fn), 4) as grid:
        strategy.start(grid, initial, rounds, **options)
    return strategy


@pytest.mark.slow
def test_a_strategy_names_its_setting_and_its_defaults_learn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = run(FedADMM(fraction_evaluate=0.0), FedADMMClient)
    assert done.train_metrics[8][0]["loss"] < 0.5
    assert "initial-loss" not in done.train_metrics[1][0]
    assert "diverge" not in caplog.text
    run(FedADMM(lr=0.4, fraction_evaluate=0.0), FedADMMClient)
    (said,) = (line for line in caplog.messages if "may diverge" in line)
    assert names(said, "FedADMM smaller steps")


class Silent(FedADMMClient):
    """One with a loop of its own that reports no loss."""

    def minimise(self, objective: Any, *, lr: float, epochs: int) -> dict[str, float]:
        super().minimise(objective, lr=lr, epochs=epochs)
        return {}


def test_a_real_run_that_stands_still_says_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = {"lr": 1e-6, "fraction_evaluate": 0.0}
    done = run(FedADMM(**settings), FedADMMClient, 12, checkpoint_dir=tmp_path)
    (said,) = (line for line in caplog.messages if "nothing is learned" in line)
    assert names(said, "round 9:", "FedADMM larger steps (lr)")
    assert not {"initial-loss", "constant-loss"} & done.train_metrics[1][0].keys()
    caplog.clear()
    run(FedADMM(**settings), FedADMMClient, 24, checkpoint_dir=tmp_path, resume=True)
    run(FedADMM(**settings), Silent, 12)
    run(FedADMM(lr=1e-3, fraction_evaluate=0.0), FedADMMClient, 12)
    run(FedADMM(**settings), FedADMMClient, 8)
    assert "nothing is learned" not in caplog.text


def test_uploads_that_are_not_finite_are_refused_with_advice() -> None:
    with refused(RuntimeError, "expected finite numbers", "smaller steps"):
        run(FedADMM(lr=1e30, fraction_evaluate=0.0), FedADMMClient)
