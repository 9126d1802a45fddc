"""Clients that join a run and leave it: what every strategy promises, whatever its algorithm.

By which rule each of them takes a new client in stands in its docstring; see
tests/fl_admm_strategies/algorithms/test_joining.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.algorithms.fpfc.source import PenaltySource
from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.saving.state import arrays_of, parts_by_client
from tests.support.cases import Case, at_any_pace, each_case
from tests.support.checkpoints import Killed, killer
from tests.support.federation import (
    FROM_ROUND_3,
    GONE_AND_BACK,
    INITIAL,
    JOINING,
    PARTITIONS,
    Online,
    RestlessGrid,
    assert_same_bits,
    client_fn_of,
    raising_client_fn,
    trained,
)

Uploads = Mapping[int, Arrays]


def grid_of(case: Case, online: Online, partitions: Any = PARTITIONS) -> RestlessGrid:
    return RestlessGrid(client_app(client_fn_of(case.client_class)), partitions, online)


def last_uploads(strategy: Any) -> dict[int, Arrays]:
    """Return what every client uploaded last, from now on."""
    uploads: dict[int, Arrays] = {}
    update = strategy.update

    def remember(server_round: int, replies: Mapping[int, Any]) -> None:
        uploads.update({client: reply.arrays for client, reply in replies.items()})
        update(server_round, replies)

    strategy.update = remember
    return uploads


def vector(strategy: Any, upload: Arrays) -> NDArray[Any]:
    """Return the optimised arrays of an upload as one vector."""
    optimised = strategy._block.names if hasattr(strategy, "_block") else []
    names = [name for name in optimised if name in upload] or list(upload)
    return np.concatenate([upload[name].ravel() for name in names])


def held_by(strategy: Any, grid: RestlessGrid, client: int) -> dict[str, NDArray[Any]]:
    """Return what a client keeps of the round that the server takes it to be in."""
    state = grid.context(strategy._link.discovery.node_of[client]).state
    record = state.array_records.get(f"memory.{strategy.membership.last_accepted[client]}", {})
    return {name: array.numpy() for name, array in record.items()}


def assert_consistent(
    case: Case, strategy: StatefulStrategy, grid: RestlessGrid, uploads: Uploads
) -> None:
    """Check that rows belong to their clients and that sums are over those that belong."""
    clients, view = strategy.client_ids, case.view
    for part in parts_by_client(strategy.state):
        if not isinstance(part, PenaltySource):  # which knows only who has a place in it
            assert getattr(part, "clients", part).ids == clients
    if view.rows is not None:
        assert len(view.rows(strategy)) == len(clients)
        for client, row in zip(clients, view.rows(strategy), strict=True):
            assert_array_equal(row.ravel(), vector(strategy, uploads[client]))
    if view.total is not None and view.message is not None:
        messages = [view.message(strategy, c, held_by(strategy, grid, c)) for c in clients]
        rtol, atol = view.rounding
        assert_allclose(view.total(strategy), np.sum(messages, axis=0), rtol=rtol, atol=atol)


@each_case
def test_a_client_that_joins_belongs_to_the_run_from_then_on(case: Case) -> None:
    # Clients 1 and 4 fail from then on: their rows, before and after the new one, must be theirs.
    client_fn = raising_client_fn(case.client_class, {1: [3, 4], 4: [3, 4]})
    grid = RestlessGrid(client_app(client_fn), PARTITIONS, FROM_ROUND_3)
    strategy = case.strategy(seed=1)
    uploads = last_uploads(strategy)
    strategy.start(grid, case.initial_arrays(), 4)
    assert strategy.client_ids == [0, 1, 2, 4]
    assert strategy.membership.num_initial == 3
    assert trained(strategy) == {1: INITIAL, 2: INITIAL, 3: [0, 2], 4: [0, 2]}
    assert strategy.membership.last_accepted == {0: 4, 1: 2, 2: 4, 4: 2}
    assert JOINING not in strategy.evaluate_metrics[2]
    assert JOINING in strategy.evaluate_metrics[3]
    assert_consistent(case, strategy, grid, uploads)


@at_any_pace
def test_a_joining_client_that_never_succeeds_leaves_no_trace(case: Case) -> None:
    client_fn = raising_client_fn(case.client_class, {JOINING: range(1, 9)})
    grid = RestlessGrid(client_app(client_fn), PARTITIONS, FROM_ROUND_3)
    strategy, expected = case.strategy(seed=1), case.strategy(seed=1)
    strategy.start(grid, case.initial_arrays(), 4)
    expected.start(grid_of(case, {0: [2, 3, 4]}), case.initial_arrays(), 4)
    assert strategy.client_ids == INITIAL
    assert_same_bits(arrays_of(strategy.state), arrays_of(expected.state))
    assert strategy.train_metrics == expected.train_metrics
    assert strategy.evaluate_metrics == expected.evaluate_metrics


@each_case
def test_a_client_that_left_does_not_count_and_comes_back_as_a_new_one(case, warned):
    grid = grid_of(case, GONE_AND_BACK, (0, 1, 2, 1))
    strategy = case.strategy(seed=1, max_missed_rounds=2)
    uploads = last_uploads(strategy)
    members: dict[int, list[int]] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        members[server_round] = list(strategy.client_ids)
        if server_round == 5:  # two rounds without it, in which all others took part
            assert_consistent(case, strategy, grid, uploads)

    strategy.start(grid, case.initial_arrays(), 7, on_round=on_round)
    both = {3: [0, 1, 2], 4: [0, 2], 5: [0, 2], 6: [0, 1, 2], 7: [0, 1, 2]}
    assert members == {1: [0, 1, 2], 2: [0, 1, 2], **both}
    assert trained(strategy) == {**members, 3: [0, 2]}
    assert_consistent(case, strategy, grid, uploads)
    assert len(warned("left the run")) == len(warned("left the run", "round 4", "[1]")) == 1


@pytest.mark.slow
@at_any_pace
def test_a_run_that_clients_joined_and_left_is_resumed_to_the_same_bits(case, tmp_path):
    online: Online = {0: [2, 3, 4], 2: [2, 3, 4, 5], 4: [2, 3, 5]}

    def start(grid: RestlessGrid, folder: Path, **options: Any) -> StatefulStrategy:
        strategy = case.strategy(seed=1, max_missed_rounds=2, node_timeout=0.3)
        strategy.start(
            grid, case.initial_arrays(), 6, checkpoint_dir=folder, resume=True, **options
        )
        return strategy

    expected = start(grid_of(case, online), tmp_path / "whole")
    assert expected.client_ids == [0, 1, 2]
    grid, folder = grid_of(case, online), tmp_path / "killed"
    for killed_in in (3, 5):  # before anybody has left, and after
        with pytest.raises(Killed):
            start(grid, folder, on_round=killer(killed_in))
        grid.server_round = killed_in - 1  # the round is repeated, with the nodes of then
    actual = start(grid, folder)
    assert_same_bits(actual.state_dict(), expected.state_dict())
    assert actual.train_metrics == expected.train_metrics
