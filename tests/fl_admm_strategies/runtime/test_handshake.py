"""The handshake before round 1: who is asked, what it changes, what happens when it fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from flwr.app import MessageType
from numpy.testing import assert_allclose

from clients import FedADMMClient, client_app
from fl_admm_strategies import FedADMM
from fl_admm_strategies.runtime.messages.packing import unpack_instructions
from fl_admm_strategies.runtime.record import Traffic
from fl_admm_strategies.runtime.trust.layout import NAMES
from tests.support.federation import (
    Federation,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
)
from tests.support.refusals import refused

# tests.support gives client i 10 + i examples, so n = 75.
ALPHA = [10 / 75, 11 / 75, 12 / 75, 13 / 75, 14 / 75, 15 / 75]


def strategy_of(**kwargs: Any) -> FedADMM:
    return FedADMM(**({"weights": "size", "rho": 0.1, "lr": 0.5, "seed": 1} | kwargs))


def grid_of(num_nodes: int = 6, failing: Mapping[int, Sequence[int]] | None = None) -> Federation:
    client_fn = client_fn_of(FedADMMClient, failing or {})
    return Federation(client_app(client_fn, num_clients=6), num_nodes)


def alpha_of(strategy: FedADMM) -> list[float]:
    return strategy.state.clients.column("alpha").tolist()


def shaken(grid: Federation) -> list[int]:
    """Return the rounds of the messages with a method's handshake."""
    return [
        server_round
        for kind, server_round, messages in grid.sent
        if kind == MessageType.TRAIN
        for message in messages
        for _, asked in unpack_instructions(message.content)
        if asked.config.get("handshake") and NAMES not in asked.config
    ]


@pytest.mark.parametrize("num_nodes", [6, 2])
def test_every_client_is_asked_once_before_round_1(num_nodes: int) -> None:
    grid = grid_of(num_nodes)
    strategy = strategy_of(fraction_train=0.5)
    strategy.start(grid, initial_arrays(), 2)
    assert shaken(grid) == [0] * 6
    assert_allclose(alpha_of(strategy), ALPHA, rtol=1e-15)
    # It moved no arrays, and is no upload: all clients are still at their start.
    assert strategy.traffic[0] == Traffic(0, 0)
    assert sorted(strategy.train_metrics) == [1, 2]
    trained = {client for clients in strategy.train_metrics.values() for client in clients}
    assert {client for client, r in strategy.membership.last_accepted.items() if r} == trained
    weights = [
        json.loads(asked.config["rule"])["share"]
        for message in grid.phase(MessageType.TRAIN, 1)
        for _, asked in unpack_instructions(message.content)
    ]
    assert set(weights) <= {6 * alpha for alpha in alpha_of(strategy)}  # m alpha_i


def test_a_lost_reply_is_asked_for_again() -> None:
    lost = iter([lambda replies: replies[:2] + replies[4:]])
    grid, strategy, expected = grid_of(), strategy_of(), strategy_of()
    grid.spoil = {0: lambda replies: next(lost, list)(replies)}
    strategy.start(grid, initial_arrays(), 2)
    expected.start(grid_of(), initial_arrays(), 2)
    assert_same_bits(strategy.state_dict(), expected.state_dict())


def test_a_run_in_which_nobody_shakes_hands_ends_by_name() -> None:
    grid = grid_of(failing={client: [0] for client in range(6)})
    with refused(RuntimeError, "handshake", "[0, 1, 2, 3, 4, 5]", "the disk is full"):
        strategy_of().start(grid, initial_arrays(), 1)
