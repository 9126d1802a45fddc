"""Means over clients: nobody's word, and nobody's silence, counts for more than its share."""

from __future__ import annotations

import math

import pytest

from fl_admm_strategies.runtime.messages.records import Reply
from fl_admm_strategies.runtime.trust.means import weighted_means, without_extremes


def reply(num_examples: float, **metrics: float) -> Reply:
    return Reply({}, num_examples, metrics)


def test_means_are_weighted_by_the_examples() -> None:
    # (1 * 0 + 3 * 2) / 4 = 1.5
    assert weighted_means({1: reply(1.0, loss=0.0), 2: reply(3.0, loss=2.0)}) == {"loss": 1.5}


@pytest.mark.parametrize("said", [{}, {"loss": math.nan}, {"loss": math.inf}])
def test_a_metric_that_one_leaves_out_is_the_mean_of_the_others(said: dict[str, float]) -> None:
    replies = {1: reply(1.0, loss=0.0), 2: reply(3.0, loss=2.0), 3: reply(5.0, **said)}
    assert weighted_means(replies) == {"loss": 1.5, "loss-clients": 2}


def test_what_nobody_can_say_is_no_number() -> None:
    means = weighted_means({1: reply(1.0, loss=math.inf), 2: reply(1.0, loss=-math.inf)})
    assert math.isnan(means["loss"])
    assert means["loss-clients"] == 0


def test_what_one_client_alone_reports_is_no_mean() -> None:
    replies = {client: reply(1.0, loss=1.0) for client in range(3)}
    replies[0] = reply(1.0, loss=1.0, own=5.0)
    assert weighted_means(replies) == {"loss": 1.0}
    assert weighted_means({0: replies[0]}) == {"loss": 1.0, "own": 5.0}
    many = {client: reply(1.0, **({"own": 1.0} if client < 3 else {})) for client in range(31)}
    assert weighted_means(many) == {}


def test_nobody_has_more_than_ten_times_the_median_of_the_examples() -> None:
    # The median of 4, 6, 6, 2^53 is 6, so the last counts as 60: (16 * 0.5 + 60 * 1) / 76.
    sizes = {1: 4.0, 2: 6.0, 3: 6.0}
    replies = {client: reply(size, accuracy=0.5) for client, size in sizes.items()}
    replies[4] = reply(2.0**53, accuracy=1.0)
    assert weighted_means(replies)["accuracy"] == pytest.approx((8 + 60) / 76)


def test_a_tenth_at_either_end_is_held_to_the_next() -> None:
    values = [5.0, 1.0, 2.0, 1e300, 3.0]
    held = without_extremes({c: {"x": value} for c, value in enumerate(values)})
    assert [held[c]["x"] for c in range(5)] == [5.0, 2.0, 2.0, 5.0, 3.0]
    many = without_extremes({c: {"x": float(c)} for c in range(20)})  # two of twenty
    assert [many[c]["x"] for c in (0, 1, 2, 17, 18, 19)] == [2.0, 2.0, 2.0, 17.0, 17.0, 17.0]


def test_of_two_nobody_knows_which_is_extreme() -> None:
    clients = {1: {"x": 0.0}, 2: {"x": 1e300}}
    assert without_extremes(clients) == clients
    with_nan = without_extremes({**clients, 3: {"x": math.nan}, 4: {}})
    assert with_nan[2] == {"x": 1e300}
