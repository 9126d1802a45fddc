"""The content of messages: FedAvg's own layout with one client, blocks with several."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.testing import assert_array_equal

from fl_admm_strategies.runtime.messages.packing import (
    pack_instructions,
    pack_replies,
    unpack_instructions,
    unpack_replies,
)
from fl_admm_strategies.runtime.messages.records import (
    ClientInstruction,
    RawReply,
    from_array_record,
    to_array_record,
    who_lost,
)

ANCHOR = {"w": np.array([[1.0, 2.0]], dtype=np.float32), "n": np.array(7, dtype=np.int64)}
START = {"w": np.array([[3.0, 4.0]], dtype=np.float32)}


def assert_same_arrays(actual: Any, expected: Any) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        assert_array_equal(actual[name], array)


def assert_round_trip(instructions: dict[int, ClientInstruction]) -> RecordDict:
    content = pack_instructions(instructions, hosted=True)
    unpacked = dict(unpack_instructions(content))
    assert sorted(unpacked) == sorted(instructions)
    for client, instruction in instructions.items():
        assert list(unpacked[client].groups) == list(instruction.groups)
        for group, arrays in instruction.groups.items():
            assert_same_arrays(unpacked[client].groups[group], arrays)
        found, expected = unpacked[client].config, instruction.full_config()
        assert found == expected
        assert {k: (type(v), repr(v)) for k, v in found.items()} == {
            k: (type(v), repr(v)) for k, v in expected.items()
        }
    return content


# --- One client ---------------------------------------------------------------------------------


def test_one_client_gets_the_layout_of_fedavg() -> None:
    instruction = ClientInstruction({"model": ANCHOR, "start": START}, {"lr": 0.5})
    content = pack_instructions({4: instruction}, hosted=False)
    assert list(content) == ["arrays", "arrays.start", "config"]
    assert_same_arrays(from_array_record(content["arrays"]), ANCHOR)
    assert dict(content["config"]) == {"lr": 0.5, "groups": '{"model":["w","n"],"start":["w"]}'}
    ((label, unpacked),) = unpack_instructions(content)
    assert label is None
    assert_same_arrays(unpacked.groups["start"], START)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12, dtype=np.int8)[::2],
        np.array(7, dtype=np.int64),
        np.zeros((2, 0, 3), ">f4"),
        np.array([True, False]),
        np.zeros(2, np.float16),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_has_the_bytes_that_flower_gives_it(array: np.ndarray) -> None:
    (found,) = to_array_record({"a": array}).values()
    expected = Array(array)
    assert (found.dtype, found.shape, found.stype) == (
        expected.dtype,
        expected.shape,
        "numpy.ndarray",
    )
    assert found.data == expected.data
    assert_same_arrays(from_array_record(ArrayRecord({"a": found})), {"a": array})
    assert from_array_record(ArrayRecord({"a": found}))["a"].flags.writeable


def test_an_instruction_of_plain_fedavg_is_one_group() -> None:
    content = RecordDict({"arrays": to_array_record(ANCHOR), "config": ConfigRecord({"lr": 0.5})})
    ((label, instruction),) = unpack_instructions(content)
    assert label is None
    assert_same_arrays(next(iter(instruction.groups.values())), ANCHOR)
    assert [array.shape for array in instruction.flat()] == [(1, 2), ()]
    assert instruction.upload_names() == ["w", "n"]


# --- Blocks of instructions ---------------------------------------------------------------------


def test_a_node_gets_one_block_an_array_and_what_all_get_once() -> None:
    w = np.array([5.0, 6.0], dtype=np.float32)
    instructions = {
        client: ClientInstruction(
            {
                "anchor": {"w": w, "b": np.array([client], dtype=np.float32)},
                "start": {"n": np.array(client)},
            },
            {"lr": 0.5, "seed": client, "name": "x"},
        )
        for client in (4, 11, 7)
    }
    content = assert_round_trip(instructions)
    assert set(content) == {"arrays", "arrays@0", "arrays.start@0", "config@0", "clients@0"}
    assert_same_arrays(from_array_record(content["arrays"]), {"w": w})
    block = {"b": np.array([[4], [11], [7]], dtype=np.float32)}
    assert_same_arrays(from_array_record(content["arrays@0"]), block)
    assert_same_arrays(from_array_record(content["arrays.start@0"]), {"n": np.array([4, 11, 7])})
    groups = '{"anchor":["w","b"],"start":["n"]}'
    assert dict(content["config@0"]) == {"lr": 0.5, "name": "x", "groups": groups}
    assert dict(content["clients@0"]) == {"client-ids": [4, 11, 7], "seed": [4, 11, 7]}


def test_what_all_get_may_be_equal_copies_but_not_equal_numbers() -> None:
    def content(*values: float) -> RecordDict:
        return assert_round_trip(
            {
                client: ClientInstruction({"model": {"w": np.array([1.0, value])}})
                for client, value in enumerate(values)
            }
        )

    assert set(content(2.0, 2.0)) == {"arrays", "config@0", "clients@0"}
    assert "arrays@0" in content(2.0, 3.0)
    zeros = content(0.0, -0.0)
    found = [one.groups["model"]["w"][1] for _, one in unpack_instructions(zeros)]
    assert np.signbit(found).tolist() == [False, True]


def test_what_all_who_have_it_get_is_there_once_beside_those_who_have_not() -> None:
    w, first = np.ones(3), np.zeros(2)
    content = assert_round_trip(
        {
            client: ClientInstruction(
                {"model": {"w": w}} | ({"start": {"w": first}} if client < 2 else {}), {"lr": 1.0}
            )
            for client in range(5)
        }
    )
    assert [key for key in content if key.startswith("arrays")] == ["arrays", "arrays.start"]
    assert content["clients@0"]["client-ids"] == [0, 1]
    assert content["clients@1"]["client-ids"] == [2, 3, 4]


@pytest.mark.parametrize(
    "configs",
    [
        [{"x": 1}, {"x": 1.0}, {"x": True}, {"x": "1"}, {"x": b"1"}],
        [{"x": 0.0}, {"x": -0.0}],
        [{"x": float("nan")}, {"x": float("nan")}],
        [{"x": float("inf")}, {"x": 5e-324}],
        [{"x": 2**63 - 1}, {"x": -(2**63)}],
        [{"x": 1}, {"y": 1}, {"x": 1, "y": 2}, {}],
        [{"x": ""}, {"x": "a, [b]\n@"}],
        [{"x": [1, 2]}, {"x": [1, 2]}],
    ],
    ids=str,
)
def test_settings_come_as_they_were(configs: list[dict[str, Any]]) -> None:
    content = pack_instructions(
        {i: ClientInstruction({"m": START}, own) for i, own in enumerate(configs)}, hosted=True
    )
    found = dict(unpack_instructions(content))
    for client, own in enumerate(configs):
        assert repr({k: v for k, v in found[client].config.items() if k != "groups"}) == repr(own)


def test_unequal_shapes_share_a_flat_block() -> None:
    rng = np.random.default_rng(0)
    instructions = {
        client: ClientInstruction(
            {"model": {"V": START["w"], "rated": rng.random((2, client)), "n": np.array(client)}},
            {"seed": client},
        )
        for client in (3, 0, 5)
    }
    content = assert_round_trip(instructions)
    assert set(content) == {
        "arrays",
        "arrays@0",
        "shapes.arrays@0",
        "config@0",
        "clients@0",
    }
    assert content["arrays@0"]["rated"].shape == (16,)
    shapes = from_array_record(content["shapes.arrays@0"])
    assert_same_arrays(shapes, {"rated": np.array([[2, 3], [2, 0], [2, 5]])})


def test_unequal_dimensions_and_types_have_blocks_of_their_own() -> None:
    arrays = [np.zeros(2), np.zeros((2, 1)), np.zeros(2, np.float32), np.zeros(2, ">f8")]
    assert_round_trip({i: ClientInstruction({"m": {"a": a}}) for i, a in enumerate(arrays)})


def test_arrays_are_read_only_views_of_the_message() -> None:
    instructions = {
        client: ClientInstruction({"m": {"a": np.full(3, client, np.float32), "b": START["w"]}})
        for client in range(3)
    }
    content = pack_instructions(instructions, hosted=True)
    first, second, _ = (one.groups["m"] for _, one in unpack_instructions(content))
    data = np.frombuffer(content["arrays@0"]["a"].data, np.uint8)
    assert np.shares_memory(first["a"], data)
    assert np.shares_memory(second["a"], data)
    assert np.shares_memory(first["b"], second["b"])
    assert not first["a"].flags.writeable
    content = pack_replies({c: RawReply(one.groups["m"]) for c, one in instructions.items()})
    data = np.frombuffer(content["arrays@0"]["a"].data, np.uint8)
    assert all(np.shares_memory(reply.arrays["a"], data) for _, reply in unpack_replies(content))


@pytest.mark.parametrize(
    "name", ["a:b", "a,b", 'a"b', "a\nb", "a\\b", "@4", "ü", " ", "client-ids"]
)
def test_names_may_hold_any_character(name: str) -> None:
    arrays = {name: ANCHOR["w"], "n": ANCHOR["n"]}
    groups = {name: arrays, "start": START, f"{name}@0": START}
    assert_round_trip({4: ClientInstruction(groups), 5: ClientInstruction(groups)})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: c.pop("arrays"), r"lacks the ArrayRecord 'arrays'\. .*same version"),
        (lambda c: c["arrays"].pop("w"), r"lacks the arrays \['w'\] \(1\) of 'arrays'"),
        (lambda c: c["arrays@0"].pop("n"), r"lacks the arrays \['n'\] \(1\) of 'arrays'"),
        (lambda c: c.pop("config@0"), r"lacks the groups of 'config@0'"),
        (lambda c: c["config@0"].pop("groups"), r"lacks the groups of 'config@0'"),
        (lambda c: c["clients@0"].pop("client-ids"), r"clients of a block are None, expected a li"),
        (lambda c: c["clients@0"].update({"client-ids": [1, -1]}), r"are \[1, -1\], expected a li"),
        (lambda c: c["clients@0"].update(seed=[1, 2, 3]), r"'seed' has 3 values for 2 clients"),
        (lambda c: c["clients@0"].update(seed=1), r"'seed' has one value for 2 clients"),
        (
            lambda c: c["arrays@0"].update(n=Array(np.zeros(3))),
            r"block of 'n' has the shape \(3,\) for 2 clients",
        ),
    ],
)
def test_a_message_that_is_not_whole_is_refused(
    spoil: Callable[[RecordDict], object], reason: str
) -> None:
    instructions = {
        client: ClientInstruction({"m": {"w": START["w"], "n": np.array(client)}}, {"seed": client})
        for client in (1, 2)
    }
    content = pack_instructions(instructions, hosted=True)
    spoil(content)
    with pytest.raises(ValueError, match=reason):
        list(unpack_instructions(content))


# --- Replies ------------------------------------------------------------------------------------


def test_the_reply_of_one_client_has_the_layout_of_fedavg() -> None:
    alone = pack_replies({None: RawReply(ANCHOR, {"loss": 0.5})})
    assert list(alone) == ["arrays", "metrics"]
    ((label, reply),) = unpack_replies(alone)
    assert label is None
    assert_same_arrays(reply.arrays, ANCHOR)
    assert reply.metrics == {"loss": 0.5}
    failed = pack_replies({None: RawReply(error="KeyError")})
    assert dict(failed["error"]) == {"reason": "KeyError"}
    assert dict(unpack_replies(failed)) == {None: RawReply(error="KeyError")}


def test_replies_come_back_as_they_were_packed() -> None:
    replies = {
        4: RawReply(ANCHOR, {"num-examples": 3, "loss": 0.5}),
        5: RawReply(error="KeyError"),
        9: RawReply(ANCHOR, {"num-examples": 4, "loss": -1e30}),
        6: RawReply(error="ValueError"),
        7: RawReply(ANCHOR, {"num-examples": 4, "loss": 1}),
        8: RawReply(None, {"num-examples": 1}),
    }
    content = pack_replies(replies)
    assert set(content) == {
        *(f"{name}@0" for name in ("arrays", "metrics", "clients")),
        "clients@1",
        *(f"{name}@2" for name in ("arrays", "metrics", "clients")),
        *(f"{name}@3" for name in ("metrics", "clients")),
    }
    assert dict(content["metrics@0"]) == {"num-examples": [3, 4], "loss": [0.5, -1e30]}
    unpacked = dict(unpack_replies(content))
    assert sorted(unpacked) == sorted(replies)
    for client, reply in replies.items():
        found = unpacked[client]
        assert found.error == reply.error
        assert repr(found.metrics) == repr(reply.metrics)
        if reply.arrays is None:
            assert found.arrays is None
        else:
            assert_same_arrays(found.arrays, reply.arrays)


def test_the_largest_number_of_each_client_is_known() -> None:
    rows = [[1.0, -3.0], [0.0, np.nan], [-np.inf, 2.0], [0.0, -0.0]]
    arrays = [np.array(row, np.float32) for row in rows]
    content = pack_replies({i: RawReply({"w": array}) for i, array in enumerate(arrays)})
    largest = [reply.largest["w"] for _, reply in unpack_replies(content)]
    assert_array_equal(largest, [3.0, np.nan, np.inf, 0.0])


def changed(name: str, key: str, value: Any) -> Callable[[RecordDict], object]:
    return lambda content: content[name].update({key: value})


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def raw(data: bytes) -> Array:
    return Array("float32", (3, 2), "numpy.ndarray", data)


LONG = b"\x93NUMPY\x02\x00" + (10**6).to_bytes(4, "little") + b"{" * 10**6
HUGE = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(117) + b"\n"
)
NEGATIVE = HUGE.replace(b"99999999999999", b"-9999999999999")

# What is done to a good reply of clients 4, 5 and 6, and why none of them is believed then.
SPOILT: dict[str, tuple[Callable[[RecordDict], object], str]] = {
    "rows": (changed("arrays@0", "w", Array(np.zeros((2, 2)))), "shape (2, 2) for 3 clients"),
    "no rows": (changed("arrays@0", "w", Array(np.array(1.0))), "shape () for 3 clients"),
    "pickle": (changed("arrays@0", "w", raw(saved(np.array([None] * 3)))), "Python objects"),
    "long header": (changed("arrays@0", "w", raw(LONG)), "array 'w' cannot be read"),
    "huge": (changed("arrays@0", "w", raw(HUGE)), "array 'w' cannot be read"),
    "negative": (changed("arrays@0", "w", raw(NEGATIVE)), "array 'w' cannot be read"),
    "short": (changed("arrays@0", "w", raw(saved(np.zeros((3, 2)))[:-1])), "cannot be read"),
    "no array": (changed("arrays@0", "w", raw(b"junk")), "array 'w' cannot be read"),
    "no metrics": (lambda content: content.pop("metrics@0"), "without metrics"),
    "one metric": (changed("metrics@0", "loss", 1.0), "'loss' has one value for 3 clients"),
    "few metrics": (changed("metrics@0", "loss", [1.0]), "'loss' has 1 values for 3 clients"),
    "shapes": (
        lambda content: content.update(
            {"shapes.arrays@0": to_array_record({"w": np.array([[1], [2], [2]])})}
        ),
        "has shapes that do not fit",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_block_is_an_error_of_all_its_clients(how: str) -> None:
    spoil, reason = SPOILT[how]
    good = {c: RawReply({"w": np.zeros(2)}, {"loss": float(c)}) for c in (4, 5, 6)}
    content = pack_replies(good | {9: RawReply({"v": np.zeros(2)}, {"loss": 2.0})})
    spoil(content)
    unpacked = dict(unpack_replies(content))
    assert list(unpacked) == [4, 5, 6, 9]
    assert all(reason in str(unpacked[client].error) for client in (4, 5, 6)), unpacked[4]
    assert unpacked[9].error is None  # another block


@pytest.mark.parametrize(
    "shapes",
    [
        np.array([[1], [2], [4]]),
        np.array([[1], [2], [-3]]),
        np.array([[1], [2]]),
        np.array([1, 2, 3]),
        np.array([[1.0], [2.0], [3.0]]),
        np.array([[2**62], [2**62], [2**62]]),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_an_error(shapes: np.ndarray) -> None:
    content = pack_replies({c: RawReply({"w": np.zeros(c)}, {"loss": 1.0}) for c in (1, 2, 3)})
    assert [reply.arrays["w"].shape for _, reply in unpack_replies(content)] == [(1,), (2,), (3,)]
    content["shapes.arrays@0"] = to_array_record({"w": shapes})
    assert all("do not fit" in str(reply.error) for _, reply in unpack_replies(content))


@pytest.mark.parametrize("ids", [None, 4, [4.0], ["4"], [True], [-1], [2**64]], ids=repr)
def test_a_block_that_does_not_say_whose_it_is_is_an_error_of_nobody(ids: Any) -> None:
    content = pack_replies({4: RawReply({"w": np.zeros(2)}, {"loss": 1.0})})
    content["clients@0"] = ConfigRecord({} if ids is None else {"client-ids": ids})
    ((label, reply),) = unpack_replies(content)
    assert label is None
    assert "the clients of a block are" in str(reply.error)


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
            RecordDict({"arrays": ArrayRecord({"w": raw(b"junk")}), "metrics": MetricRecord()}),
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


def test_the_text_of_others_is_one_line_of_bounded_length() -> None:
    text = "a\n\tb" + "c" * 1000
    content = RecordDict({"error": ConfigRecord({"reason": text})})
    packed = pack_replies({3: RawReply(error=text)})
    for sent in (content, packed):
        ((_, reply),) = unpack_replies(sent)
        assert reply.error is not None
        assert reply.error.startswith("a bccc")
        assert len(reply.error) == 505


def test_a_lost_state_is_known_at_the_end_of_a_long_error() -> None:
    reply = pack_replies({None: RawReply(error="x" * 10_000 + " [state-lost 3] It is gone.")})
    ((_, read),) = unpack_replies(reply)
    assert read.error is not None
    assert who_lost(read.error) == 3
