"""The sum of all clients' messages, by hand."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from fl_admm_strategies.maths.consensus import Consensus


def test_the_sum_alone_takes_clients_in_and_lets_them_go() -> None:
    consensus = Consensus.start(np.array([2.0, 0.0]))
    assert_array_equal(consensus.total, [0, 0])
    consensus.join(2)
    consensus.add_change(np.array([2.0, 2.0]))
    consensus.aggregate(2)
    assert_array_equal(consensus.w, [3, 1])
    consensus.join(1)
    consensus.aggregate(3)
    assert_array_equal(consensus.w, [3, 1])
    consensus.rebuild([np.array([4.0, 2.0])])  # the messages of those that are left
    consensus.aggregate(1)
    assert_array_equal(consensus.w, [4, 2])


def test_a_restart_sets_all_clients_to_w_with_duals_of_0() -> None:
    consensus = Consensus(np.array([4.0]), np.array([9.0]), np.array([0.0]))
    consensus.restart(5, num_clients=2)
    assert_array_equal(consensus.total, [8])
    starts = [consensus.starting_point(last_accepted) for last_accepted in (0, 5, 6)]
    assert [None if start is None else start.item() for start in starts] == [4, 4, None]
