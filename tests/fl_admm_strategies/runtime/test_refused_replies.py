"""What happens to replies on their way: a refused one is as if the client was not sampled.

That a reply is refused is the runtime's doing, so one method that costs little is enough here.
What it leaves behind in the state of every method is seen in tests/contract/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MessageType, RecordDict
from numpy.typing import NDArray

from clients import client_app
from fl_admm_strategies import StatefulStrategy
from tests.support.cases import CHEAP, NUM_CLIENTS, grid_of, run
from tests.support.federation import (
    Federation,
    assert_same_bits,
    client_fn_of,
    node_of,
    not_asking,
)
from tests.support.refusals import Warned

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


def unreadable(reply: Message) -> None:
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"no numpy file")
    reply.content["arrays"][list(reply.content["arrays"])[-1]] = array


# How the victim's reply is spoilt, and a word that the log line must hold.
SPOILT: dict[str, tuple[Callable[[Message], object], str]] = {
    "one array more": (change_arrays(lambda a: a.update(extra=np.zeros(3))), "extra"),
    "no arrays": (lambda reply: reply.content.pop("arrays"), "arrays"),
    "unreadable bytes": (unreadable, "read"),
    "NaN examples": (set_num_examples(float("nan")), "num-examples"),
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


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_reply_is_as_if_the_client_was_not_sampled(kind: str, warned: Warned) -> None:
    spoil, word = SPOILT[kind]
    strategy = run(CHEAP, grid_of(CHEAP, spoil={2: spoil_one(spoil)}), 2, strategy=new())
    assert len(warned()) == len(warned(f"client {VICTIM}", "round 2", word)) == 1
    expected = run_without_victim()
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 4, 5]
    # What it holds may be another state than the one that the server knows of.
    assert not strategy.membership.has_current_state(VICTIM)
    assert strategy.membership.has_current_state(0)


def foreign_reply(node: int, reply: Message, *, failed: bool = False) -> Message:
    """Return another node's reply to a message that it did not get."""
    request = Message(RecordDict(), node, MessageType.TRAIN, group_id="2")
    if failed:
        return Message(Error(2, "out of memory"), reply_to=request)
    return Message(RecordDict(dict(reply.content)), reply_to=request)


@pytest.mark.parametrize("failed", [False, True])
def test_the_reply_of_a_client_that_was_not_asked_is_ignored(failed: bool, warned: Warned) -> None:
    def intrude(replies: list[Message]) -> list[Message]:
        return [foreign_reply(node_of(VICTIM), replies[0], failed=failed), *replies]

    strategy = run(CHEAP, grid_of(CHEAP, spoil={2: intrude}), 2, strategy=new([VICTIM]))
    assert len(warned()) == len(warned(f"client {VICTIM}", "round 2")) == 1
    assert not failed or warned("out of memory")
    assert_same_bits(strategy.state_dict(), run_without_victim().state_dict())


@pytest.mark.parametrize("how", ["raises", "speaks for another"])
def test_a_hosted_client_fails_alone(how: str, warned: Warned) -> None:
    def spoil(replies: list[Message]) -> list[Message]:
        (reply,) = (own for own in replies if VICTIM in own.content["clients@0"]["client-ids"])
        ids = reply.content["clients@0"]["client-ids"]
        ids[ids.index(VICTIM)] = 0  # the node of clients 3, 4 and 5 uses another node's id
        return replies

    when = {VICTIM: [2]} if how == "raises" else {}
    app = client_app(client_fn_of(CHEAP.client_class, when), num_clients=NUM_CLIENTS)
    grid = Federation(app, 2, spoil={2: spoil} if how != "raises" else {})
    strategy = run(CHEAP, grid, 2, strategy=new())
    assert len(warned(f"client {VICTIM}")) == len(warned(f"client {VICTIM}", "round 2")) == 1
    assert_same_bits(strategy.state_dict(), run_without_victim().state_dict())
    assert sorted(strategy.train_metrics[2]) == [0, 1, 2, 4, 5]
