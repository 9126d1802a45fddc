"""Rounding on the way: what is reduced, what is not, what cannot be read."""

from __future__ import annotations

import numpy as np
import pytest

from fl_admm_strategies.runtime.messages.changes import changes_of
from fl_admm_strategies.runtime.messages.records import split_groups
from fl_admm_strategies.runtime.messages.wire import (
    FULL_DTYPES,
    WIRE_DTYPE,
    OutOfRangeError,
    Reduction,
    reduced,
)
from tests.support.refusals import refused


def test_only_32_and_64_bits_are_reduced() -> None:
    for dtype in ("float32", "float64"):
        assert reduced("x", np.ones(2, dtype), "float16").dtype == np.float16
    for dtype in ("float16", "int64", "bool"):
        array = np.ones(2, dtype)
        assert reduced("x", array, "float16") is array


def test_the_ends_of_the_range() -> None:
    assert reduced("x", np.array([65504.0, -65504.0]), "float16").tolist() == [65504, -65504]
    with refused(OutOfRangeError, "x", "6.56e+04", "float16"):
        reduced("x", np.array([1.0, 65600.0]), "float16")
    # What is no number is refused where it arrives, as without the wire's dtype.
    assert np.isnan(reduced("x", np.array([np.nan]), "float16")).all()
    assert np.isinf(reduced("x", np.array([np.inf], np.float32), "float16")).all()


def test_a_message_comes_back_in_its_dtypes_and_what_all_get_is_reduced_once() -> None:
    w, count = np.array([0.1, 0.2]), np.array(3)
    reduce = Reduction("float16", {"mean"})
    mean = np.array([1e6], np.float32)
    (first, config), (second, _) = (
        reduce({"anchor": {"w": w, "count": count, "mean": mean}, "start": {"w": w}})
        for _ in range(2)
    )
    assert first["anchor"]["w"] is second["anchor"]["w"]
    assert (first["start"]["w"] is w, first["anchor"]["mean"] is mean) == (True, True)
    flat = [array for arrays in first.values() for array in arrays.values()]
    config["groups"] = '{"anchor":["w","count","mean"],"start":["w"]}'
    read = split_groups(flat, config)
    assert read["anchor"]["w"].dtype == np.float64
    assert read["anchor"]["w"].tolist() == w.astype(np.float16).tolist()
    assert read["anchor"]["count"] is count


@pytest.mark.parametrize("text", ["[", "3", '["f4"]', '["f4","O"]', '["f4",[]]'])
def test_dtypes_that_cannot_be_read_are_refused(text: str) -> None:
    config = {"groups": '{"anchor":["v","w"]}', FULL_DTYPES: text}
    with refused(ValueError, "full-dtypes"):
        split_groups([np.zeros(1), np.zeros(1)], config)


def test_a_dtype_of_another_version_is_refused() -> None:
    with refused(ValueError, "wire-dtype", "float8"):
        changes_of({WIRE_DTYPE: "float8"}, ())
