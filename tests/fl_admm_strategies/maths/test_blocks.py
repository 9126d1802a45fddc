"""Blocks of named arrays, the patterns that choose them, and averages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fl_admm_strategies.maths.blocks import (
    Block,
    compile_pattern,
    matching,
    spec_of,
    weighted_average,
)
from fl_admm_strategies.runtime.messages.records import Reply
from tests.support.refusals import refused

MODEL = {
    "body.weight": np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32),
    "body.bias": np.array([7, 8], dtype=np.float32),
    "count": np.array(9, dtype=np.int64),
    "head.weight": np.array([10.5], dtype=np.float32),
}


def test_a_block_cuts_its_arrays_out_of_a_model_and_back() -> None:
    names = ["body.weight", "head.weight"]
    block = Block(spec_of({name: MODEL[name] for name in names}))
    assert block.names == names
    assert block.size == 7
    vector = block.vector(MODEL)
    assert_array_equal(vector, [1, 2, 3, 4, 5, 6, 10.5])
    assert vector.dtype == np.float32
    vector[0] = -1  # a new vector
    assert MODEL["body.weight"][0, 0] == 1
    arrays = block.arrays(vector)
    assert list(arrays) == names
    assert_array_equal(arrays["body.weight"], [[-1, 2, 3], [4, 5, 6]])
    assert arrays["head.weight"].shape == (1,)


def test_arrays_without_axes_or_numbers_come_back() -> None:
    found = {"scale": np.array(3.0), "empty": np.zeros((0, 3))}
    block = Block(spec_of(found))
    assert block.size == 1
    arrays = block.arrays(block.vector(found))
    assert arrays["scale"] == 3
    assert {name: array.shape for name, array in arrays.items()} == {"scale": (), "empty": (0, 3)}


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float16"], "float32"),  # float16 is too coarse to sum in
        (["float16", "float32"], "float32"),
        (["float32", "float64"], "float64"),
        (["float64"], "float64"),
    ],
)
def test_the_vectors_dtype_is_float32_at_least(dtypes: list[str], expected: str) -> None:
    arrays = {str(i): np.ones(2, dtype=dtype) for i, dtype in enumerate(dtypes)}
    block = Block(spec_of(arrays))
    assert block.vector(arrays).dtype == expected
    own = block.arrays(block.vector(arrays))
    assert [array.dtype for array in own.values()] == dtypes


def test_what_a_block_returns_does_not_change_with_its_source() -> None:
    block = Block(spec_of({"a": np.zeros(2)}))
    matrix = np.array([[1.0, 2.0]])
    arrays = block.arrays(matrix[0])
    views = block.arrays(matrix[0], copy=False)
    matrix[0, 0] = 5
    assert_array_equal(arrays["a"], [1, 2])
    assert_array_equal(views["a"], [5, 2])  # unless it is asked to share


def test_integers_out_of_a_vector_are_rounded() -> None:
    block = Block(spec_of({"count": np.array(0), "mask": np.array([True, False])}))
    arrays = block.arrays(np.array([2.6, 0.6, 0.4]))
    assert arrays["count"] == 3
    assert_array_equal(arrays["mask"], [True, False])


def test_the_optimised_block_is_what_is_trained_less_a_pattern() -> None:
    trained = ["body.weight", "body.bias", "head.weight"]
    assert Block.optimised(MODEL, trained).names == trained
    block = Block.optimised(MODEL, trained, compile_pattern("averaged", "^head"))
    assert block.names == ["body.weight", "body.bias"]
    assert list(block.rest(MODEL)) == ["count", "head.weight"]
    with refused(ValueError, "floating point"):
        Block.optimised(MODEL, [])


# --- Patterns -----------------------------------------------------------------------------------


def choose(pattern: str) -> list[str]:
    compiled = compile_pattern("personal", pattern)
    return matching("personal", compiled, [name for name in MODEL if name != "count"])


def test_a_pattern_is_searched_in_the_names_of_trained_arrays() -> None:
    assert choose("^head") == ["head.weight"]
    assert choose("weight|count") == ["body.weight", "head.weight"]
    assert compile_pattern("personal", None) is None


@pytest.mark.parametrize(
    ("pattern", "found"), [("tail", "none"), ("count", "none"), ("", "all"), ("body|head", "all")]
)
def test_a_pattern_that_separates_nothing_is_refused(pattern: str, found: str) -> None:
    with refused(ValueError, f"personal='{pattern}'", found, "body.weight"):
        choose(pattern)


@pytest.mark.parametrize("pattern", ["(", 3])
def test_something_that_is_no_pattern_is_refused(pattern: Any) -> None:
    with refused(ValueError, "averaged", repr(pattern)):
        compile_pattern("averaged", pattern)


# --- Averages -----------------------------------------------------------------------------------


def test_averages_are_weighted_by_the_examples_and_integers_rounded() -> None:
    # Weights 1/4 and 3/4: 1/4 * 2 + 3/4 * 6 = 5; 1/4 * 1 + 3/4 * 4 = 3.25, rounded 3.
    before = {"mean": np.zeros(1, np.float32), "count": np.array(0, np.int64)}
    replies = {
        4: Reply({"mean": np.array([2], np.float32), "count": np.array(1)}, 10.0, {}),
        7: Reply({"mean": np.array([6], np.float32), "count": np.array(4)}, 30.0, {}),
    }
    after = weighted_average(before, replies)
    assert_array_equal(after["mean"], [5])
    assert after["count"] == 3
    assert {name: array.dtype for name, array in after.items()} == {
        name: array.dtype for name, array in before.items()
    }
    assert after["count"].shape == ()
