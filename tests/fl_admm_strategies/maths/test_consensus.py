"""The consensus rule against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fl_admm_strategies.maths.consensus import Consensus


def vector(*values: float, dtype: Any = np.float64) -> np.ndarray:
    return np.array(values, dtype=dtype)


def after_one_round(**kwargs: Any) -> Consensus:
    """Return m = 2, rho = 2, from (1, 1), after client 1 moved to (4, 0) and client 0 sat out.

    pi_1 = 2 ((4, 0) - (1, 1)) = (6, -2), z_1 = (4, 0) + (3, -1) = (7, -1), z_0 = (1, 1), so their
    mean is (4, 0).
    """
    consensus = Consensus(vector(1, 1), 2, 2.0, **kwargs)
    assert consensus.update(1, vector(4, 0)) == pytest.approx(np.sqrt(10))  # |(3, -1)|
    consensus.aggregate()
    return consensus


def test_it_starts_with_every_client_at_the_first_vector() -> None:
    consensus = Consensus(vector(1, -2), 3, 0.5)
    assert_array_equal(consensus.w, [1, -2])
    assert_array_equal(consensus.iterates, [[1, -2]] * 3)
    assert_array_equal(consensus.duals, np.zeros((3, 2)))
    assert_array_equal(consensus.total, [3, -6])
    assert_array_equal(consensus.anchor(2), [1, -2])
    consensus.aggregate()  # without a reply it stays
    assert_array_equal(consensus.w, [1, -2])


def test_a_round_by_hand() -> None:
    consensus = after_one_round()
    assert_array_equal(consensus.w, [4, 0])
    assert_array_equal(consensus.duals, [[0, 0], [6, -2]])
    assert_array_equal(consensus.iterates, [[1, 1], [4, 0]])
    assert_array_equal(consensus.anchor(0), [4, 0])
    assert_array_equal(consensus.anchor(1), [1, 1])  # (4, 0) - (3, -1)
    # Round 2: both move. pi_0 = 2 ((2, 2) - (4, 0)) = (-4, 4), z_0 = (2, 2) + (-2, 2) = (0, 4);
    # pi_1 = (6, -2) + 2 ((3, 1) - (4, 0)) = (4, 0), z_1 = (3, 1) + (2, 0) = (5, 1).
    consensus.update(0, vector(2, 2))
    consensus.update(1, vector(3, 1))
    assert_array_equal(consensus.w, [4, 0])  # not before all replies are in
    consensus.aggregate()
    assert_array_equal(consensus.duals, [[-4, 4], [4, 0]])
    assert_array_equal(consensus.w, [2.5, 2.5])
    # FedAPM (79): sum_i [pi_i + rho (u_i - w)] = 0.
    residual = consensus.duals + 2 * (consensus.iterates - consensus.w)
    assert_allclose(residual.sum(axis=0), 0, atol=1e-15)


def test_the_prox_is_taken_of_the_mean() -> None:
    def shrink(mean: np.ndarray) -> np.ndarray:  # prox of |.|_1
        return np.sign(mean) * np.maximum(np.abs(mean) - 1, 0)

    consensus = after_one_round(prox=shrink)
    assert_array_equal(consensus.w, [3, 0])
    assert_array_equal(consensus.total, [8, 0])  # the sum itself is not shrunk


def test_messages_of_clients_with_their_own_duals_give_the_same_w() -> None:
    consensus = Consensus(vector(1, 1), 2, 2.0, on_clients=True)
    assert consensus.iterates.size == consensus.duals.size == 0  # O(d) memory
    consensus.update_message(vector(6, -2))  # z_1: (1, 1) to (7, -1)
    consensus.aggregate()
    assert_array_equal(consensus.w, [4, 0])


def test_a_dual_that_starts_elsewhere_enters_the_mean() -> None:
    # z_0 = (1, 1) + (4, -2)/2 = (3, 0); z_1 = (1, 1).
    consensus = Consensus(vector(1, 1), 2, 2.0)
    consensus.set_dual(0, vector(-6, 8))
    consensus.set_dual(0, vector(4, -2))  # the last word counts
    consensus.aggregate()
    assert_array_equal(consensus.w, [2, 0.5])
    assert_array_equal(consensus.anchor(0), [0, 1.5])


def test_float32_stays_float32_but_the_sum_is_kept_in_float64() -> None:
    consensus = Consensus(vector(1, 1, dtype=np.float32), 3, 0.1)
    consensus.update(0, vector(2, 3, dtype=np.float32))
    consensus.aggregate()
    arrays = consensus.state_arrays()
    del arrays["began_in"]
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "w": "float32",
        "first": "float32",
        "total": "float64",
        "iterates": "float32",
        "duals": "float32",
    }
    assert consensus.anchor(0).dtype == np.float32


def test_the_running_sum_is_that_of_the_z_after_many_rounds() -> None:
    rng = np.random.default_rng(0)
    consensus = Consensus(rng.normal(size=50).astype(np.float32), 7, 0.3)
    for _ in range(200):
        for index in rng.choice(7, size=3, replace=False):
            consensus.update(index, rng.normal(size=50).astype(np.float32))
        consensus.aggregate()
    z = consensus.iterates.astype(np.float64) + consensus.duals.astype(np.float64) / 0.3
    # pi_i is a sum of 200 steps in float32 here, which its own last bits limit.
    assert_allclose(consensus.total, z.sum(axis=0), rtol=0, atol=1e-3 * np.abs(z).max())


@pytest.mark.parametrize("on_clients", [False, True])
def test_the_state_restores_and_goes_on_to_the_same_bits(on_clients: bool) -> None:
    def move(consensus: Consensus, *values: float) -> None:
        if on_clients:
            consensus.update_message(vector(*values))
        else:
            consensus.update(1, vector(*values))
        consensus.aggregate()

    first = Consensus(vector(1, 1), 2, 2.0, on_clients=on_clients)
    move(first, 4, 0)
    saved = {name: array.copy() for name, array in first.state_arrays().items()}
    second = Consensus(vector(0, 0), 2, 2.0, on_clients=on_clients)
    move(first, 5, 5)
    second.load_state_arrays(saved)
    move(second, 5, 5)
    for name, array in first.state_arrays().items():
        assert_array_equal(second.state_arrays()[name], array, err_msg=name)
    move(second, 7, 7)  # what was loaded is a copy
    assert_array_equal(saved["w"], [4, 0] if not on_clients else [3, 1])


def test_a_restart_sets_everybody_to_w_with_duals_of_0() -> None:
    # What is left of a z_i that its client has lost: w = (4, 0) stays, and with it the start.
    consensus = Consensus(vector(1, 1), 2, 2.0, on_clients=True)
    assert [consensus.starts(accepted_in) for accepted_in in (0, 1)] == [True, False]
    consensus.update_message(vector(6, -2))
    consensus.aggregate()
    consensus.restart(5)
    assert_array_equal(consensus.w, [4, 0])
    assert_array_equal(consensus.first, [4, 0])
    assert [consensus.starts(r) for r in (0, 4, 5, 6)] == [True, True, True, False]
    consensus.update_message(vector(2, 2))  # z_0: (4, 0) to (6, 2), so the mean is (5, 1)
    consensus.aggregate()
    assert_array_equal(consensus.w, [5, 1])


def test_a_new_client_by_hand() -> None:
    consensus = after_one_round()  # w = (4, 0), z_0 = (1, 1), z_1 = (7, -1)
    consensus.add([1])  # between the two, with u = (4, 0), pi = 0, z = (4, 0)
    assert_array_equal(consensus.iterates, [[1, 1], [4, 0], [4, 0]])
    assert_array_equal(consensus.duals, [[0, 0], [0, 0], [6, -2]])
    consensus.aggregate()
    assert_array_equal(consensus.w, [4, 0])  # it leaves the mean as it is
    # Its first round: pi = 2 ((6, 3) - (4, 0)) = (4, 6), z = (6, 3) + (2, 3) = (8, 6); the mean of
    # (1, 1), (8, 6), (7, -1) is (16, 6)/3.
    consensus.update(1, vector(6, 3))
    consensus.aggregate()
    assert_allclose(consensus.w, [16 / 3, 2], rtol=1e-15)


def test_a_client_that_left_by_hand() -> None:
    consensus = after_one_round()
    consensus.add([2, 2])
    consensus.remove([0, 3])
    assert_array_equal(consensus.iterates, [[4, 0], [4, 0]])
    assert_array_equal(consensus.duals, [[6, -2], [0, 0]])
    assert_array_equal(consensus.w, [4, 0])
    consensus.aggregate()
    assert_array_equal(consensus.w, [5.5, -0.5])  # of z_1 = (7, -1) and (4, 0)


def test_clients_that_keep_their_duals_come_and_go() -> None:
    consensus = Consensus(vector(1, 1), 2, 2.0, on_clients=True)
    consensus.update_message(vector(6, -2))  # z_1 from (1, 1) to (7, -1)
    consensus.aggregate()
    consensus.add([2])
    consensus.update_message(vector(4, 6))  # z_2 from (4, 0) to (8, 6)
    consensus.aggregate()
    assert_allclose(consensus.w, [16 / 3, 2], rtol=1e-15)
    # Nobody knows z_0 but the client, which is gone: the other two start from w.
    consensus.restart(7, left=1)
    assert consensus.num_clients == 2
    assert consensus.starts(7)
    consensus.update_message(vector(2, 2))
    consensus.aggregate()
    assert_allclose(consensus.w, [16 / 3 + 1, 3], rtol=1e-15)
