"""What messages say: instructions, groups of arrays, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from numpy.testing import assert_array_equal

from fl_admm_strategies.runtime.messages.records import (
    ClientInstruction,
    brief,
    describe,
    packed,
    parse_groups,
    read_names,
    split_groups,
    to_array,
    view,
    who_lost,
)
from tests.support.federation import assert_same_bits
from tests.support.refusals import refused

ANCHOR = {"w": np.array([[1.0, 2.0]], dtype=np.float32), "n": np.array(7, dtype=np.int64)}
START = {"w": np.array([[3.0, 4.0]], dtype=np.float32)}


def test_what_is_to_be_uploaded_is_the_first_group_or_named() -> None:
    groups = {"anchor": ANCHOR, "start": START}
    assert ClientInstruction(groups).upload_names() == ["w", "n"]
    assert ClientInstruction(groups, {"upload": '["w, 2"]'}).upload_names() == ["w, 2"]
    assert ClientInstruction(groups, {"upload": "[]"}).upload_names() == []
    with refused(ValueError, "upload", "w,n"):
        ClientInstruction(groups, {"upload": "w,n"}).upload_names()


@pytest.mark.parametrize("text", ["", "{}", "null", '["a", 1]', "[" * 100_000, 4])
def test_a_list_of_names_that_is_none_is_refused(text: Any) -> None:
    with refused(ValueError, "optimised"):
        read_names("optimised", text)


# --- Groups in the list that a NumPyClient gets -------------------------------------------------


def test_groups_reach_a_numpy_client_concatenated_and_are_cut_again() -> None:
    instruction = ClientInstruction({"anchor": ANCHOR, "start": START})
    flat = instruction.flat()
    assert len(flat) == 3
    assert instruction.nbytes == 8 + 8 + 8
    groups = split_groups(flat, instruction.full_config())
    assert list(groups) == ["anchor", "start"]
    assert_same_bits(groups["anchor"], ANCHOR)
    assert_same_bits(groups["start"], START)
    ((_, plain),) = split_groups(flat, {}, ["a", "b", "c"]).items()  # of a plain FedAvg server
    assert list(plain) == ["a", "b", "c"]
    assert_array_equal(plain["c"], START["w"])


def test_a_list_that_is_not_as_long_as_announced_is_refused() -> None:
    flat = ClientInstruction({"anchor": ANCHOR}).flat()
    announced = {"groups": '{"anchor":["w","n"],"start":["v"]}'}
    with refused(ValueError, 2, 3, "w, n, v"):
        split_groups(flat, announced)
    with refused(ValueError, 2, 1, "w"):
        split_groups(flat, {"groups": '{"anchor":["w"]}'})


@pytest.mark.parametrize(
    "text", ["anchor:2", "[]", "{}", '{"a":2}', '{"a":[1]}', '{"a":["w","w"]}', 3, b"{}"]
)
def test_groups_that_cannot_be_read_are_refused(text: Any) -> None:
    with refused(ValueError, "groups"):
        parse_groups({"groups": text})


@pytest.mark.parametrize(
    ("error", "client"),
    [
        ("ValueError: [state-lost 3] The server expects", 3),
        ("[state-lost 18446744073709551615]", 2**64 - 1),
        ("[state-lost -3]", None),
        (f"[state-lost {'9' * 21}]", None),
        ("state-lost 3", None),
        ("", None),
    ],
)
def test_who_says_that_its_state_is_lost(error: str, client: int | None) -> None:
    assert who_lost(error) == client


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tline\nand  another", "a line and another"),
        ("\x1b[31mred\x07\x00", "[31mred"),
        ("\u202edet\u2066\u200b\u2028", "det"),
        ("\ud800half a character", "half a character"),
        ("Größe 3 \N{GREEK SMALL LETTER RHO}", "Größe 3 \N{GREEK SMALL LETTER RHO}"),
        ("x" * 501, "x" * 250 + " ... " + "x" * 250),
        ("first" + "x" * 10**7 + "last", "first" + "x" * 245 + " ... " + "x" * 246 + "last"),
    ],
)
def test_somebody_elses_text_is_one_printable_line(text: str, shown: str) -> None:
    assert brief(text) == shown


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_error_without_a_text_has_a_description() -> None:
    assert describe(Mute()) == "Mute: (no text: its __str__ raises SystemExit)"
    assert describe(ValueError("a\nb")) == "ValueError: a b"


def test_what_is_packed_is_copied_once() -> None:
    array = np.arange(6.0).reshape(2, 3)
    once = packed(array)
    array[:] = 0
    assert not once.flags.writeable
    assert_array_equal(once, np.arange(6.0).reshape(2, 3))
    data = to_array(once).data
    assert to_array(view(to_array(once))).data is data
    assert_array_equal(Array(once).numpy(), to_array(once).numpy())
    # A part of it, or the same bytes in another shape, is another array; so are other bytes.
    foreign = np.frombuffer(bytes(128) + array.tobytes(), offset=128)
    for other in (once[1:], once.reshape(3, 2), once.T, once.view(np.int64), foreign):
        assert_array_equal(to_array(other).numpy(), other)
