"""The consensus rule against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from fl_admm_strategies.maths.consensus import Consensus, ConsensusADMM


def vector(*values: float, dtype: Any = np.float64) -> NDArray[Any]:
    return np.array(values, dtype=dtype)


def admm(first: NDArray[Any], *clients: int, rho: float = 2.0, **kwargs: Any) -> ConsensusADMM:
    consensus = ConsensusADMM(first, rho, **kwargs)
    consensus.insert({client: {} for client in clients})
    return consensus


def after_one_round(**kwargs: Any) -> ConsensusADMM:
    """Return clients 0 and 3, rho = 2, from (1, 1), after 3 moved to (4, 0) and 0 sat out.

    pi_3 = 2 ((4, 0) - (1, 1)) = (6, -2), z_3 = (4, 0) + (3, -1) = (7, -1), z_0 = (1, 1), so their
    mean is (4, 0).
    """
    consensus = admm(vector(1, 1), 0, 3, **kwargs)
    consensus.update({3: vector(4, 0)})
    consensus.aggregate()
    assert consensus.primal == pytest.approx(np.sqrt(10))  # |(3, -1)|
    return consensus


def on_clients() -> ConsensusADMM:
    """Return the same round where the clients keep u_i and pi_i."""
    consensus = admm(vector(1, 1), 0, 3, on_clients=True)
    consensus.update({3: vector(6, -2)})  # z_3: (1, 1) to (7, -1)
    consensus.aggregate()
    assert np.isnan(consensus.primal)  # u_3 is not known here
    return consensus


def u(consensus: ConsensusADMM) -> NDArray[Any]:
    return consensus.clients.column("u")


def pi(consensus: ConsensusADMM) -> NDArray[Any]:
    return consensus.clients.column("pi")


def test_it_starts_with_every_client_at_the_first_vector() -> None:
    consensus = admm(vector(1, -2), 0, 1, 2, rho=0.5)
    assert_array_equal(consensus.w, [1, -2])
    assert_array_equal(u(consensus), [[1, -2]] * 3)
    assert_array_equal(pi(consensus), np.zeros((3, 2)))
    assert_array_equal(consensus.mean.total, [3, -6])
    assert_array_equal(consensus.anchor(2), [1, -2])
    consensus.aggregate()  # without a reply it stays
    assert_array_equal(consensus.w, [1, -2])


def test_a_round_by_hand() -> None:
    consensus = after_one_round()
    assert_array_equal(consensus.w, [4, 0])
    assert consensus.dual == pytest.approx(2 * np.sqrt(10))  # rho |(4, 0) - (1, 1)|
    assert_array_equal(pi(consensus), [[0, 0], [6, -2]])
    assert_array_equal(u(consensus), [[1, 1], [4, 0]])
    assert_array_equal(consensus.anchor(0), [4, 0])
    assert_array_equal(consensus.anchor(3), [1, 1])  # (4, 0) - (3, -1)
    # Round 2: both move. pi_0 = 2 ((2, 2) - (4, 0)) = (-4, 4), z_0 = (2, 2) + (-2, 2) = (0, 4);
    # pi_3 = (6, -2) + 2 ((3, 1) - (4, 0)) = (4, 0), z_3 = (3, 1) + (2, 0) = (5, 1).
    consensus.update({0: vector(2, 2)})
    consensus.update({3: vector(3, 1)})
    assert_array_equal(consensus.w, [4, 0])  # not before all replies are in
    consensus.aggregate()
    assert_array_equal(pi(consensus), [[-4, 4], [4, 0]])
    assert_array_equal(consensus.w, [2.5, 2.5])
    # FedAPM (79): sum_i [pi_i + rho (u_i - w)] = 0.
    residual = pi(consensus) + 2 * (u(consensus) - consensus.w)
    assert_allclose(residual.sum(axis=0), 0, atol=1e-15)


def test_the_prox_is_taken_of_the_mean() -> None:
    def shrink(mean: NDArray[Any]) -> NDArray[Any]:  # prox of |.|_1
        return np.sign(mean) * np.maximum(np.abs(mean) - 1, 0)

    consensus = after_one_round(prox=shrink)
    assert_array_equal(consensus.w, [3, 0])
    assert_array_equal(consensus.mean.total, [8, 0])  # the sum itself is not shrunk


def test_clients_with_their_own_duals_give_the_same_w() -> None:
    consensus = on_clients()
    names = ["began_in", "first", "total", "w", "was_replaced"]  # O(d) memory
    assert sorted(consensus.state_arrays()) == sorted(names)
    assert_array_equal(consensus.w, [4, 0])
    assert_array_equal(consensus.anchor(3), [4, 0])  # they know pi_i themselves


def test_a_dual_that_starts_elsewhere_enters_the_mean() -> None:
    # z_0 = (1, 1) + (4, -2)/2 = (3, 0); z_3 = (1, 1).
    consensus = admm(vector(1, 1), 0, 3)
    consensus.set_dual(0, vector(-6, 8))
    consensus.set_dual(0, vector(4, -2))  # the last word counts
    consensus.aggregate()
    assert_array_equal(consensus.w, [2, 0.5])
    assert_array_equal(consensus.anchor(0), [0, 1.5])
    keeping = admm(vector(1, 1), 0, 3, on_clients=True)
    keeping.set_dual(0, vector(4, -2))
    keeping.aggregate()
    assert_array_equal(keeping.w, [2, 0.5])


def test_float32_stays_float32_but_the_sum_is_kept_in_float64() -> None:
    consensus = admm(vector(1, 1, dtype=np.float32), 0, 1, 2, rho=0.1)
    consensus.update({0: vector(2, 3, dtype=np.float32)})
    consensus.aggregate()
    arrays = consensus.state_arrays()
    del arrays["began_in"], arrays["was_replaced"]
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "w": "float32",
        "first": "float32",
        "total": "float64",
        "u": "float32",
        "pi": "float32",
    }
    assert consensus.anchor(0).dtype == np.float32


def test_the_running_sum_is_that_of_the_z_after_many_rounds() -> None:
    rng = np.random.default_rng(0)
    consensus = admm(rng.normal(size=50).astype(np.float32), *range(7), rho=0.3)
    for _ in range(200):
        for client in rng.choice(7, size=3, replace=False):
            consensus.update({int(client): rng.normal(size=50).astype(np.float32)})
        consensus.aggregate()
    z = u(consensus).astype(np.float64) + pi(consensus).astype(np.float64) / 0.3
    # pi_i is a sum of 200 steps in float32 here, which its own last bits limit.
    assert_allclose(consensus.mean.total, z.sum(axis=0), rtol=0, atol=1e-3 * np.abs(z).max())


@pytest.mark.parametrize("keeping", [False, True])
def test_the_state_restores_and_goes_on_to_the_same_bits(keeping: bool) -> None:
    def move(consensus: ConsensusADMM, *values: float) -> None:
        consensus.update({3: vector(*values)})
        consensus.aggregate()

    first = admm(vector(1, 1), 0, 3, on_clients=keeping)
    move(first, 4, 0)
    saved = {name: array.copy() for name, array in first.state_arrays().items()}
    second = admm(vector(0, 0), 0, 3, on_clients=keeping)
    move(first, 5, 5)
    second.load_state_arrays(saved)
    move(second, 5, 5)
    for name, array in first.state_arrays().items():
        assert_array_equal(second.state_arrays()[name], array, err_msg=name)
    move(second, 7, 7)  # what was loaded is a copy
    assert_array_equal(saved["w"], [4, 0] if not keeping else [3, 1])


# --- FedDyn's form: from w, and of the participants' u_i ----------------------------------------

FEDDYN: Any = {"from_w": True, "of_participants": True}


@pytest.mark.parametrize("on_clients", [False, True])
def test_two_rounds_of_the_participants_by_hand(on_clients: bool) -> None:
    # rho = 2, clients 0 and 3, w = (1, 1). Client 3 moves to (4, 0): pi_3/rho = (3, -1), and
    # w = (4, 0) + (3, -1)/2 = (5.5, -.5). Then client 0 moves to (4.5, .5): pi_0/rho = (-1, 1),
    # and w = (4.5, .5) + ((3, -1) + (-1, 1))/2 = (5.5, .5).
    consensus = admm(vector(1, 1), 0, 3, on_clients=on_clients, **FEDDYN)
    consensus.update({3: vector(3, -1) if on_clients else vector(4, 0)})
    consensus.aggregate()
    assert_array_equal(consensus.w, [5.5, -0.5])
    assert_array_equal(consensus.mean.total, [3, -1])
    assert consensus.primal == pytest.approx(np.sqrt(10))
    consensus.update({0: vector(-1, 1) if on_clients else vector(4.5, 0.5)})
    consensus.aggregate()
    assert_array_equal(consensus.w, [5.5, 0.5])
    if not on_clients:
        assert_array_equal(pi(consensus), [[-2, 2], [6, -2]])
        assert "u" not in consensus.clients  # nobody needs it
        # Rebuilt when client 0 leaves: pi_3/rho is left.
        consensus.remove([0], 3)
        assert_array_equal(consensus.mean.total, [3, -1])


def test_with_everybody_the_two_averages_are_one() -> None:
    # mean_i u_i + mean_i pi_i/rho = mean_i z_i.
    rng = np.random.default_rng(0)
    paper, ours = (admm(vector(1, 1), 0, 1, 2, of_participants=one) for one in (False, True))
    for _ in range(5):
        for client in range(3):
            moved = rng.normal(size=2)
            paper.update({client: moved})
            ours.update({client: moved})
        paper.aggregate()
        ours.aggregate()
        assert_allclose(ours.w, paper.w, rtol=1e-13)


def test_what_a_client_that_starts_at_w_is_sent() -> None:
    def sent(consensus: ConsensusADMM, client: int, last: int | None, *, holds: bool) -> Any:
        start, dual = consensus.beginning(
            client, holds_start=False, holds_dual=holds, last_accepted=last
        )
        assert start is None
        return dual if dual is None else dual.tolist()

    here = admm(vector(1, 1), 0, 3, **FEDDYN)
    here.update({3: vector(4, 0)})
    here.aggregate()
    assert_array_equal(here.anchor(3), here.w)
    assert sent(here, 3, 1, holds=True) is None
    assert sent(here, 3, 1, holds=False) == [6, -2]
    assert sent(here, 0, 0, holds=False) == [0, 0]
    there = admm(vector(1, 1), 0, 3, on_clients=True, **FEDDYN)
    assert sent(there, 0, 0, holds=False) == []
    assert sent(there, 7, None, holds=False) == []  # it joins
    assert sent(there, 3, 1, holds=False) is None  # nobody else has it
    there.restart(5, num_clients=2)
    assert_array_equal(there.mean.total, [0, 0])
    assert sent(there, 3, 1, holds=True) == []


# --- Clients that lost what they keep, that come and that leave ---------------------------------


def starting(consensus: Consensus, *rounds: int) -> list[bool]:
    return [consensus.starting_point(last_accepted) is not None for last_accepted in rounds]


def test_a_restart_sets_everybody_to_w_with_duals_of_0() -> None:
    # What is left of a z_i that its client has lost: w = (4, 0) stays, and with it the start.
    consensus = on_clients()
    assert starting(consensus.mean, 0, 1) == [True, False]
    consensus.restart(5, num_clients=2)
    assert_array_equal(consensus.w, [4, 0])
    assert_array_equal(consensus.mean.starting_point(5), [4, 0])
    assert starting(consensus.mean, 0, 4, 5, 6) == [True, True, True, False]
    consensus.update({0: vector(2, 2)})  # z_0: (4, 0) to (6, 2), so the mean is (5, 1)
    consensus.aggregate()
    assert_array_equal(consensus.w, [5, 1])


def test_what_a_client_is_sent_to_start_from() -> None:
    def sent(consensus: ConsensusADMM, client: int, last: int | None, *, holds: bool) -> Any:
        start, dual = consensus.beginning(
            client, holds_start=holds, holds_dual=False, last_accepted=last
        )
        assert dual is None
        return start if start is None else start.tolist()

    consensus = after_one_round()
    assert sent(consensus, 3, 1, holds=True) is None
    assert sent(consensus, 3, 1, holds=False) == [4, 0]  # u_3
    assert sent(consensus, 0, 0, holds=False) == [1, 1]
    keeping = on_clients()
    assert sent(keeping, 3, 1, holds=False) is None  # nobody else has it
    assert sent(keeping, 0, 0, holds=False) == [1, 1]  # u_0^0
    assert sent(keeping, 7, None, holds=False) == [4, 0]  # it joins
    keeping.restart(5, num_clients=2)
    assert sent(keeping, 3, 1, holds=True) == [4, 0]


def test_a_new_client_by_hand() -> None:
    consensus = after_one_round()  # w = (4, 0), z_0 = (1, 1), z_3 = (7, -1)
    consensus.add_pending({2: {}})
    assert_array_equal(consensus.anchor(2), [4, 0])  # while it is asked, it has u = w and pi = 0
    assert len(consensus.clients) == 2
    consensus.insert({2: {}})  # between the two, with u = (4, 0), pi = 0, z = (4, 0)
    assert_array_equal(u(consensus), [[1, 1], [4, 0], [4, 0]])
    assert_array_equal(pi(consensus), [[0, 0], [0, 0], [6, -2]])
    consensus.aggregate()
    assert_array_equal(consensus.w, [4, 0])  # it leaves the mean as it is
    # Its first round: pi = 2 ((6, 3) - (4, 0)) = (4, 6), z = (6, 3) + (2, 3) = (8, 6); the mean of
    # (1, 1), (8, 6), (7, -1) is (16, 6)/3.
    consensus.update({2: vector(6, 3)})
    consensus.aggregate()
    assert_allclose(consensus.w, [16 / 3, 2], rtol=1e-15)


def test_a_client_that_left_by_hand() -> None:
    consensus = after_one_round()
    consensus.insert({5: {}, 7: {}})
    consensus.remove([0, 7], 3)
    assert_array_equal(u(consensus), [[4, 0], [4, 0]])
    assert_array_equal(pi(consensus), [[6, -2], [0, 0]])
    assert_array_equal(consensus.w, [4, 0])
    consensus.aggregate()
    assert_array_equal(consensus.w, [5.5, -0.5])  # of z_3 = (7, -1) and (4, 0)


def test_clients_that_keep_their_duals_come_and_go() -> None:
    consensus = on_clients()
    consensus.insert({5: {}})
    consensus.update({5: vector(4, 6)})  # z_5 from (4, 0) to (8, 6)
    consensus.aggregate()
    assert_allclose(consensus.w, [16 / 3, 2], rtol=1e-15)
    # Nobody knows z_0 but the client, which is gone: the other two start from w.
    consensus.remove([0], 7)
    assert consensus.clients.ids == [3, 5]
    assert starting(consensus.mean, 7) == [True]
    consensus.update({3: vector(2, 2)})
    consensus.aggregate()
    assert_allclose(consensus.w, [16 / 3 + 1, 3], rtol=1e-15)


def test_the_sum_alone_takes_clients_in_and_lets_them_go() -> None:
    # FLAME's and Lp-Proj's: they know the messages themselves.
    consensus = Consensus.start(vector(2, 0))
    assert_array_equal(consensus.total, [0, 0])
    consensus.join(2)
    consensus.add_change(vector(2, 2))
    consensus.aggregate(2)
    assert_array_equal(consensus.w, [3, 1])
    consensus.join(1)
    consensus.aggregate(3)
    assert_array_equal(consensus.w, [3, 1])
    consensus.rebuild([np.array([4.0, 2.0])])  # the messages of those that are left
    consensus.aggregate(1)
    assert_array_equal(consensus.w, [4, 2])


# --- Another w than the method's own --------------------------------------------------------------


@pytest.mark.parametrize("of_participants", [True, False])
def test_another_w_is_what_other_uploads_would_have_led_to(of_participants: bool) -> None:
    # Three clients of four. w = mean u_i + (sum of pi_i/rho)/4, and every u_i enters the latter as
    # u_i - w: shifting the three by s shifts w by s (1 + 3/4). Of the z_i, w is the mean of all
    # four, and a u_i enters its z_i twice: w shifts by 2 s 3/4.
    rng = np.random.default_rng(0)
    shift, uploads = rng.normal(size=5), rng.normal(size=(3, 5))
    factor = 1 + 3 / 4 if of_participants else 2 * 3 / 4
    found = []
    for by_w in (True, False):
        consensus = ConsensusADMM(np.zeros(5), rho=0.5, of_participants=of_participants)
        consensus.insert({client: {} for client in range(4)})
        for client, upload in enumerate(uploads):
            consensus.update({client: upload + (0 if by_w else shift)})
        consensus.aggregate()
        if by_w:
            consensus.adopt(consensus.w + factor * shift, 3)
        found.append((consensus.w, consensus.mean.total))
    for actual, expected in zip(*found, strict=True):
        assert_allclose(actual, expected, atol=1e-12)


def test_what_another_w_brought_into_the_sum_outlives_its_rebuilding_and_a_client() -> None:
    def consensus() -> ConsensusADMM:
        made = ConsensusADMM(np.zeros(2), rho=1.0, of_participants=True)
        made.insert({client: {} for client in range(3)})
        for client, upload in enumerate(np.eye(3)[:, :2]):
            made.update({client: upload})
        made.aggregate()
        return made

    plain, changed = consensus(), consensus()
    changed.adopt(changed.w + 6.0, 3)  # 6 m k/(m + k) = 6 * 3/2 = 9 in the sum
    changed.aggregate(anew=True)
    plain.aggregate(anew=True)
    assert_allclose(changed.mean.total - plain.mean.total, 9)
    restored = consensus()
    restored.load_state_arrays(changed.state_arrays())
    for one in (plain, changed, restored):
        one.remove([0], 2)
    assert_allclose(changed.mean.total - plain.mean.total, 9)
    assert_array_equal(restored.mean.total, changed.mean.total)


def test_before_the_first_round_another_w_is_another_start() -> None:
    consensus = Consensus.start(np.zeros(2), of_participants=True)
    consensus.adopt(np.ones(2), 3, 0)
    assert_array_equal(consensus.w, 1)
    assert_array_equal(consensus.total, 0)
