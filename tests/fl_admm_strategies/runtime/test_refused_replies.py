"""What happens to replies on their way: a refused one is as if the client was not sampled.

That a reply is refused is the runtime's doing, so one method that costs little is enough here.
What it leaves behind in the state of every method is seen in tests/contract/test_faults.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from numpy.typing import NDArray

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from tests.support.cases import CHEAP, NUM_CLIENTS, grid_of, run
from tests.support.federation import (
    WatchedGrid,
    assert_same_bits,
    client_fn_of,
    node_of,
    not_asking,
    raising_client_fn,
    warnings_in,
)

VICTIM = 3


def change_arrays(change: Callable[[dict[str, NDArray[Any]]], None]) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        change(arrays)
        reply.content["arrays"] = ArrayRecord({k: Array(v) for k, v in arrays.items()})

    return spoil


def set_num_examples(value: float) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content["metrics"]["num-examples"] = value

    return spoil


def put(value: float) -> Callable[[dict[str, NDArray[Any]]], None]:
    def change(arrays: dict[str, NDArray[Any]]) -> None:
        next(iter(arrays.values())).flat[-2] = value

    return change


def last(changed: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Message], None]:
    def change(arrays: dict[str, NDArray[Any]]) -> None:
        name = list(arrays)[-1]
        arrays[name] = changed(arrays[name])

    return change_arrays(change)


def unreadable(reply: Message) -> None:
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"no numpy file")
    reply.content["arrays"][list(reply.content["arrays"])[-1]] = array


# How the victim's reply is spoilt, and a word that the log line must hold.
SPOILT: dict[str, tuple[Callable[[Message], None], str]] = {
    "NaN": (change_arrays(put(np.nan)), "' holds NaN"),
    "infinity": (change_arrays(put(-np.inf)), "' holds NaN or infinity"),
    "shape": (last(lambda array: array[:2]), "' has shape (2,"),
    "dtype": (last(lambda array: array.astype(np.float16)), "dtype float16, expected"),
    "name": (
        change_arrays(lambda a: a.update(extra=a.popitem()[1])),
        "and have ['extra'] (1), which was",
    ),
    "one array less": (change_arrays(lambda a: a.popitem()), "lack ["),
    "one array more": (
        change_arrays(lambda a: a.update(extra=np.zeros(3))),
        "have ['extra'] (1), which was",
    ),
    "no arrays": (lambda reply: reply.content.pop("arrays"), "arrays lack ["),
    "unreadable bytes": (unreadable, "cannot be read"),
    "zero examples": (set_num_examples(0), "'num-examples' is 0"),
    "negative examples": (set_num_examples(-5), "'num-examples' is -5"),
    "NaN examples": (set_num_examples(float("nan")), "'num-examples' is nan"),
    "infinitely many examples": (set_num_examples(float("inf")), "'num-examples' is inf"),
    "no examples": (lambda reply: reply.content["metrics"].pop("num-examples"), "lack the number"),
    "no metrics": (lambda reply: reply.content.pop("metrics"), "0 MetricRecords"),
}


def of_victim(reply: Message) -> bool:
    return bool(reply.metadata.src_node_id == node_of(VICTIM))


def spoil_one(spoil: Callable[[Message], None]) -> Callable[[list[Message]], list[Message]]:
    def spoil_all(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if of_victim(reply):
                spoil(reply)
        return replies

    return spoil_all


def new(absent: Collection[int] = ()) -> StatefulStrategy:
    return not_asking(CHEAP.strategy(seed=1, fraction_evaluate=0), {2: absent})


@cache
def run_without_victim() -> StatefulStrategy:
    return run(CHEAP, grid_of(CHEAP), 2, strategy=new([VICTIM]))


def assert_as_if_not_sampled(
    grid: WatchedGrid, records: list[logging.LogRecord], reason: str
) -> None:
    strategy = run(CHEAP, grid, 2, strategy=new())
    (line,) = warnings_in(records)
    assert f"client {VICTIM} " in line
    assert "round 2" in line
    assert reason in line
    expected = run_without_victim()
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 4, 5]
    # What it holds may be another state than the one that the server knows of.
    assert not strategy.membership.has_current_state(VICTIM)
    assert strategy.membership.has_current_state(0)


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_reply_is_as_if_the_client_was_not_sampled(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = SPOILT[kind]
    assert_as_if_not_sampled(grid_of(CHEAP, spoil={2: spoil_one(spoil)}), caplog.records, reason)


def test_two_replies_of_a_client_are_both_refused(caplog: pytest.LogCaptureFixture) -> None:
    def twice(replies: list[Message]) -> list[Message]:
        return replies + [reply for reply in replies if of_victim(reply)]

    assert_as_if_not_sampled(grid_of(CHEAP, spoil={2: twice}), caplog.records, "more than once")


def test_a_lost_reply_is_as_if_the_client_was_not_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lose(replies: list[Message]) -> list[Message]:
        return [reply for reply in replies if not of_victim(reply)]

    assert_as_if_not_sampled(grid_of(CHEAP, spoil={2: lose}), caplog.records, "no reply")


def test_a_client_that_raises_is_as_if_it_was_not_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = client_app(raising_client_fn(CHEAP.client_class, {VICTIM: [2]}))
    grid = WatchedGrid(app, NUM_CLIENTS)
    assert_as_if_not_sampled(grid, caplog.records, "OSError: the disk is full")


def foreign_reply(node: int, reply: Message, *, failed: bool = False) -> Message:
    """Return another node's reply to a message that it did not get."""
    request = Message(RecordDict(), node, MessageType.TRAIN, group_id="2")
    if failed:
        return Message(Error(2, "out of memory"), reply_to=request)
    return Message(RecordDict(dict(reply.content)), reply_to=request)


@pytest.mark.parametrize("failed", [False, True])
def test_the_reply_of_a_client_that_was_not_asked_is_ignored(
    failed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def intrude(replies: list[Message]) -> list[Message]:
        return [foreign_reply(node_of(VICTIM), replies[0], failed=failed), *replies]

    strategy = run(CHEAP, grid_of(CHEAP, spoil={2: intrude}), 2, strategy=new([VICTIM]))
    (line,) = warnings_in(caplog.records)
    assert f"client {VICTIM} " in line
    assert "round 2" in line
    assert ("out of memory" if failed else "not asked") in line
    assert_same_bits(strategy.state_dict(), run_without_victim().state_dict())


def test_the_reply_of_an_unknown_node_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_of(CHEAP, spoil={2: lambda replies: [foreign_reply(999, replies[0]), *replies]})
    strategy = run(CHEAP, grid, 2, strategy=new())
    (line,) = warnings_in(caplog.records)
    assert "round 2" in line
    assert "999" in line
    expected = run(CHEAP, grid_of(CHEAP), 2, strategy=new())
    assert_same_bits(strategy.state_dict(), expected.state_dict())


@pytest.mark.parametrize("how", ["raises", "is spoilt", "speaks for another"])
def test_a_hosted_client_fails_alone(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(replies: list[Message]) -> list[Message]:
        (reply,) = (own for own in replies if VICTIM in own.content["clients@0"]["client-ids"])
        place = reply.content["clients@0"]["client-ids"].index(VICTIM)
        if how == "is spoilt":
            reply.content["metrics@0"]["num-examples"][place] = -1
        else:  # the node of clients 3, 4 and 5 uses an id that is another node's
            reply.content["clients@0"]["client-ids"][place] = 0
        return replies

    when = {VICTIM: [2]} if how == "raises" else {}
    app = client_app(raising_client_fn(CHEAP.client_class, when), num_clients=NUM_CLIENTS)
    grid = WatchedGrid(app, 2, spoil={2: spoil} if how != "raises" else {})
    strategy = run(CHEAP, grid, 2, strategy=new())
    lines = [line for line in warnings_in(caplog.records) if f"client {VICTIM} " in line]
    assert len(lines) == 1
    assert "round 2" in lines[0]
    assert_same_bits(strategy.state_dict(), run_without_victim().state_dict())
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 4, 5]


def put_nan(content: RecordDict) -> None:
    (name, array), *_ = content["arrays@0"].items()
    numbers = array.numpy()
    numbers[0] = np.nan
    content["arrays@0"][name] = Array(numbers)


def put_rows(content: RecordDict) -> None:
    (name, array), *_ = content["arrays@0"].items()
    content["arrays@0"][name] = Array(array.numpy()[:2])


def put_halves(content: RecordDict) -> None:
    (name, array), *_ = content["arrays@0"].items()
    content["arrays@0"][name] = Array(array.numpy().astype(np.float16))


# What is done to the reply of the node of clients 3, 4 and 5, whom it concerns, and a word that the
# log must hold of each.
SPOILT_BLOCKS: dict[str, tuple[Callable[[RecordDict], object], list[int], str]] = {
    "NaN": (put_nan, [3], "' holds NaN"),
    "rows": (put_rows, [3, 4, 5], "for 3 clients"),
    "dtype": (put_halves, [3, 4, 5], "dtype float16, expected"),
    "no arrays": (lambda content: content.pop("arrays@0"), [3, 4, 5], "arrays lack ["),
    "no metrics": (lambda content: content.pop("metrics@0"), [3, 4, 5], "without metrics"),
    "no clients": (lambda content: content.pop("clients@0"), [3, 4, 5], "clients of a block are"),
    "nothing": (lambda content: content.clear(), [3, 4, 5], "0 MetricRecords"),
    "twice": (
        lambda content: content.update(
            {key.replace("@0", "@1"): record for key, record in content.items()}
        ),
        [3, 4, 5],
        "more than once",
    ),
}


@pytest.mark.parametrize("how", SPOILT_BLOCKS)
def test_a_spoilt_block_is_as_if_its_clients_were_not_sampled(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, clients, reason = SPOILT_BLOCKS[how]

    def spoil_last(replies: list[Message]) -> list[Message]:
        spoil(replies[-1].content)
        return replies

    app = client_app(client_fn_of(CHEAP.client_class), num_clients=NUM_CLIENTS)
    strategy = run(CHEAP, WatchedGrid(app, 2, spoil={2: spoil_last}), 2, strategy=new())
    lines = warnings_in(caplog.records)
    assert len(lines) == len(clients)
    for client, line in zip(clients, lines, strict=True):
        assert f"round 2: client {client} refused: " in line
        assert reason in line
    expected = run(CHEAP, grid_of(CHEAP), 2, strategy=new(clients))
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics


def test_ids_that_a_node_does_not_host_are_named_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def speak_for_many(replies: list[Message]) -> list[Message]:
        content = replies[-1].content
        content["clients@1"] = ConfigRecord(
            {"client-ids": list(range(1000)), "error": ["x"] * 1000}
        )
        return replies

    app = client_app(client_fn_of(CHEAP.client_class), num_clients=NUM_CLIENTS)
    run(CHEAP, WatchedGrid(app, 2, spoil={2: speak_for_many}), 2, strategy=new())
    lines = warnings_in(caplog.records)
    assert len(lines) == 4  # its own three have replied twice
    assert "for ['client 0', 'client 1', 'client 2', 'client 6'" in lines[0]
    assert "(997), which this run does not know there" in lines[0]
