"""No reply is believed before it was checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_admm_strategies.runtime.members.membership import Membership
from fl_admm_strategies.runtime.messages.records import (
    ClientInstruction,
    ClientReply,
    RawReply,
    Reply,
)
from fl_admm_strategies.runtime.messages.stamp import made_by
from fl_admm_strategies.runtime.trust.validation import Accepted, ReplyValidation, check_reply
from tests.support.refusals import Warned, names, refused

SPEC = {"w": ((2,), np.dtype(np.float32)), "n": ((), np.dtype(np.int64))}


def arrays(**changes: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    all_of_them = {"n": np.array(3), "w": np.zeros(2, np.float32)} | changes
    return {name: array for name, array in all_of_them.items() if array is not None}


def raw(num_examples: Any = 5, **changes: Any) -> RawReply:
    return RawReply(arrays(**changes), {"num-examples": num_examples, "loss": 0.5})


# --- One reply ----------------------------------------------------------------------------------


def test_a_good_reply_has_its_arrays_in_the_order_of_the_model() -> None:
    reply = check_reply(
        RawReply(arrays(), {"num-examples": 5, "loss": 0.5, "done": True, "name": "x", "l": [1]}),
        SPEC,
        "num-examples",
    )
    assert list(reply.arrays) == ["w", "n"]
    assert reply.num_examples == 5.0
    assert reply.metrics == {"num-examples": 5, "loss": 0.5}  # numbers only


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1])
def test_a_metric_may_be_any_number_of_64_bits(value: int) -> None:
    reply = RawReply(arrays(), {"num-examples": 5, "count": value})
    assert check_reply(reply, SPEC).metrics["count"] == value


def test_a_length_may_be_any_where_only_the_client_knows_it() -> None:
    spec = {"w": ((-1, 2), np.dtype(np.float32))}
    for count in (0, 1, 7):
        reply = RawReply({"w": np.zeros((count, 2), np.float32)}, {"num-examples": 5})
        assert check_reply(reply, spec).arrays["w"].shape == (count, 2)
    for shape in ((2,), (3, 1), (1, 3, 2)):
        reply = RawReply({"w": np.zeros(shape, np.float32)}, {"num-examples": 5})
        with refused(ValueError, shape, "(-1, 2)"):
            check_reply(reply, spec)


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (RawReply(error="KeyError: 'x'"), "KeyError: 'x'"),
        (raw(w=None, v=np.zeros(2)), "['v']"),
        (raw(extra=np.zeros(1)), "['extra']"),
        (raw(w=np.zeros(3, np.float32)), "(3,)"),
        (raw(w=np.zeros(2)), "float64"),
        (raw(w=np.array([1, np.nan], np.float32)), "'w'"),
        (raw(w=np.array([1, -np.inf], np.float32)), "'w'"),
        (RawReply(None, {"num-examples": 5}), "['w', 'n']"),
        (RawReply(arrays(), {"loss": 1.0}), "num-examples"),
        (raw("5"), "num-examples"),
        (raw(True), "num-examples"),
        (
            RawReply(arrays(), {"num-examples": 5, **dict.fromkeys(map(str, range(300)), 1)}),
            301,
        ),
        (RawReply(arrays(), {"num-examples": 5, "x" * 101: 1.0}), 101),
        (raw(0), "0"),
        (raw(-5), "-5"),
        (raw(math.nan), "nan"),
        (raw(math.inf), "inf"),
        (raw(2**53 + 1), 2**53 + 1),
        (raw(2**63), "num-examples"),
        (RawReply(arrays(), {"num-examples": 5, "loss": 2**63}), "loss"),
        (RawReply(arrays(), {"num-examples": 5, "loss": -(2**63) - 1}), "loss"),
    ],
)
def test_a_reply_that_cannot_be_used_says_why(reply: RawReply, named: object) -> None:
    with refused(ValueError, named):
        check_reply(reply, SPEC)


def test_an_evaluation_needs_no_arrays_and_may_have_no_data() -> None:
    assert check_reply(RawReply(None, {"num-examples": 3, "loss": 2.0}), None) == (
        Reply({}, 3.0, {"num-examples": 3, "loss": 2.0})
    )
    nothing = RawReply(None, {"num-examples": 0, "loss": 2.0})
    assert check_reply(nothing, None) == Reply({}, 0.0, {})


# --- A phase ------------------------------------------------------------------------------------


def intake(*clients: int, known: tuple[int, ...] = ()) -> ReplyValidation:
    members = Membership()
    members.reset(clients, 0)
    members.accept(known, 1)
    own = ReplyValidation(members)
    own.sent = {client: ClientInstruction({}) for client in clients}
    return own


def accept(own: ReplyValidation, *replies: ClientReply) -> Accepted:
    return own.accept(4, replies, SPEC)


def test_a_second_reply_refuses_the_first_whichever_is_good() -> None:
    for replies in ([(1, raw()), (1, raw(-1))], [(1, raw(-1)), (1, raw())]):
        assert accept(intake(1), *replies).replies == {}


def test_a_client_that_lost_its_state_is_told_apart(warned: Warned) -> None:
    # Client 2 has nothing to lose yet: it is refused like any other.
    own = intake(1, 2, 3, known=(1, 3))
    gone = RawReply(error="ValueError: [state-lost 1] The server expects ...")
    replies, lost = accept(own, (1, gone), (2, gone), (3, raw()))
    assert list(replies) == [3]
    assert lost == [1]
    assert len(warned()) == len(warned("round 4", "client 2", "[state-lost 1]")) == 1


def test_whose_replies_are_wanted_is_said_until_one_was_usable() -> None:
    members = Membership()
    members.reset([1], 0)
    own = ReplyValidation(members, "FPFC")
    failed = RawReply(error="OSError: disk full")
    right = raw()
    right = replace(right, metrics={**right.metrics, **made_by("FPFC")})
    said = []
    for one in (failed, right, failed):
        own.sent = {1: ClientInstruction({})}
        accept(own, (1, one))
        said.append(own.explain())
    assert names(said[0], "client 1", "OSError: disk full", "FPFCClient")
    assert names(said[2], "client 1", "OSError: disk full")
    assert "FPFCClient" not in said[2]


def test_only_wrong_clients_is_said_when_each_answer_came_from_one() -> None:
    def of(method: str) -> RawReply:
        reply = raw()
        return replace(reply, metrics={**reply.metrics, **made_by(method)})

    members = Membership()
    members.reset([1, 2, 3], 0)
    own = ReplyValidation(members, "FPFC")
    found = []
    for third in (of("FedADMM"), of("FPFC"), RawReply(error="OSError: disk full")):
        own.sent = {client: ClientInstruction({}) for client in (1, 2, 3)}
        accept(own, (1, of("FedADMM")), (2, of("FedADMM")), (3, third))
        found.append(own.all_failed_alike)
    assert found == [True, False, False]
