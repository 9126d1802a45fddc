"""Groupings under trial: models of groups by hand, and voters."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from fl_admm_strategies.algorithms.fpfc.search import SearchState
from fl_admm_strategies.maths.candidates import voters

GROUPINGS = [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 2, 3)]
VECTORS = np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 3.0], [10.0, 0.0]])
NAMES = [7, 8, 9, 5]


def trial() -> SearchState:
    state = SearchState()
    state.try_groupings(NAMES, GROUPINGS, VECTORS)
    return state


def models_of(state: SearchState, client: int) -> object:
    return state.models[state.labels[client]].tolist()


def test_groups_set_out_from_their_members_mean() -> None:
    tried = trial()
    assert models_of(tried, 5) == [[4.0, 0.75], [10.0, 0.0], [10.0, 0.0]]
    assert models_of(tried, 8) == [[4.0, 0.75], [2.0, 1.0], [2.0, 0.0]]


def test_a_refit_takes_the_mean_of_the_replies() -> None:
    tried = trial()
    tried.refit({7: np.array([[1.0, 1], [2, 2], [3, 3]]), 9: np.array([[3.0, 1], [6, 4], [5, 5]])})
    assert models_of(tried, 7) == [[2.0, 1.0], [4.0, 3.0], [3.0, 3.0]]
    assert models_of(tried, 9) == [[2.0, 1.0], [4.0, 3.0], [5.0, 5.0]]
    assert models_of(tried, 5) == [[2.0, 1.0], [10.0, 0.0], [10.0, 0.0]]  # without a reply


def test_groupings_that_are_given_up_are_gone() -> None:
    tried = trial()
    tried.keep([1, 2])
    assert models_of(tried, 5) == [[10.0, 0.0], [10.0, 0.0]]
    assert models_of(tried, 8) == [[2.0, 1.0], [2.0, 0.0]]


def test_every_group_has_a_voter_and_groups_come_in_turn() -> None:
    # The finest grouping of four groups or fewer counts: 0 to 5, 6 and 7, 8, 9.
    one, four = (0,) * 10, (0,) * 6 + (1, 1, 2, 3)
    groupings = [one, four, (0, 1, 2, 3, 4, 4, 5, 5, 6, 7), tuple(range(10))]
    labels = dict(enumerate(np.array(groupings).T))
    order = [5, 4, 3, 2, 1, 0, 7, 6, 8, 9]
    assert sorted(voters(labels, order, 4)) == [5, 7, 8, 9]
    assert sorted(voters(labels, order, 5)) == [4, 5, 7, 8, 9]
    assert sorted(voters(labels, order, 6)) == [4, 5, 6, 7, 8, 9]
    assert sorted(voters(labels, order[1:], 4)) == [4, 7, 8, 9]  # without 5
    assert_array_equal(sorted(voters(labels, order, 12)), range(10))
