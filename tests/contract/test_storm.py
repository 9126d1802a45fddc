"""Extreme replies, alone and in blocks, joins and leaves: no exception, a finite state."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.cases import CASES, Case, each_case
from tests.support.storm import Storm

pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)

REPLIES = 1_000_000  # of the long test, over all cases


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("flwr").setLevel(logging.INFO)


@each_case
def test_a_storm_leaves_a_finite_state(case: Case) -> None:
    storm = Storm(case, seed=len(case.name))
    for server_round in range(1, 9):
        storm.round(server_round)
    assert storm.accepted > 0
    storm.check_saving()


@pytest.mark.long
@each_case
def test_a_long_storm_leaves_a_finite_state(case: Case) -> None:
    sent = seed = accepted = 0
    while sent < REPLIES / len(CASES):
        storm = Storm(case, seed)
        for server_round in range(1, 101):
            storm.round(server_round)
        storm.check_saving()
        sent, seed, accepted = sent + storm.sent, seed + 1, accepted + storm.accepted
    print(f"{case.name}: {sent:,} replies in {seed} runs, {accepted:,} used")
    assert accepted > 0.1 * sent
