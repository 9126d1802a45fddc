"""The bound on an upload's distance from what its client was sent."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.records import ClientInstruction, Reply
from fl_admm_strategies.runtime.trust.limit import FACTOR, FAR, UploadLimit
from fl_admm_strategies.runtime.uploads import Altered


def reply(**arrays: Any) -> Reply:
    named = {name: np.asarray(array) for name, array in arrays.items()}
    return Reply(named, 10.0, {"loss": 1.0})


def limit(max_norm: Any, *, num_clients: int = 9, **options: Any) -> UploadLimit:
    """Return a bound of a run of so many clients."""
    of: Any = SimpleNamespace(
        membership=range(num_clients), upload_reference=lambda sent: sent.groups["model"]
    )
    return UploadLimit(of, max_norm, **options)


def hold(bound: UploadLimit, replies: dict[int, Reply], reference: Arrays | None = None) -> Altered:
    asked = ClientInstruction({"model": reference or {}})
    return bound.apply(4, {client: replace(one, sent=asked) for client, one in replies.items()})


def clipped(held: Altered) -> list[int]:
    return [client for client, one in held.replies.items() if one.altered]


def moved(*norms: float) -> dict[int, Reply]:
    return {client: reply(w=np.array([norm, 0.0])) for client, norm in enumerate(norms)}


def test_an_upload_is_scaled_back_to_the_sphere_around_what_was_sent() -> None:
    reference = {"w": np.array([1.0, 1.0], np.float32), "b": np.array(2.0)}
    near = reply(w=np.array([1.0, 2.0], np.float32), b=np.array(2.0))
    far = reply(w=np.array([1.0, 7.0], np.float32), b=np.array(-6.0))  # 10 away
    held = hold(bound := limit(2.5), {3: near, 5: far}, reference)
    assert held.replies[3].arrays is near.arrays  # not a bit of it is changed
    assert_allclose(held.replies[5].arrays["w"], [1.0, 2.5])
    assert_allclose(held.replies[5].arrays["b"], 0.0)
    assert [a.dtype for a in held.replies[5].arrays.values()] == [np.float32, np.float64]
    assert held.replies[5].num_examples == 10.0
    assert held.replies[5].metrics == far.metrics
    assert (clipped(held), held.refused) == ([5], {})
    assert bound.measured() == {"clipped": 1, "norm-bound": 2.5}


def test_it_is_refused_by_name_where_that_is_asked_for() -> None:
    held = hold(bound := limit(2, clips=False), moved(1.0, 5.0))
    assert list(held.replies) == [0]
    assert held.refused == {1: "its upload is 5 from what it was sent, the bound is 2"}
    assert clipped(held) == []
    assert bound.measured() == {"refused": 1, "norm-bound": 2.0}


def test_integers_are_not_counted_and_move_with_the_others() -> None:
    reference = {"w": np.zeros(2), "steps": np.array(100)}
    counted = reply(w=np.array([1.0, 0.0]), steps=np.array(180))
    held = hold(limit(2.0), {0: counted}, reference)
    assert held.replies[0].arrays is counted.arrays
    far = reply(w=np.array([8.0, 0.0]), steps=np.array(180))
    held = hold(limit(2.0), {0: far}, reference)
    assert held.replies[0].arrays["steps"] == 120
    assert held.replies[0].arrays["steps"].dtype == far.arrays["steps"].dtype


def test_what_has_no_counterpart_is_measured_from_0() -> None:
    reference = {"w": np.ones(2), "dual": np.ones(7)}
    held = hold(limit(1.0), {0: reply(w=np.ones(2), dual=np.full(4, 2.0))}, reference)
    assert_array_equal(held.replies[0].arrays["w"], np.ones(2))
    assert_allclose(held.replies[0].arrays["dual"], 0.5)  # of norm 1


# --- Without a max_norm ---------------------------------------------------------------------------


def accepted(bound: UploadLimit, *norms: float) -> list[int]:
    return list(hold(bound, moved(*norms)).replies)


def test_what_is_far_beyond_the_others_is_refused() -> None:
    bound = limit(None)
    assert accepted(bound, 1.0, 2.0, 0.9 * FAR, 3.0) == [0, 1, 2, 3]
    assert bound.measured() == {}
    assert accepted(bound, 1.0, 2.0, 2.1 * FAR, 3.0) == [0, 1, 3]  # the median is 2
    assert bound.measured() == {"refused": 1, "norm-bound": 2.0 * FAR}


def test_the_bound_of_outliers_holds_on_to_the_largest_median() -> None:
    """Late in a run most hardly move, but a client that joins has its whole way before it."""
    bound = limit(None)
    accepted(bound, 1.0, 1.0, 1.0)
    for _ in range(40):
        accepted(bound, 1e-6, 1e-6, 1e-6)
    assert accepted(bound, 1e-6, 1e-6, 5.0) == [0, 1, 2]
    assert accepted(bound, 1e-6, 1e-6, 1.01 * FAR) == [0, 1]


def test_nobody_is_far_from_one_other_and_nobody_from_those_at_rest() -> None:
    assert accepted(limit(None), 1.0, 1e9) == [0, 1]
    assert accepted(limit(None), 0.0, 0.0, 1.0) == [0, 1, 2]


@pytest.mark.parametrize(("num_clients", "expected"), [(4, [0, 1, 2]), (5, [0, 1])])
def test_nobody_is_far_from_three_others(num_clients: int, expected: list[int]) -> None:
    """Of so few clients one may well differ from the others by that much."""
    held = hold(limit(None, num_clients=num_clients), moved(1.0, 1.0, 1e3))
    assert list(held.replies) == expected
    assert all("max_norm=math.inf" in reason for reason in held.refused.values())


def test_a_round_in_which_all_move_further_counts() -> None:
    bound = limit(None)
    for _ in range(20):
        accepted(bound, 1.0, 1.0, 1.0)
    assert accepted(bound, 100.0, 110.0) == [0, 1]
    assert accepted(bound, 100.0, 1200.0) == [0]


def test_infinity_is_no_bound() -> None:
    assert accepted(limit(math.inf), 1.0, 1.0, 1e12) == [0, 1, 2]


@pytest.mark.parametrize("max_norm", [None, "auto"])
@pytest.mark.parametrize("norms", [[1.0, 2.0], [3.0, 3.0, 3.0], [7.0] * 60])
def test_a_bound_goes_on_from_its_state(norms: list[float], max_norm: Any) -> None:
    bound, other = limit(max_norm, clips=False), limit(max_norm, clips=False)
    hold(bound, moved(*norms))
    other.load_state_arrays(bound.state_arrays())
    for more in ([1.0, 80.0], [1e-3] * 60, [69.0], [7100.0]):
        assert accepted(other, *more) == accepted(bound, *more)
        assert other.measured() == bound.measured()


# --- "auto" ---------------------------------------------------------------------------------------


def test_the_bound_is_a_multiple_of_the_running_median() -> None:
    bound = limit("auto")
    held = hold(bound, moved(1.0, 1.1, 0.9, 1e12, 1.2))  # its own round is known
    assert clipped(held) == [3]
    assert bound.measured()["norm-bound"] == pytest.approx(FACTOR * 1.1)
    for _ in range(3):  # a round in which everybody lies is judged by those before
        assert clipped(hold(bound, moved(1e12))) == [0]
    assert bound.measured()["norm-bound"] <= FACTOR * 1.2


def test_it_follows_when_all_move_further_and_when_all_come_to_rest() -> None:
    bound = limit("auto", clips=False)
    for _ in range(10):
        hold(bound, moved(*[1.0] * 5))
    for _ in range(40):
        accepted = len(hold(bound, moved(*[10.0] * 5)).replies)
    assert accepted == 5
    for _ in range(20):
        hold(bound, moved(*[0.01] * 5))
    assert bound.measured()["norm-bound"] == pytest.approx(FACTOR * 0.01)


def test_where_most_do_not_move_nobody_may_until_most_do() -> None:
    bound = limit("auto", clips=False)
    for _ in range(10):
        assert hold(bound, moved(0.0, 0.0, 0.0, 0.0, 1e12)).replies.keys() == {0, 1, 2, 3}
    assert bound.measured() == {"refused": 1, "norm-bound": 0.0}
    for _ in range(10):
        accepted = hold(bound, moved(1.0, 1.0, 1.0, 1.0, 1e12)).replies.keys()
    assert accepted == {0, 1, 2, 3}
    assert clipped(hold(limit("auto"), moved(0.0, 0.0))) == []


def test_a_state_without_a_bound_starts_with_none() -> None:
    assert limit(2.0).state_arrays() == {}
    bound = limit("auto")
    bound.load_state_arrays({})  # of a run without a bound
    assert clipped(hold(bound, moved(5.0))) == []
