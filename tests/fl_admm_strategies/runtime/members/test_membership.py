"""Who belongs to a run: the rounds that a client was seen in, and what it surely holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, SmoothedSCAD
from fl_admm_strategies.runtime.members.membership import Membership
from fl_admm_strategies.runtime.messages.records import Reply
from tests.support.federation import (
    INITIAL,
    PARTITIONS,
    Federation,
    Online,
    client_fn_of,
    initial_arrays,
)


def members(*clients: int, max_missed_rounds: int | None = None) -> Membership:
    own = Membership(max_missed_rounds)
    own.reset(clients, 0)
    return own


def test_what_a_client_surely_holds() -> None:
    own = members(2, 5)
    own.mark_uncertain([2, 5])  # both are asked
    own.accept([5], 3)
    assert [own.has_current_state(client) for client in (2, 5)] == [False, True]
    assert [own.is_new(client) for client in (2, 5)] == [True, False]
    own.mark_uncertain([5])  # asked once more, or restarted: its reply may be lost
    assert not own.has_current_state(5)
    assert own.last_accepted == {2: 0, 5: 3}
    own.accept([2, 5], 4)
    own.mark_lost([5, 9])  # it says that it has lost everything; 9 is no client
    assert own.last_accepted == {2: 4, 5: 0}
    assert own.is_new(5)
    assert not own.has_current_state(5)
    assert own.has_current_state(2)


def test_who_joins_has_a_place_between_the_others() -> None:
    own = members(2, 7)
    own.accept([2, 7], 1)
    reply = Reply({}, 3.0, {})
    own.record_connected(2, [2, 5, 7, 9, 1], 0)
    assert own.unknown([9, 5, 7, 1, 2], 1) == [1, 5, 9]
    own.joining |= {1: None, 5: reply, 9: None}
    assert own.unknown([9, 5], 1) == []
    assert own.admit([1, 5, 9], 2) == [0, 1, 2]
    assert own.ids == [1, 2, 5, 7, 9]
    assert own.joining == {}
    assert own.last_accepted == {1: 0, 2: 1, 5: 0, 7: 1, 9: 0}
    assert list(own.last_accepted) == list(own.last_seen) == own.ids
    assert own.num_initial == 2  # stays what it was
    assert own.last_seen[5] == 2


def test_who_has_missed_too_many_rounds_has_left() -> None:
    own = members(2, 5, 7, max_missed_rounds=2)
    for server_round in (1, 2):
        own.record_connected(server_round, [2, 5, 7], 0)
    own.record_connected(3, [2], 0)
    assert own.overdue(3) == []
    own.record_connected(4, [2], 0)
    assert own.overdue(4) == [5, 7]
    own.accept([5], 2)
    assert own.remove([5, 7]) == [1, 2]
    assert own.ids == [2]
    assert list(own.last_accepted) == list(own.last_seen) == [2]
    assert not own.has_current_state(5)
    own.record_connected(9, [], 0)
    assert own.overdue(9) == []  # somebody must be left
    never = members(2, 5)
    never.record_connected(100, [2], 0)
    assert never.overdue(100) == []


def test_it_is_saved_and_loaded() -> None:
    own = members(2, 2**64 - 1)
    own.record_connected(3, [2], 5)
    own.accept([2], 3)
    own.initial_examples = 12.5
    own.joining = {7: None}
    own.admit([7], 3)
    saved = own.state_arrays()
    assert saved["client_ids"].tolist() == [2, 7, 2**64 - 1]
    assert saved["client_ids"].dtype == np.uint64  # a node id may have 64 bits
    other = members(*own.ids)
    other.load_state_arrays(saved)
    for name, array in other.state_arrays().items():
        assert_array_equal(array, saved[name], err_msg=name)
    assert (other.num_initial, other.initial_examples, other.announced) == (2, 12.5, 5)
    assert other.last_accepted == {2: 3, 7: 0, 2**64 - 1: 0}
    assert not other.has_current_state(2)  # it may have been restarted as well


# --- In a run -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_does_without_clients_that_may_leave(tmp_path: Path) -> None:
    def start(online: Online, num_rounds: int) -> FPFC:
        strategy = FPFC(
            SmoothedSCAD(0.5), lr=0.2, max_missed_rounds=2, node_timeout=0.3, fraction_evaluate=0
        )
        grid = Federation(client_app(client_fn_of(FPFCClient)), PARTITIONS, online)
        strategy.start(grid, initial_arrays(), num_rounds, checkpoint_dir=tmp_path, resume=True)
        return strategy

    start({0: [2, 3, 4]}, 2)
    assert start({0: [2, 3]}, 3).client_ids == INITIAL  # client 4 is away for the first round
    assert start({0: [2, 3]}, 4).client_ids == [0, 1]
    # Without a word about the size of the federation, a client that is new at the start is one
    # that joins; see test_checkpoints for a federation that says it is another.
    assert start({0: [2, 3, 5]}, 5).client_ids == [0, 1, 2]
