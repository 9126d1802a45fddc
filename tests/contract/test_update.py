"""An update is a transaction over the state, and reads what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from fl_admm_strategies.runtime.messages.records import Reply
from fl_admm_strategies.runtime.saving.state import arrays_of, load_arrays
from fl_admm_strategies.runtime.trust.guard import SUSPICIOUS, snapshot
from tests.support.cases import AT_ANY_PACE, Case, State, at_any_pace, case_of, grid_of, sampling
from tests.support.federation import (
    FROM_ROUND_3,
    JOINING,
    PARTITIONS,
    RestlessGrid,
    assert_same_bits,
    client_fn_of,
    node_of,
    raising_client_fn,
    warnings_in,
)


def copied(state: Any) -> State:
    return {name: array.copy() for name, array in arrays_of(state).items()}


def described(value: Any, hidden: Any, seen: dict[int, Any]) -> Any:
    """Return all that can be reached from a value but `hidden`, in a form that can be compared.

    `seen` holds what it has seen: the number of a value that is gone may be another's.
    """
    if value is hidden:
        return "hidden"
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if value is None or isinstance(value, str | bytes | int | float | type) or callable(value):
        return repr(value)
    if id(value) in seen:
        return "seen before"
    seen[id(value)] = value
    if isinstance(value, Mapping):
        return [(repr(key), described(part, hidden, seen)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [described(part, hidden, seen) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    parts = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return repr(type(value)), described(parts | getattr(value, "__dict__", {}), hidden, seen)


def outside(strategy: StatefulStrategy) -> Any:
    """Return what `update` must leave alone: all that a strategy holds but its state."""
    return described(vars(strategy), strategy.state, {})


def repeating(strategy: StatefulStrategy) -> StatefulStrategy:
    """Run every update twice from the same state, and compare."""
    update = strategy.update

    def twice(server_round: int, replies: Mapping[int, Reply]) -> None:
        before, others = copied(strategy.state), outside(strategy)
        undo = None if strategy.stays_finite else snapshot(strategy.state, replies)
        update(server_round, replies)
        after = copied(strategy.state)
        assert outside(strategy) == others
        if undo is None:
            load_arrays(strategy.state, before, "the strategy")
        else:
            undo()
        assert_same_bits(arrays_of(strategy.state), before)
        update(server_round, replies)
        assert_same_bits(arrays_of(strategy.state), after)

    strategy.update = twice  # type: ignore[method-assign]
    return strategy


@at_any_pace
def test_an_update_may_be_run_again_and_changes_nothing_but_the_state(case: Case) -> None:
    strategy = repeating(sampling(case))
    strategy.start(grid_of(case), case.initial_arrays(), 3)


# Those whose updates differ by round, in runs that see all kinds.
STAGES: dict[str, dict[str, Any]] = {
    "FPFC-auto": {"consensus_rounds": 1},
    "FPFC-path": {},
    "IFCA": {"restarts": 2, "restart_rounds": 1},
    "CFL": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_so_it_may_in_every_stage_of_a_run(name: str) -> None:
    case = case_of(name)
    strategy = repeating(case.strategy(seed=1, fraction_evaluate=0, **STAGES[name]))
    strategy.start(grid_of(case), case.initial_arrays(), 14)


@at_any_pace
def test_a_reply_comes_with_what_its_client_was_sent(case: Case) -> None:
    grid, strategy = grid_of(case), sampling(case)
    update, ages = strategy.update, []

    def compare(server_round: int, replies: Mapping[int, Reply]) -> None:
        for client, reply in replies.items():
            sent_in = reply.asked.config["server-round"]
            ages.append(server_round - sent_in)
            if strategy.in_rounds:
                (message,) = (
                    message
                    for message in grid.phase("train", sent_in)
                    if message.metadata.dst_node_id == node_of(client)
                )
                assert dict(message.content["config"]) == reply.asked.full_config()
        update(server_round, replies)

    strategy.update = compare  # type: ignore[method-assign]
    strategy.start(grid, case.initial_arrays(), 4)
    if strategy.in_rounds:
        assert set(ages) == {0}
    else:
        assert ages == [*strategy.staleness.values()]  # type: ignore[attr-defined]
        assert max(ages) > 0


@pytest.mark.parametrize(
    "case",
    [case for case in AT_ANY_PACE if case.server_learns and not case.strategy().stays_finite],
    ids=lambda case: case.name,
)
def test_an_update_that_is_undone_is_as_if_its_culprit_had_not_come(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The culprit joins in that round: it must not belong to the run, either.
    strategy, expected = case.strategy(seed=1), case.strategy(seed=1)
    hold = strategy.run.bound.hold

    def suspect(server_round: int, replies: dict[int, Reply], *others: Any) -> Any:
        held = hold(server_round, replies, *others)
        if JOINING in replies and server_round == 3:
            large = replace(replies[JOINING], largest=2 * SUSPICIOUS)
            held = held._replace(replies=held.replies | {JOINING: large})
        return held

    def is_finite(state: Any, clients: Iterable[int]) -> bool:
        return strategy.last_round != 3 or JOINING not in clients

    monkeypatch.setattr(strategy.run.bound, "hold", suspect)
    monkeypatch.setattr("fl_admm_strategies.runtime.trust.guard.is_finite", is_finite)
    run(strategy, case, client_fn_of(case.client_class))
    assert any(f"client {JOINING} refused" in line for line in warnings_in(caplog.records))
    monkeypatch.undo()
    run(expected, case, raising_client_fn(case.client_class, {JOINING: [3]}))
    assert_same_bits(arrays_of(strategy.state), arrays_of(expected.state))
    assert strategy.membership.last_accepted == expected.membership.last_accepted


def run(strategy: StatefulStrategy, case: Case, client_fn: Callable[..., Any]) -> None:
    grid = RestlessGrid(client_app(client_fn), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, case.initial_arrays(), 3)
