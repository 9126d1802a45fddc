"""The layout of messages: FedAvg's own with one client, labelled records with several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.testing import assert_array_equal

from fl_admm_strategies.runtime.messages import (
    ClientInstruction,
    RawReply,
    brief,
    describe,
    from_array_record,
    pack_instructions,
    pack_replies,
    parse_groups,
    read_names,
    split_groups,
    to_array_record,
    unpack_instructions,
    unpack_replies,
    who_lost,
)

ANCHOR = {"w": np.array([[1.0, 2.0]], dtype=np.float32), "n": np.array(7, dtype=np.int64)}
START = {"w": np.array([[3.0, 4.0]], dtype=np.float32)}


def assert_same_arrays(actual, expected) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        assert_array_equal(actual[name], array)


def test_one_client_gets_the_layout_of_fedavg() -> None:
    instruction = ClientInstruction({"model": ANCHOR}, {"lr": 0.5})
    content = pack_instructions({4: instruction}, hosted=False)
    assert list(content) == ["arrays", "config"]
    assert_same_arrays(from_array_record(content["arrays"]), ANCHOR)
    assert dict(content["config"]) == {"lr": 0.5, "groups": '{"model":["w","n"]}'}


def test_further_groups_and_hosted_clients_have_keys_of_their_own() -> None:
    instructions = {
        4: ClientInstruction({"anchor": ANCHOR, "start": START}, {"lr": 0.5}),
        11: ClientInstruction({"anchor": ANCHOR}, {"lr": 0.1}),
    }
    content = pack_instructions(instructions, hosted=True)
    assert set(content) == {"arrays@4", "arrays.start@4", "config@4", "arrays@11", "config@11"}
    assert content["config@4"]["groups"] == '{"anchor":["w","n"],"start":["w"]}'
    unpacked = dict(unpack_instructions(content))
    assert list(unpacked) == [4, 11]
    for client, instruction in instructions.items():
        assert list(unpacked[client].groups) == list(instruction.groups)
        for group, arrays in instruction.groups.items():
            assert_same_arrays(unpacked[client].groups[group], arrays)
        assert unpacked[client].config == instruction.full_config()


def test_the_instruction_of_one_client_has_no_label() -> None:
    instruction = ClientInstruction({"anchor": ANCHOR, "start": START})
    content = pack_instructions({4: instruction}, hosted=False)
    ((label, unpacked),) = unpack_instructions(content)
    assert label is None
    assert_same_arrays(unpacked.groups["start"], START)


def test_an_instruction_of_plain_fedavg_is_one_group() -> None:
    content = RecordDict({"arrays": to_array_record(ANCHOR), "config": ConfigRecord({"lr": 0.5})})
    ((label, instruction),) = unpack_instructions(content)
    assert label is None
    assert_same_arrays(next(iter(instruction.groups.values())), ANCHOR)
    assert [array.shape for array in instruction.flat()] == [(1, 2), ()]
    assert instruction.upload_names() == ["w", "n"]


@pytest.mark.parametrize("key", ["config@x", "config@", "config@-1", "config@4@5", "config@\u0664"])
def test_a_label_that_is_no_client_is_refused(key: str) -> None:
    content = RecordDict({"arrays": to_array_record(ANCHOR), key: ConfigRecord()})
    with pytest.raises(ValueError, match=r"The message holds 'config@.*', expected 'config@ID'"):
        list(unpack_instructions(content))


def test_a_group_that_is_announced_must_be_there() -> None:
    content = pack_instructions({4: ClientInstruction({"a": ANCHOR, "b": START})}, hosted=True)
    del content["arrays.b@4"]
    with pytest.raises(ValueError, match=r"lacks the ArrayRecord 'arrays.b@4'\. .*same version"):
        list(unpack_instructions(content))


def test_what_is_to_be_uploaded_is_the_first_group_or_named() -> None:
    groups = {"anchor": ANCHOR, "start": START}
    assert ClientInstruction(groups).upload_names() == ["w", "n"]
    assert ClientInstruction(groups, {"upload": '["w, 2"]'}).upload_names() == ["w, 2"]
    assert ClientInstruction(groups, {"upload": "[]"}).upload_names() == []
    with pytest.raises(ValueError, match=r"The message's upload is 'w,n', expected a JSON list"):
        ClientInstruction(groups, {"upload": "w,n"}).upload_names()


@pytest.mark.parametrize("text", ["", "w", "{}", "3", "null", "[1]", '["a", 1]', "[" * 100_000, 4])
def test_a_list_of_names_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"The message's optimised is .*expected a JSON list of n"):
        read_names("optimised", text)


# --- Groups in the list that a NumPyClient gets -------------------------------------------------


def test_groups_reach_a_numpy_client_concatenated_and_are_cut_again() -> None:
    instruction = ClientInstruction({"anchor": ANCHOR, "start": START})
    flat = instruction.flat()
    assert len(flat) == 3
    assert instruction.nbytes == 8 + 8 + 8
    groups = split_groups(flat, instruction.full_config())
    assert list(groups) == ["anchor", "start"]
    assert_same_arrays(groups["anchor"], ANCHOR)
    assert_same_arrays(groups["start"], START)
    ((_, plain),) = split_groups(flat, {}, ["a", "b", "c"]).items()  # of a plain FedAvg server
    assert list(plain) == ["a", "b", "c"]
    assert_array_equal(plain["c"], START["w"])


def test_a_list_that_is_not_as_long_as_announced_is_refused() -> None:
    flat = ClientInstruction({"anchor": ANCHOR}).flat()
    announced = {"groups": '{"anchor":["w","n"],"start":["v"]}'}
    with pytest.raises(ValueError, match=r"has 2 arrays, expected 3: w, n, v\. .*same version"):
        split_groups(flat, announced)
    with pytest.raises(ValueError, match=r"has 2 arrays, expected 1: w\. "):
        split_groups(flat, {"groups": '{"anchor":["w"]}'})


@pytest.mark.parametrize("name", ["a:b", "a,b", 'a"b', "a\nb", "a\\b", "@4", "ü", " "])
def test_names_of_arrays_and_groups_may_hold_any_character(name: str) -> None:
    instruction = ClientInstruction({name: {name: ANCHOR["w"], "n": ANCHOR["n"]}, "start": START})
    config = instruction.full_config()
    assert parse_groups(config) == {name: [name, "n"], "start": ["w"]}
    groups = split_groups(instruction.flat(), config)
    assert list(groups) == [name, "start"]
    assert_same_arrays(groups[name], instruction.groups[name])
    content = pack_instructions({4: instruction}, hosted=True)
    ((_, unpacked),) = unpack_instructions(content)
    assert_same_arrays(unpacked.groups[name], instruction.groups[name])


@pytest.mark.parametrize(
    "text",
    ["anchor:2", "", "[]", "{}", '{"a":2}', '{"a":[1]}', '{"a":"w"}', '{"a":["w","w"]}', 3, b"{}"],
    ids=repr,
)
def test_groups_that_cannot_be_read_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"groups are .*, expected JSON .*anchor.*same version"):
        parse_groups({"groups": text})


# --- Replies ------------------------------------------------------------------------------------


def test_replies_come_back_as_they_were_packed() -> None:
    replies = {4: RawReply(ANCHOR, {"num-examples": 3, "loss": 0.5}), 5: RawReply(error="KeyError")}
    unpacked = dict(unpack_replies(pack_replies(replies)))
    assert list(unpacked) == ["4", "5"]
    assert_same_arrays(unpacked["4"].arrays, ANCHOR)
    assert unpacked["4"].metrics == {"num-examples": 3, "loss": 0.5}
    assert unpacked["5"].error == "KeyError"
    alone = pack_replies({None: RawReply(None, {"loss": 0.5})})
    assert list(alone) == ["metrics"]
    assert dict(unpack_replies(alone)) == {None: RawReply(None, {"loss": 0.5})}


def test_a_strangers_record_names_are_accepted_where_there_is_no_doubt() -> None:
    content = RecordDict({"model": to_array_record(ANCHOR), "report": MetricRecord({"n": 1})})
    ((label, reply),) = unpack_replies(content)
    assert label is None
    assert_same_arrays(reply.arrays, ANCHOR)
    assert reply.metrics == {"n": 1}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (RecordDict(), "0 ArrayRecords and 0 MetricRecords"),
        (RecordDict({"arrays": ArrayRecord()}), "1 ArrayRecords and 0 MetricRecords"),
        (
            RecordDict({"a": ArrayRecord(), "b": ArrayRecord(), "m": MetricRecord()}),
            "2 ArrayRecords and 1 MetricRecords",
        ),
        (
            RecordDict(
                {
                    "arrays": ArrayRecord({"w": Array("float32", (1,), "numpy.ndarray", b"junk")}),
                    "metrics": MetricRecord(),
                }
            ),
            "cannot be read",
        ),
        (RecordDict({"error": ConfigRecord()}), "no reason given"),
    ],
    ids=["nothing", "no metrics", "two models", "no numpy file", "error without a reason"],
)
def test_what_cannot_be_read_becomes_an_error(content: RecordDict, expected: str) -> None:
    ((label, reply),) = unpack_replies(content)
    assert label is None
    assert reply.error is not None
    assert expected in reply.error


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


def test_the_text_of_others_is_one_line_of_bounded_length() -> None:
    content = RecordDict({"error": ConfigRecord({"reason": "a\n\tb" + "c" * 1000})})
    ((_, reply),) = unpack_replies(content)
    assert reply.error is not None
    assert reply.error.startswith("a bccc")
    assert len(reply.error) == 505


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


def test_a_lost_state_is_known_at_the_end_of_a_long_error() -> None:
    reply = pack_replies({None: RawReply(error="x" * 10_000 + " [state-lost 3] It is gone.")})
    ((_, read),) = unpack_replies(reply)
    assert read.error is not None
    assert who_lost(read.error) == 3
