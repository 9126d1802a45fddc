"""A run that diverges is said to, once and with the setting to change; one that learns is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context
from torch import nn

from clients import FedADMMClient, client_app
from fl_admm_strategies import FedADMM, InProcessGrid, StatefulStrategy
from fl_admm_strategies.runtime.messages.records import Reply
from fl_admm_strategies.runtime.trust.divergence import DivergenceMonitor
from tests.support.refusals import names, refused

START = 2.3


def watched(
    losses: Sequence[float], caplog: pytest.LogCaptureFixture, *, start: float = START
) -> list[str]:
    """Return the warnings over rounds of two clients with these training losses."""
    health = DivergenceMonitor("FedGiA")
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
    health = DivergenceMonitor("FedADMM")
    for server_round in range(1, 9):
        client, start, loss = (0, 1.0, 0.5) if server_round < 3 else (1, 40.0, 20.0)
        metrics = {"loss": loss} | ({"initial-loss": start} if server_round in (1, 3) else {})
        health.watch(server_round, {client: Reply({}, 5.0, metrics)}, 0)
    assert not caplog.records


@pytest.mark.parametrize("said", [1e300, math.nan, math.inf])
def test_one_client_of_several_does_not_spend_the_warning(
    said: float, caplog: pytest.LogCaptureFixture
) -> None:
    health = DivergenceMonitor("FedADMM")
    for server_round in range(1, 9):
        first = {"initial-loss": START} if server_round == 1 else {}
        losses = {0: said, 1: 2.0, 2: 1.9}
        health.watch(
            server_round,
            {client: Reply({}, 2.0**53, {"loss": x, **first}) for client, x in losses.items()},
            0,
        )
    assert not caplog.records


# --- With the real strategies and clients ---------------------------------------------------------


class Line(nn.Module):
    """w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.w * inputs


def run(strategy: StatefulStrategy, client_class: Any, rounds: int = 8) -> StatefulStrategy:
    """Run it with four clients that all hold f = (2 w - 3)^2, curvature 8."""
    batch = (torch.tensor([2.0, 2.0]), torch.tensor([3.0, 3.0]))

    def client_fn(context: Context) -> Any:
        return client_class(context, Line(), [batch], nn.MSELoss()).to_client()

    initial = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    with InProcessGrid(client_app(client_fn), 4) as grid:
        strategy.start(grid, initial, rounds)
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


def test_uploads_that_are_not_finite_are_refused_with_advice() -> None:
    with refused(RuntimeError, "expected finite numbers", "smaller steps"):
        run(FedADMM(lr=1e30, fraction_evaluate=0.0), FedADMMClient)
