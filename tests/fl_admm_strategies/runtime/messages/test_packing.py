"""The content of messages: FedAvg's own layout with one client, blocks with several."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_admm_strategies.runtime.messages.packing import (
    LARGE,
    pack_instructions,
    pack_replies,
    unpack_instructions,
    unpack_replies,
)
from fl_admm_strategies.runtime.messages.records import (
    ClientInstruction,
    RawReply,
    from_array_record,
    packed,
    to_array_record,
    who_lost,
)
from tests.support.federation import assert_same_bits
from tests.support.refusals import names, refused

ANCHOR = {"w": np.array([[1.0, 2.0]], dtype=np.float32), "n": np.array(7, dtype=np.int64)}
START = {"w": np.array([[3.0, 4.0]], dtype=np.float32)}


def assert_round_trip(instructions: dict[int, ClientInstruction]) -> RecordDict:
    content = pack_instructions(instructions, hosted=True)
    unpacked = dict(unpack_instructions(content))
    assert sorted(unpacked) == sorted(instructions)
    for client, instruction in instructions.items():
        assert list(unpacked[client].groups) == list(instruction.groups)
        for group, arrays in instruction.groups.items():
            assert_same_bits(unpacked[client].groups[group], arrays)
        found, expected = unpacked[client].config, instruction.full_config()
        assert found == expected
        assert {k: (type(v), repr(v)) for k, v in found.items()} == {
            k: (type(v), repr(v)) for k, v in expected.items()
        }
    return content


@pytest.mark.parametrize("hosted", [False, True])
def test_numpy_scalars_are_told_apart(hosted: bool) -> None:
    # The sum of two arrays without dimensions is one; it has no place in memory of its own.
    sent = {f"s{i}": np.array(i) + np.float32(0.5) for i in range(20)}
    asked = {client: ClientInstruction({"m": sent}) for client in range(1 + hosted)}
    content = pack_instructions(asked, hosted=hosted)
    for _, received in unpack_instructions(content):
        assert {n: float(a) for n, a in received.groups["m"].items()} == sent


# --- One client ---------------------------------------------------------------------------------


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
    assert found == Array(array)
    assert_same_bits(from_array_record(ArrayRecord({"a": found})), {"a": array})
    assert from_array_record(ArrayRecord({"a": found}))["a"].flags.writeable


def test_an_instruction_of_plain_fedavg_is_one_group() -> None:
    content = RecordDict({"arrays": to_array_record(ANCHOR), "config": ConfigRecord({"lr": 0.5})})
    ((label, instruction),) = unpack_instructions(content)
    assert label is None
    assert_same_bits(next(iter(instruction.groups.values())), ANCHOR)
    assert [array.shape for array in instruction.flat()] == [(1, 2), ()]
    assert instruction.upload_names() == ["w", "n"]


# --- Blocks of instructions ---------------------------------------------------------------------


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


def test_unequal_shapes_have_blocks_of_their_own() -> None:
    rng = np.random.default_rng(0)
    instructions = {
        client: ClientInstruction(
            {"model": {"V": START["w"], "rated": rng.random((2, client % 6))}}, {"seed": client}
        )
        for client in (3, 0, 9)
    }
    assert_round_trip(instructions)


def test_large_arrays_are_not_copied_into_a_block() -> None:
    """Each client has a block of its own, whose bytes are those of the upload."""
    size = LARGE // 4
    uploads = {c: {"w": packed(np.full(size, c, np.float32)), "n": np.array(c)} for c in (4, 7)}
    replies = {client: RawReply(arrays, {"num-examples": 3}) for client, arrays in uploads.items()}
    content = pack_replies(replies)
    for number, client in enumerate(uploads):
        assert content[f"clients@{number}"]["client-ids"] == [client]
        assert content[f"arrays@{number}"]["w"].data is uploads[client]["w"].base
    for client, found in unpack_replies(content):
        assert client is not None
        assert found.arrays is not None
        assert_same_bits(found.arrays, uploads[client])

    asked = {
        client: ClientInstruction({"model": {"V": np.arange(size), "w": arrays["w"]}})
        for client, arrays in uploads.items()
    }
    content = assert_round_trip(asked)
    assert set(content["arrays"]) == {"V"}  # what all get is there once, however large
    assert [set(content[f"arrays@{k}"]) for k in (0, 1)] == [{"w"}, {"w"}]


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
    ("spoil", "named"),
    [
        (lambda c: c.pop("arrays"), "arrays"),
        (lambda c: c["arrays"].pop("w"), "['w']"),
        (lambda c: c["arrays@0"].pop("n"), "['n']"),
        (lambda c: c.pop("config@0"), "groups"),
        (lambda c: c["clients@0"].pop("client-ids"), "None"),
        (lambda c: c["clients@0"].update({"client-ids": [1, -1]}), "[1, -1]"),
        (lambda c: c["clients@0"].update(seed=[1, 2, 3]), "seed"),
        (lambda c: c["clients@0"].update(seed=1), "seed"),
        (lambda c: c["arrays@0"].update(n=Array(np.zeros(3))), "(3,)"),
    ],
)
def test_a_message_that_is_not_whole_is_refused(spoil, named):
    instructions = {
        client: ClientInstruction({"m": {"w": START["w"], "n": np.array(client)}}, {"seed": client})
        for client in (1, 2)
    }
    content = pack_instructions(instructions, hosted=True)
    spoil(content)
    with refused(ValueError, named):
        list(unpack_instructions(content))


# --- Replies ------------------------------------------------------------------------------------


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
    unpacked = dict(unpack_replies(content))
    assert sorted(unpacked) == sorted(replies)
    for client, reply in replies.items():
        found = unpacked[client]
        assert found.error == reply.error
        assert repr(found.metrics) == repr(reply.metrics)
        if reply.arrays is None:
            assert found.arrays is None
        else:
            assert_same_bits(found.arrays, reply.arrays)


def changed(name: str, key: str, value: Any) -> Callable[[RecordDict], object]:
    return lambda content: content[name].update({key: value})


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def raw(data: bytes) -> Array:
    return Array("float32", (3, 2), "numpy.ndarray", data)


HUGE = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(117) + b"\n"
)

# What is done to a good reply of clients 4, 5 and 6, none of whom is believed then.
SPOILT: dict[str, tuple[Callable[[RecordDict], object], str]] = {
    "rows": (changed("arrays@0", "w", Array(np.zeros((2, 2)))), "(2, 2)"),
    "no rows": (changed("arrays@0", "w", Array(np.array(1.0))), "()"),
    "pickle": (changed("arrays@0", "w", raw(saved(np.array([None] * 3)))), "w"),
    "huge": (changed("arrays@0", "w", raw(HUGE)), "w"),
    "short": (changed("arrays@0", "w", raw(saved(np.zeros((3, 2)))[:-1])), "w"),
    "one metric": (changed("clients@0", "loss", 1.0), "loss"),
    "few metrics": (changed("clients@0", "loss", [1.0]), "loss"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_block_is_an_error_of_all_its_clients(how: str) -> None:
    spoil, named = SPOILT[how]
    good = {c: RawReply({"w": np.zeros(2)}, {"loss": float(c)}) for c in (4, 5, 6)}
    content = pack_replies(good | {9: RawReply({"v": np.zeros(2)}, {"loss": 2.0})})
    spoil(content)
    unpacked = dict(unpack_replies(content))
    assert list(unpacked) == [4, 5, 6, 9]
    assert all(names(unpacked[client].error, named) for client in (4, 5, 6)), unpacked[4]
    assert unpacked[9].error is None  # another block


@pytest.mark.parametrize("ids", [None, 4, ["4"], [-1], [2**64]], ids=repr)
def test_a_block_that_does_not_say_whose_it_is_is_an_error_of_nobody(ids: Any) -> None:
    content = pack_replies({4: RawReply({"w": np.zeros(2)}, {"loss": 1.0})})
    content["clients@0"] = ConfigRecord({} if ids is None else {"client-ids": ids})
    ((label, reply),) = unpack_replies(content)
    assert label is None
    assert reply.error is not None


def test_a_strangers_record_names_are_accepted_where_there_is_no_doubt() -> None:
    content = RecordDict({"model": to_array_record(ANCHOR), "report": MetricRecord({"n": 1})})
    ((label, reply),) = unpack_replies(content)
    assert label is None
    assert_same_bits(reply.arrays, ANCHOR)
    assert reply.metrics == {"n": 1}


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"arrays": ArrayRecord()},
        {"a": ArrayRecord(), "b": ArrayRecord(), "m": MetricRecord()},
        {"arrays": ArrayRecord({"w": raw(b"junk")}), "metrics": MetricRecord()},
        {"error": ConfigRecord()},
    ],
    ids=["nothing", "no metrics", "two models", "no numpy file", "error without a reason"],
)
def test_what_cannot_be_read_becomes_an_error(records: Any) -> None:
    ((label, reply),) = unpack_replies(RecordDict(records))
    assert label is None
    assert reply.error


def test_a_lost_state_is_known_at_the_end_of_a_long_error() -> None:
    reply = pack_replies({None: RawReply(error="x" * 10_000 + " [state-lost 3] It is gone.")})
    ((_, read),) = unpack_replies(reply)
    assert who_lost(read.error) == 3
