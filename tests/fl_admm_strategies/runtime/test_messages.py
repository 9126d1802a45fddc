"""The layout of messages: FedAvg's own with one client, labelled records with several."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.testing import assert_array_equal

from fl_admm_strategies.runtime.messages import (
    Order,
    RawReply,
    from_array_record,
    pack_orders,
    pack_replies,
    parse_groups,
    split_groups,
    to_array_record,
    unpack_orders,
    unpack_replies,
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
    content = pack_orders({4: Order({"model": ANCHOR}, {"lr": 0.5})}, hosted=False)
    assert list(content) == ["arrays", "config"]
    assert_same_arrays(from_array_record(content["arrays"]), ANCHOR)
    assert dict(content["config"]) == {"lr": 0.5, "groups": "model:2"}


def test_further_groups_and_hosted_clients_have_keys_of_their_own() -> None:
    orders = {
        4: Order({"anchor": ANCHOR, "start": START}, {"lr": 0.5}),
        11: Order({"anchor": ANCHOR}, {"lr": 0.1}),
    }
    content = pack_orders(orders, hosted=True)
    assert set(content) == {"arrays@4", "arrays.start@4", "config@4", "arrays@11", "config@11"}
    assert content["config@4"]["groups"] == "anchor:2,start:1"
    unpacked = dict(unpack_orders(content))
    assert list(unpacked) == [4, 11]
    for client, order in orders.items():
        assert list(unpacked[client].groups) == list(order.groups)
        for group, arrays in order.groups.items():
            assert_same_arrays(unpacked[client].groups[group], arrays)
        assert unpacked[client].config == order.full_config()


def test_the_order_of_one_client_has_no_label() -> None:
    content = pack_orders({4: Order({"anchor": ANCHOR, "start": START})}, hosted=False)
    ((label, order),) = unpack_orders(content)
    assert label is None
    assert_same_arrays(order.groups["start"], START)


def test_an_order_of_plain_fedavg_is_one_group() -> None:
    content = RecordDict({"arrays": to_array_record(ANCHOR), "config": ConfigRecord({"lr": 0.5})})
    ((label, order),) = unpack_orders(content)
    assert label is None
    assert_same_arrays(next(iter(order.groups.values())), ANCHOR)
    assert [array.shape for array in order.flat()] == [(1, 2), ()]


def test_groups_reach_a_numpy_client_concatenated_and_are_cut_again() -> None:
    order = Order({"anchor": ANCHOR, "start": START})
    flat = order.flat()
    assert len(flat) == 3
    groups = split_groups(flat, order.full_config())
    assert list(groups) == ["anchor", "start"]
    assert_array_equal(groups["anchor"][0], ANCHOR["w"])
    assert_array_equal(groups["anchor"][1], ANCHOR["n"])
    assert_array_equal(groups["start"][0], START["w"])
    assert [len(arrays) for arrays in split_groups(flat, {}).values()] == [3]


def test_a_list_that_is_not_as_long_as_announced_is_refused() -> None:
    flat = Order({"anchor": ANCHOR}).flat()
    with pytest.raises(ValueError, match=r"'anchor:2,start:1' but sent 2 arrays.*same version"):
        split_groups(flat, {"groups": "anchor:2,start:1"})
    with pytest.raises(ValueError, match=r"'anchor:1' but sent 2 arrays"):
        split_groups(flat, {"groups": "anchor:1"})


def test_a_group_name_may_hold_a_colon() -> None:
    assert parse_groups({"groups": "a:b:2"}) == [("a:b", 2)]


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
