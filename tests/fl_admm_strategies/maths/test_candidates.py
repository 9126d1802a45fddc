"""Groupings under trial: models of groups by hand, and clients that join another group."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fl_admm_strategies.maths.candidates import OPTIONS, Candidates

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


def after_trial() -> Candidates:
    """Clients 7, 8 and 9 uploaded 1, 2 and 6 for their group, client 5 uploaded 9 for its own."""
    tried = candidates()
    tried.uploads = {
        c: np.full((3, 2), value) for c, value in zip(NAMES, (1.0, 2.0, 6.0, 9.0), strict=True)
    }
    tried.refit(tried.uploads)
    return tried


def test_a_client_chooses_among_models_that_it_had_no_part_in() -> None:
    tried = after_trial()
    assert list(tried.open_to_change) == [1]
    assert tried.options(7) == [(1, 0), (1, 1)]
    assert tried.options(5) == [(1, 1), (1, 0)]
    # The mean of 1, 2 and 6 is 3; without client 7's 1 it is 4, without client 9's 6 it is 1.5.
    assert_allclose(tried.models_without(7), [[4.0, 4.0], [9.0, 9.0]])
    assert_allclose(tried.models_without(9), [[1.5, 1.5], [9.0, 9.0]])
    # Client 5 is alone in its group: there is no other model of it.
    assert_allclose(tried.models_without(5), [[9.0, 9.0], [3.0, 3.0]])


def test_an_upload_that_did_not_arrive_is_not_taken_out() -> None:
    tried = candidates()
    tried.uploads = {c: np.full((3, 2), value) for c, value in ((7, 1.0), (8, 3.0))}
    tried.refit(tried.uploads)
    assert_allclose(tried.models_without(9)[0], [2.0, 2.0])
    assert_allclose(tried.models_without(7)[0], [3.0, 3.0])


def test_clients_join_the_group_of_the_least_loss_and_models_begin_anew() -> None:
    tried = after_trial()
    losses = {
        7: np.array([0.5, 0.5]),  # equal: stays
        9: np.array([0.5, 0.4]),  # joins client 5
        8: np.array([np.nan, np.nan]),  # stays
        5: np.array([0.3, np.nan]),
    }
    assert tried.join(losses, dict(zip(NAMES, VECTORS, strict=True))) == 1
    assert [int(tried.labels[c][1]) for c in NAMES] == [0, 0, 1, 1]
    for k in (0, 2):
        assert [int(tried.labels[c][k]) for c in NAMES] == list(GROUPINGS[k])
    # From the probes again, by the new members.
    assert_array_equal(tried.models[0], [[4.0, 0.75]])
    assert_array_equal(tried.models[1], [[1.0, 0.0], [7.0, 1.5]])
    assert_array_equal(tried.models[2], VECTORS)
    assert tried.uploads == {}


def test_groupings_that_have_become_the_same_are_one() -> None:
    # Client 5 joins the others: that is "one group", which is there already.
    tried = after_trial()
    tried.join({5: np.array([0.9, 0.1])}, dict(zip(NAMES, VECTORS, strict=True)))
    assert len(tried) == 2
    assert {c: labels.tolist() for c, labels in tried.labels.items()} == {
        c: [0, place] for place, c in enumerate(NAMES)
    }
    assert_array_equal(tried.models[0], [[4.0, 0.75]])
    assert_array_equal(tried.models[1], VECTORS)


def test_a_group_without_clients_keeps_its_model() -> None:
    # Three groups, of which the second loses its only client.
    tried = Candidates(NAMES, [(0, 0, 0, 0), (0, 0, 1, 2), (0, 1, 2, 3)], VECTORS)
    assert tried.options(9) == [(1, 1), (1, 0), (1, 2)]
    tried.join({9: np.array([0.9, 0.1, 0.5])}, dict(zip(NAMES, VECTORS, strict=True)))
    assert [int(tried.labels[c][1]) for c in NAMES] == [0, 0, 0, 2]
    assert_array_equal(tried.models[1], [[2.0, 1.0], [4.0, 3.0], [10.0, 0.0]])


def test_a_client_that_left_has_no_part_in_what_is_offered() -> None:
    tried = after_trial()
    assert_allclose(tried.models_without(7)[0], [4.0, 4.0])  # of 2 and 6
    tried.remove(9)
    assert_allclose(tried.models_without(7)[0], [2.0, 2.0])


def test_only_the_nearest_groups_are_offered() -> None:
    # 24 clients on a line, in 12 groups of two at 0, 1, 4, 9, ..., 121.
    m = 24
    labels = tuple(i // 2 for i in range(m))
    vectors = np.array([[float((i // 2) ** 2)] for i in range(m)])
    tried = Candidates(range(m), [(0,) * m, labels, tuple(range(m))], vectors)
    assert [label for _, label in tried.options(0)] == list(range(OPTIONS))
    # From 25, the 16 is 9 off, 36 is 11, 9 is 16, 4 is 21, and 49 and 1 are 24, equal: the first.
    assert [label for _, label in tried.options(10)][:6] == [5, 4, 6, 3, 2, 1]
    assert [label for _, label in tried.options(23)] == [11, 10, 9, 8, 7, 6, 5, 4]


@pytest.mark.parametrize("groupings", [[(0, 0), (0, 1)], [(0,)]])
def test_between_one_group_and_alone_there_may_be_nothing_to_choose(
    groupings: list[tuple[int, ...]],
) -> None:
    tried = Candidates(range(len(groupings[0])), groupings, VECTORS[: len(groupings[0])])
    assert not tried.open_to_change


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
