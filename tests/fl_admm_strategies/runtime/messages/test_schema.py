"""Typed messages: what a strategy says is what its client hears, or the message is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from fl_admm_strategies.maths.blocks import Arrays
from fl_admm_strategies.runtime.messages.packing import pack_instructions, unpack_instructions
from fl_admm_strategies.runtime.messages.records import ClientInstruction
from fl_admm_strategies.runtime.messages.schema import Instruction
from tests.support.refusals import refused
from tests.support.texts import text

ODD_NAMES = ["body, 1", 'he said "2"', "line\nbreak", "back\\slash", "ü@4:{}[]", " "]


@dataclass(frozen=True)
class Question(Instruction):
    """A message with fields of every kind."""

    anchor: Arrays
    start: Arrays | None
    global_: Arrays
    names: list[str]
    rho: float
    local_epochs: int
    keep_dual: bool
    duals: str
    tolerance: float | None
    clustered: list[str] | None


def question(**changes: Any) -> Question:
    values: dict[str, Any] = {
        "anchor": {name: np.full((2, 1), i, np.float32) for i, name in enumerate(ODD_NAMES)},
        "start": {"n": np.array(7, np.int64)},
        "global_": {},
        "names": ODD_NAMES,
        "rho": 0.1,
        "local_epochs": 3,
        "keep_dual": True,
        "duals": "strategy",
        "tolerance": 1e-300,
        "clustered": [],
    }
    return Question(**values | changes)


def assert_same(actual: Question, expected: Question) -> None:
    for own in fields(expected):
        found, wanted = getattr(actual, own.name), getattr(expected, own.name)
        assert type(found) is type(wanted), own.name
        if isinstance(wanted, dict):
            assert list(found) == list(wanted)
            for name, array in wanted.items():
                assert found[name].dtype == array.dtype
                assert_array_equal(found[name], array)
        else:
            assert found == wanted, own.name


def received(instruction: ClientInstruction) -> Question:
    return Question.decode(instruction.flat(), instruction.full_config())


# --- There and back -----------------------------------------------------------------------------


def test_a_message_comes_back_as_it_was() -> None:
    assert_same(received(question().encode()), question())


def test_what_is_optional_and_none_does_not_travel() -> None:
    sent = question(start=None, tolerance=None, clustered=None)
    instruction = sent.encode()
    assert list(instruction.groups) == ["anchor", "global"]
    assert not {"tolerance", "clustered", "start"} & instruction.config.keys()
    assert_same(received(instruction), sent)


def test_numbers_of_numpy_travel_as_numbers() -> None:
    # A row of a table gives those, and a ConfigRecord takes Python's only.
    sent = question(rho=np.float32(0.5), local_epochs=np.int64(4), keep_dual=np.bool_(False))
    assert_same(received(sent.encode()), question(rho=0.5, local_epochs=4, keep_dual=False))


def test_an_integer_is_a_number_where_a_float_is_wanted() -> None:
    instruction = question().encode()
    instruction.config["rho"] = 2
    assert_same(received(instruction), question(rho=2.0))


@settings(max_examples=8)
@given(names=st.lists(text(), unique=True, max_size=4), rho=st.floats(allow_nan=False))
def test_any_names_travel_in_one_message_or_in_one_of_several(names: list[str], rho: float) -> None:
    arrays = {name: np.array([float(i)]) for i, name in enumerate(names)}
    sent = question(anchor=arrays, start=dict(arrays), names=names, rho=rho)
    for hosted in (False, True):
        content = pack_instructions({4: sent.encode()}, hosted=hosted)
        ((_, instruction),) = unpack_instructions(content)
        assert_same(received(instruction), sent)


# --- What is refused ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Another(Instruction):
    """The message of another method."""

    model: Arrays
    mu: float


def test_the_message_of_another_method_is_refused_by_name() -> None:
    other = Another({"w": np.zeros(2)}, 0.5).encode()
    with refused(ValueError, "anchor", "Question"):
        received(other)
    with refused(ValueError, 1, 0):  # of a plain FedAvg
        Question.decode([np.zeros(2)], {"lr": 0.5})


def test_a_setting_that_is_missing_is_named() -> None:
    instruction = question().encode()
    del instruction.config["local-epochs"]
    with refused(ValueError, "local-epochs", "Question"):
        received(instruction)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("rho", "0.1", "float"),
        ("rho", True, "float"),
        ("local-epochs", 3.0, "int"),
        ("local-epochs", True, "int"),
        ("keep-dual", 1, "bool"),
        ("duals", b"client", "str"),
        ("names", '["a", 1]', "names"),
        ("clustered", "", "names"),
        ("tolerance", "small", "float"),
    ],
)
def test_a_setting_of_another_kind_is_refused(setting: str, value: Any, expected: str) -> None:
    instruction = question().encode()
    instruction.config[setting] = value
    with refused(ValueError, setting, repr(value), expected):
        received(instruction)
