"""A run that is continued: what every strategy promises of it, whatever its algorithm."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from flwr.serverapp.strategy import Result

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from tests.support.cases import NUM_CLIENTS, Case, State, at_any_pace, grid_of, run, sampling
from tests.support.federation import (
    WatchedGrid,
    assert_same_bits,
    assert_same_runs,
    client_fn_of,
    trained,
)
from tests.support.refusals import Warned

ROUNDS, SAVED = 6, 3


@dataclass
class Whole:
    """A run that was never interrupted, and what there was after each of its rounds.

    Attributes
    ----------
    strategy : StatefulStrategy
        At its end.
    result : Result
    saved : dict of int to State
        Its states, as `state_dict` returned them.
    copies : dict of int to State
        Copies of these, made at once.
    clients : dict of int to RecordDict
        By node, what the clients kept after round `SAVED`.
    """

    strategy: StatefulStrategy
    result: Result = field(default_factory=Result)
    saved: dict[int, State] = field(default_factory=dict)
    copies: dict[int, State] = field(default_factory=dict)
    clients: dict[int, RecordDict] = field(default_factory=dict)


@cache
def whole(case: Case) -> Whole:
    grid, found = grid_of(case), Whole(sampling(case))

    def on_round(server_round: int, metrics: Any) -> None:
        state = found.strategy.state_dict()
        found.saved[server_round] = state
        found.copies[server_round] = {key: array.copy() for key, array in state.items()}
        if server_round == SAVED:
            found.clients = {n: copy.deepcopy(grid.context(n).state) for n in grid.get_node_ids()}

    found.result = found.strategy.start(grid, case.initial_arrays(), ROUNDS, on_round=on_round)
    return found


@at_any_pace
def test_a_saved_state_is_numbers_that_later_rounds_do_not_change(case: Case) -> None:
    expected = whole(case)
    for key, array in expected.saved[SAVED].items():
        assert type(array) is np.ndarray, key
        assert array.dtype.kind in "biuf", key  # numeric, so that numpy and safetensors take it
    for server_round, state in expected.saved.items():
        assert_same_bits(state, expected.copies[server_round])


def continued(case: Case, grid: WatchedGrid) -> StatefulStrategy:
    strategy = sampling(case)
    strategy.load_state_dict(whole(case).copies[SAVED])
    return run(case, grid, ROUNDS, strategy=strategy)


def assert_same_end(case: Case, strategy: StatefulStrategy) -> None:
    expected = whole(case).strategy
    assert trained(strategy) == {r: c for r, c in trained(expected).items() if r > SAVED}
    assert {r: expected.train_metrics[r] for r in strategy.train_metrics} == strategy.train_metrics
    assert_same_bits(strategy.state_dict(), expected.state_dict())


@at_any_pace
def test_a_saved_state_continues_to_the_same_bits(case: Case) -> None:
    grid = grid_of(case)
    for node, kept in whole(case).clients.items():
        grid.context(node).state.update(copy.deepcopy(kept))
    assert_same_end(case, continued(case, grid))


@at_any_pace
def test_a_saved_state_continues_with_clients_that_lost_theirs(case: Case, warned: Warned) -> None:
    strategy = continued(case, grid_of(case))
    if case.stateless_clients:
        assert_same_end(case, strategy)
        return
    # What was theirs is gone: whoever needs it says so when it is first asked, sits out that once,
    # and takes part from then on. The same clients are sampled as ever.
    lines = warned("afresh")
    assert lines
    missing: set[int] = set()
    for server_round in range(SAVED + 1, ROUNDS + 1):
        sampled = set(whole(case).strategy.train_metrics[server_round])
        refused = sampled - set(strategy.train_metrics.get(server_round, ()))
        assert not refused & missing  # nobody sits out twice
        named = [line for line in lines if line.startswith(f"round {server_round}:")]
        for client in refused:
            assert any(re.search(rf"[\[ ]{client}[,\]]", line) for line in named)
        missing |= refused
    assert bool(missing) != case.memory_for_tests


@at_any_pace
def test_a_run_resumed_from_a_folder_is_the_whole_run(case: Case, tmp_path: Path) -> None:
    # Round 4 is trained but not saved: its clients have moved on, and go back.
    def start(strategy: StatefulStrategy, **options: Any) -> Result:
        client_class = partial(case.client_class, state_dir=tmp_path / "clients")
        grid = WatchedGrid(client_app(client_fn_of(client_class)), NUM_CLIENTS)
        folder = tmp_path / "checkpoints"
        return strategy.start(grid, case.initial_arrays(), ROUNDS, checkpoint_dir=folder, **options)

    def interrupt(server_round: int, metrics: Any) -> None:
        if server_round == SAVED + 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start(sampling(case), on_round=interrupt)
    strategy = sampling(case)
    result, expected = start(strategy, resume=True), whole(case)
    assert_same_runs(strategy, expected.strategy)
    assert result.train_metrics_clientapp == expected.result.train_metrics_clientapp
    assert result.evaluate_metrics_clientapp == expected.result.evaluate_metrics_clientapp
    # After a restart more may be sent, to be on the safe side, and is counted.
    for server_round in range(1, SAVED + 1):
        assert strategy.traffic[server_round] == expected.strategy.traffic[server_round]
