"""Every helper that compares can say both yes and no."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.support.cases import CHEAP, grid_of, run
from tests.support.federation import (
    Mean,
    assert_close,
    assert_equal_to_rounding,
    assert_same_bits,
    assert_same_runs,
    differs,
)
from tests.support.refusals import names, refused, warnings_in

STATE = {"w": np.array([1.0, np.nan]), "round": np.array(3)}
OTHERS = [
    {**STATE, "w": np.array([1.0 + 1e-15, np.nan])},
    {**STATE, "w": np.array([1.0, np.nan], np.float32)},
    {**STATE, "w": np.array([[1.0, np.nan]])},
    {**STATE, "w": np.array([1.0, 0.0])},
    {**STATE, "more": np.array(0)},
    {"w": STATE["w"]},
]


def test_a_state_with_a_nan_has_its_own_bits() -> None:
    again = {name: array.copy() for name, array in STATE.items()}
    assert not differs(STATE, again)
    assert_same_bits(STATE, again)


@pytest.mark.parametrize("other", OTHERS)
def test_another_value_type_shape_or_name_is_a_difference(other: dict[str, np.ndarray]) -> None:
    for one, two in ((STATE, other), (other, STATE)):
        assert differs(one, two)
        with pytest.raises(AssertionError):
            assert_same_bits(one, two)


def test_a_run_is_the_same_as_another_only_with_its_state_and_its_measurements() -> None:
    first, again, other = (run(CHEAP, grid_of(CHEAP), 1, Mean(seed=seed)) for seed in (1, 1, 2))
    assert_same_runs(first, again)
    with pytest.raises(AssertionError):
        assert_same_runs(first, other)
    again.train_metrics[1][0]["loss"] += 1e-9
    with pytest.raises(AssertionError):
        assert_same_runs(first, again)


def test_to_rounding_is_neither_the_bit_nor_another_run() -> None:
    first, near, other = (run(CHEAP, grid_of(CHEAP), 1, Mean(seed=seed)) for seed in (1, 1, 2))
    near.state.model["w"] += np.float32(1e-6)
    near.train_metrics[1][0]["loss"] += 1e-9
    assert differs(near.state_dict(), first.state_dict())
    assert_equal_to_rounding(near, first)
    with pytest.raises(AssertionError):
        assert_equal_to_rounding(other, first)
    near.train_metrics[1].pop(0)
    with pytest.raises(AssertionError):
        assert_equal_to_rounding(near, first)
    state = {"w": np.ones(2)}
    assert_close({"w": np.ones(2) + 1e-5}, state)
    for unlike in ({"w": np.ones(2) + 0.1}, {"v": np.ones(2)}):
        with pytest.raises(AssertionError):
            assert_close(unlike, state)


def test_a_word_is_named_only_as_a_whole() -> None:
    assert names("client 12 refused, rho is -1.", "client 12", -1)
    assert not names("client 12 refused", "client 1")
    assert not names("rho is 1.5", 1)
    assert not names("client 12 refused", "client 12", "rho")


def test_an_error_is_refused_only_of_its_class_and_with_all_that_it_must_name() -> None:
    def fail() -> None:
        raise ValueError("rho is -1, expected a number > 0.")

    with refused(ValueError, "rho", -1):
        fail()
    with pytest.raises(AssertionError), refused(ValueError, "lam"):
        fail()
    with pytest.raises(ValueError, match="rho"), refused(TypeError, "rho"):
        fail()
    with pytest.raises(pytest.fail.Exception), refused(ValueError):
        pass


def test_only_warnings_that_name_the_words_are_found() -> None:
    levels = {"client 1 refused": logging.WARNING, "client 1 trained": logging.INFO}
    records = [
        logging.LogRecord("flwr", level, "", 0, text, (), None) for text, level in levels.items()
    ]
    assert warnings_in(records, "client 1") == ["client 1 refused"]
    assert not warnings_in(records, "client 2")
