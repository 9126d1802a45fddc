"""The base strategy: waiting for nodes, who is who, bad arguments, evaluation and stopping."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from numpy.testing import assert_allclose

from clients import FPFCClient
from fl_admm_strategies import FPFC, InProcessGrid, SmoothedSCAD
from fl_admm_strategies.runtime.members import discovery
from tests.support.federation import Federation, Mean, client_fn_of, initial_arrays
from tests.support.refusals import Warned, names, refused

MODEL = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})


def echo_app() -> ClientApp:
    """Client p of weight p + 1 adds 1 to the model; its loss is p, in training and evaluation."""
    app = ClientApp()

    def reply(message: Message, context: Context, content: dict[str, Any]) -> Message:
        client = int(context.node_config["partition-id"])
        content["metrics"] = MetricRecord({"loss": float(client), "num-examples": client + 1})
        return Message(RecordDict(content), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (w,) = message.content["arrays"].to_numpy_ndarrays()
        return reply(message, context, {"arrays": ArrayRecord({"w": Array(w + np.float32(1))})})

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return reply(message, context, {})

    return app


def identified_app(ids: Callable[[Context], Any], total: Any) -> ClientApp:
    """Return `echo_app` with a query handler that answers as told."""
    app = echo_app()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        size = total(context) if callable(total) else total
        identity = ConfigRecord({"client-ids": ids(context), "num-clients": size})
        return Message(RecordDict({"config": identity}), reply_to=message)

    return app


# --- Waiting for nodes --------------------------------------------------------------------------


def test_too_few_nodes_end_with_an_error_that_says_what_to_do(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="flwr")
    monkeypatch.setattr(discovery, "_REPORT_EVERY", 0.15)
    began = time.monotonic()
    with refused(TimeoutError, "2 clients", "2 nodes", 5, "num-supernodes=5", "node_timeout"):
        Mean(min_available_nodes=5, node_timeout=0.3).start(InProcessGrid(echo_app(), 2), MODEL)
    assert 0.3 <= time.monotonic() - began < 5
    assert 1 <= sum(names(line, "2 of 5") for line in caplog.messages) <= 2


class SilentGrid(Federation):
    """Node 4 does not say which clients it hosts."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [r for r in super().pull_messages(message_ids) if r.metadata.src_node_id != 4]


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 3])
def test_a_run_begins_without_a_silent_node(
    size: int, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "QUERY_TIMEOUT", 0.0)  # of later rounds
    app = identified_app(lambda context: [int(context.node_config["partition-id"])], size)
    strategy = Mean(node_timeout=1.0)
    strategy.start(SilentGrid(app, 3), MODEL, 1)
    assert strategy.client_ids == [0, 1]
    assert len(warned("begins without", "[4]")) == 1


def test_a_legacy_client_app_is_pointed_to_the_two_ways_out() -> None:
    grid = InProcessGrid(ClientApp(client_fn=client_fn_of(FPFCClient)), 2)
    with refused(RuntimeError, "clients.client_app", "LegacyServer"):
        FPFC(SmoothedSCAD(0.5)).start(grid, initial_arrays())


@pytest.mark.parametrize("garbage", ["three", [1.5, 2.0], [-1], [4, 4]], ids=repr)
def test_a_node_that_answers_the_query_with_garbage_is_no_client(garbage, warned):
    # Node 3 (partition 1) talks nonsense: it is not counted, and the error tells.
    def ids(context: Context) -> Any:
        partition = int(context.node_config["partition-id"])
        return garbage if partition == 1 else [partition]

    grid = InProcessGrid(identified_app(ids, 0), 3)
    with refused(TimeoutError, "2 clients", "3 nodes", "Node 3"):
        Mean(min_available_nodes=3, node_timeout=0.05).start(grid, MODEL)
    assert len(warned()) == len(warned("client-ids")) == 1
    # Where the others are enough, the run goes on without it.
    strategy = Mean(min_available_nodes=2)
    strategy.start(InProcessGrid(identified_app(ids, 0), 3), MODEL, 1)
    assert strategy.client_ids == [0, 2]


# --- Bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_rounds", 0, ValueError),
        ("num_rounds", 2.5, TypeError),
        ("evaluate_every", 0, ValueError),
        ("timeout", 0, ValueError),
        ("timeout", None, TypeError),
    ],
)
def test_start_refuses(name: str, value: Any, error: type[Exception]) -> None:
    grid = Federation(echo_app(), 2)
    with refused(error, name, value):
        Mean().start(grid, MODEL, **{name: value})
    assert grid.sent == []  # before a client hears of it


@pytest.mark.parametrize(
    ("arrays", "error", "named"),
    [
        ({"w": np.zeros(2)}, TypeError, "dict"),
        (None, TypeError, "NoneType"),
        (ArrayRecord(), ValueError, "empty"),
        (ArrayRecord([np.array([1, np.nan])]), ValueError, "'0'"),
        (ArrayRecord([np.array([np.inf])]), ValueError, "infinity"),
        (ArrayRecord([np.array(["a"])]), ValueError, "<U1"),
        (ArrayRecord([np.array([1j])]), ValueError, "complex128"),
    ],
    ids=["dict", "None", "empty", "NaN", "infinity", "text", "complex"],
)
def test_the_initial_model_must_be_usable(arrays: Any, error: type, named: str) -> None:
    grid = Federation(echo_app(), 2)
    with refused(error, named):
        Mean().start(grid, arrays)
    assert MessageType.TRAIN not in [kind for kind, _, _ in grid.sent]


def test_the_results_need_a_start() -> None:
    strategy = Mean()
    for read in (
        lambda: strategy.global_arrays,
        lambda: strategy.personal_arrays(0),
        strategy.state_dict,
    ):
        with refused(RuntimeError, "Mean", "start"):
            read()


def test_an_unknown_client_has_no_model() -> None:
    strategy = Mean()
    strategy.start(InProcessGrid(echo_app(), 3), MODEL, 1)
    assert_allclose(strategy.model_arrays("global", 3)["w"].numpy(), 1)
    with refused(KeyError, "client 9", "[2, 3, 4]"):
        strategy.personal_arrays(9)
    with refused(ValueError, "Mean", "personal", "global"):
        strategy.personal_arrays(3)


# --- Saved states -------------------------------------------------------------------------------


# --- Rounds -------------------------------------------------------------------------------------


def test_metrics_are_kept_by_client_and_averaged_by_examples() -> None:
    # Weights 1, 2, 3 and losses 0, 1, 2: (0*1 + 1*2 + 2*3) / 6 = 4/3.
    strategy = Mean()
    result = strategy.start(InProcessGrid(echo_app(), 3), MODEL, 2)
    assert [strategy.train_metrics[2][c]["loss"] for c in (2, 3, 4)] == [0.0, 1.0, 2.0]
    assert strategy.evaluate_metrics[1][4] == {"loss": 2.0, "num-examples": 3}
    for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        assert sorted(metrics) == [1, 2]
        assert metrics[2]["loss"] == pytest.approx(4 / 3, rel=1e-15)
    assert_allclose(result.arrays["w"].numpy(), 2)  # the clients add 1 in each round


def test_evaluation_every_so_many_rounds_and_after_the_last() -> None:
    strategy = Mean()
    strategy.start(InProcessGrid(echo_app(), 2), MODEL, 5, evaluate_every=2)
    assert sorted(strategy.evaluate_metrics) == [2, 4, 5]


def test_the_stop_rule_ends_the_run_after_an_evaluation() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    finished: list[int] = []

    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        seen.append((server_round, dict(metrics)))
        return server_round == 3

    strategy = Mean()
    grid, options = InProcessGrid(echo_app(), 2), {"evaluate_every": 2, "stop": stop}
    result = strategy.start(
        grid, MODEL, 10, **options, on_round=lambda server_round, _: finished.append(server_round)
    )
    assert [server_round for server_round, _ in seen] == finished == [1, 2, 3]
    assert seen[0][1]["train-loss"] == pytest.approx(2 / 3)  # weights 1, 2 and losses 0, 1
    assert "loss" not in seen[0][1]  # nothing was evaluated in round 1
    assert "loss" in seen[1][1]
    assert sorted(strategy.evaluate_metrics) == [2, 3]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert_allclose(result.arrays["w"].numpy(), 3)


def test_the_central_evaluation_gets_the_global_model() -> None:
    seen: dict[int, float] = {}

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen[server_round] = float(arrays["w"].numpy()[0])
        return MetricRecord({"norm": seen[server_round]})

    result = Mean().start(InProcessGrid(echo_app(), 2), MODEL, 2, evaluate_fn=evaluate_fn)
    assert seen == {0: 0.0, 1: 1.0, 2: 2.0}
    assert result.evaluate_metrics_serverapp[2]["norm"] == 2.0


def test_flowers_own_methods_do_a_round_for_a_loop_of_the_users_own() -> None:
    strategy, grid = Mean(), InProcessGrid(echo_app(), 3)
    messages = strategy.configure_train(1, MODEL, ConfigRecord(), grid)
    arrays, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert metrics is not None
    assert_allclose(arrays["w"].numpy(), 1)
    assert metrics["loss"] == pytest.approx(4 / 3)
    messages = strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)
    assert strategy.aggregate_evaluate(1, grid.send_and_receive(messages)) is not None
    strategy.configure_train(2, arrays, ConfigRecord(), grid)
    assert strategy.aggregate_train(2, []) == (None, None)
