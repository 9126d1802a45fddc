"""Rows by client: every entry stays its client's, whoever comes and goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from fl_admm_strategies.maths.clienttable import ClientTable
from tests.support.refusals import refused


def table() -> ClientTable:
    """Return clients 2 and 7, with a vector, a number and an integer each."""
    own = ClientTable(theta=np.zeros(2, np.float32), alpha=0.5, steps=0)
    own.insert({7: {"theta": [7, 7]}, 2: {"alpha": 0.25, "steps": 3}})
    return own


def test_rows_stand_in_the_order_of_the_ids_and_start_as_declared() -> None:
    own = table()
    assert own.ids == [2, 7]
    assert len(own) == 2
    assert_array_equal(own.column("theta"), [[0, 0], [7, 7]])
    assert_array_equal(own.column("alpha"), [0.25, 0.5])
    assert_array_equal(own.column("steps"), [3, 0])
    dtypes = [own.column(name).dtype.kind for name in ("theta", "alpha", "steps")]
    assert dtypes == ["f", "f", "i"]
    assert own.column("theta").dtype == np.float32
    assert "theta" in own
    assert "beta" not in own


def test_a_row_reads_and_writes_its_entries() -> None:
    own = table()
    own[7].theta += 1  # in place
    own[2].theta = np.array([4, 5])
    own[2].steps += 2
    own[2].alpha = 1
    assert_array_equal(own.column("theta"), [[4, 5], [8, 8]])
    assert_array_equal(own.column("steps"), [5, 0])
    assert own[2].alpha == 1
    assert own[7].theta.base is not None  # a view
    assert_array_equal(own.rows("theta", [7, 2, 7]), [[8, 8], [4, 5], [8, 8]])
    own.rows("theta", [7])[:] = 0  # a copy
    assert_array_equal(own[7].theta, [8, 8])


def test_a_column_that_was_not_declared_is_named() -> None:
    own = table()
    for access in (lambda: own[2].beta, lambda: setattr(own[2], "beta", 1)):
        with refused(AttributeError, "beta"):
            access()
    with refused(KeyError, "beta", "gamma"):
        own.insert({3: {"gamma": 1, "beta": 2}})
    assert own.ids == [2, 7]


def test_an_entry_of_another_shape_is_refused() -> None:
    own = table()
    with refused(ValueError, "broadcast"):
        own.insert({3: {"theta": [1, 2, 3]}})
    with refused(ValueError, "broadcast"):
        own[2].theta = np.zeros(3)


def test_guests_are_known_for_a_round() -> None:
    own = table()
    own.add_pending({5: {"theta": [5, 5]}})
    assert_array_equal(own[5].theta, [5, 5])
    assert own[5].alpha == 0.5
    assert own.ids == [2, 7]
    assert_array_equal(own.column("alpha"), [0.25, 0.5])
    own.add_pending({6: {}})
    assert_array_equal(own[6].theta, [0, 0])
    with pytest.raises(KeyError):
        own[5]


def test_a_row_does_not_change_with_what_it_was_made_of() -> None:
    first = np.zeros(2)
    own = ClientTable(theta=first)
    entry = np.ones(2)
    own.insert({1: {"theta": entry}, 2: {}})
    own.add_pending({3: {"theta": entry}})
    own[2].theta += 5
    own[3].theta += 5
    assert_array_equal(entry, [1, 1])
    entry += 1
    assert_array_equal(own[3].theta, [6, 6])
    own.insert({4: {}})
    assert_array_equal(own.column("theta"), [[1, 1], [5, 5], [0, 0]])
    assert_array_equal(first, [0, 0])


def test_the_columns_are_saved_and_loaded() -> None:
    own, other = table(), table()
    saved = {name: array.copy() for name, array in own.state_arrays().items()}
    own[2].theta += 1
    other[7].alpha = 0.125
    other.load_state_arrays(saved)
    assert sorted(saved) == ["alpha", "steps", "theta"]
    for name, array in saved.items():
        assert_array_equal(other.column(name), array)
    other[2].theta += 9  # what was loaded is a copy
    assert_array_equal(saved["theta"], [[0, 0], [7, 7]])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9), max_size=4)), max_size=12))
def test_after_any_coming_and_going_every_row_is_its_clients(changes):
    own, expected = ClientTable(theta=np.zeros(2), age=0), {}
    for number, (join, clients) in enumerate(changes):
        if join:
            new: dict[int, Any] = {c: {"theta": [c, number]} for c in clients - expected.keys()}
            own.insert(new)
            expected |= {client: (row["theta"], 0) for client, row in new.items()}
        else:
            gone = clients & expected.keys()
            own.remove(gone)
            expected = {client: row for client, row in expected.items() if client not in gone}
        for client in expected:
            own[client].age += 1
        expected = {client: (theta, age + 1) for client, (theta, age) in expected.items()}
        assert own.ids == sorted(expected)
        for client, (theta, age) in expected.items():
            assert_array_equal(own[client].theta, theta)
            assert own[client].age == age
