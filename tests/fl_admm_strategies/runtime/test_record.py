"""What was measured, and that it is put back when a run goes on."""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord

from fl_admm_strategies.runtime.messages.records import ClientInstruction, Reply
from fl_admm_strategies.runtime.record import Record, Traffic

MODEL = ArrayRecord({"w": Array(np.zeros(3))})


def instruction(size: int) -> ClientInstruction:
    return ClientInstruction({"anchor": {"w": np.zeros(size)}, "start": {"w": np.zeros(2)}})


def two_rounds() -> Record:
    """Return what was measured of a handshake and two rounds, the second without an evaluation."""
    record = Record()
    record.begin(MODEL)
    record.count_down(0, {7: instruction(0)})
    for server_round in (1, 2):
        record.count_down(server_round, {2: instruction(3), 7: instruction(1)})
        record.count_up(server_round, {7: Reply({}, 1.0, {}, nbytes=12)})
        record.train_metrics.add(server_round, {2: {"loss": 0.5}, 7: {"loss": float("nan")}})
        record.trained(server_round, {"loss": 0.25 * server_round})
    record.evaluate_metrics.add(1, {2: {"loss": 2.0}})
    record.evaluated(1, {"loss": 2.0})
    record.evaluated(2, {})
    record.result.evaluate_metrics_serverapp[2] = MetricRecord({"accuracy": 0.5})
    return record


def test_the_bytes_of_a_round_are_added_up() -> None:
    record = two_rounds()
    assert record.traffic == {0: Traffic(16, 0), 1: Traffic(64, 12), 2: Traffic(64, 12)}
    record.count_down(2, {9: instruction(0)})  # a handshake with a joining client
    assert record.traffic[2] == Traffic(80, 12)


def test_a_round_without_a_mean_is_not_in_the_result() -> None:
    record = two_rounds()
    assert record.result.train_metrics_clientapp == {
        1: MetricRecord({"loss": 0.25}),
        2: MetricRecord({"loss": 0.5}),
    }
    assert record.result.evaluate_metrics_clientapp == {1: MetricRecord({"loss": 2.0})}


def test_what_stop_rules_get_is_the_round_as_a_whole() -> None:
    assert two_rounds().measured(1) == {"train-loss": 0.25, "loss": 2.0}
    assert two_rounds().measured(2) == {"train-loss": 0.5, "server-accuracy": 0.5}
    assert two_rounds().measured(5) == {}


def test_entries_are_json_that_is_put_back() -> None:
    expected, record = two_rounds(), Record()
    entries = [json.loads(json.dumps(expected.entry(r))) for r in (0, 1, 2)]
    record.begin(MODEL)
    record.load(entries)
    assert record.past_rounds == [1, 2]
    assert record.traffic == expected.traffic
    assert repr(record.train_metrics) == repr(expected.train_metrics)  # a NaN is not itself
    assert record.evaluate_metrics == expected.evaluate_metrics
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        assert getattr(record.result, name) == getattr(expected.result, name)
    central = record.result.evaluate_metrics_serverapp
    assert central == expected.result.evaluate_metrics_serverapp
    assert isinstance(record.traffic[1], Traffic)


def test_a_new_run_begins_with_nothing() -> None:
    record = two_rounds()
    record.begin(MODEL)
    assert (record.traffic, record.train_metrics, record.evaluate_metrics) == ({}, {}, {})
    assert record.past_rounds == []
    assert record.result.arrays == MODEL
    assert record.result.train_metrics_clientapp == {}
