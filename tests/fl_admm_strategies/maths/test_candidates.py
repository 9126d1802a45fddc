"""Groupings under trial: models of groups by hand, and who votes."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from fl_admm_strategies.maths.candidates import Candidates

GROUPINGS = [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 2, 3)]
VECTORS = np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 3.0], [10.0, 0.0]])
NAMES = [7, 8, 9, 5]


def candidates() -> Candidates:
    return Candidates(NAMES, GROUPINGS, VECTORS)


def test_groups_set_out_from_their_members_mean() -> None:
    tried = candidates()
    assert_array_equal(tried.models[0], [[4.0, 0.75]])
    assert_array_equal(tried.models[1], [[2.0, 1.0], [10.0, 0.0]])
    assert_array_equal(tried.models[2], VECTORS)
    assert_array_equal(tried.models_of(5), [[4.0, 0.75], [10.0, 0.0], [10.0, 0.0]])


def test_a_refit_takes_the_mean_of_those_who_replied() -> None:
    tried = candidates()
    tried.refit({7: np.array([[1.0, 1], [2, 2], [3, 3]]), 9: np.array([[3.0, 1], [6, 4], [5, 5]])})
    assert_array_equal(tried.models[0], [[2.0, 1.0]])
    assert_array_equal(tried.models[1], [[4.0, 3.0], [10.0, 0.0]])  # nobody of the second replied
    assert_array_equal(tried.models[2], [[3.0, 3.0], [2.0, 0.0], [5.0, 5.0], [10.0, 0.0]])


def test_groupings_that_are_given_up_are_gone() -> None:
    tried = candidates()
    tried.keep([1, 2])
    assert {c: labels.tolist() for c, labels in tried.labels.items()} == {
        c: [GROUPINGS[1][row], row] for row, c in enumerate(NAMES)
    }
    assert_array_equal(tried.models[0], [[2.0, 1.0], [10.0, 0.0]])
    assert_array_equal(tried.models[1], VECTORS)
    assert len(tried) == 2


def test_every_group_has_a_voter_and_groups_come_in_turn() -> None:
    # The finest grouping of four groups or fewer counts: 0 to 5, 6 and 7, 8, 9.
    one, four = (0,) * 10, (0,) * 6 + (1, 1, 2, 3)
    tried = Candidates(range(10), [one, four, (0, 1, 2, 3, 4, 4, 5, 5, 6, 7), tuple(range(10))])
    order = [5, 4, 3, 2, 1, 0, 7, 6, 8, 9]
    assert sorted(tried.voters(order, 4)) == [5, 7, 8, 9]
    assert sorted(tried.voters(order, 5)) == [4, 5, 7, 8, 9]
    assert sorted(tried.voters(order, 6)) == [4, 5, 6, 7, 8, 9]
    assert sorted(tried.voters(order[1:], 4)) == [4, 7, 8, 9]  # 5 is not there
    assert sorted(tried.voters(order, 12)) == list(range(10))
