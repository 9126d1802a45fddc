"""Functions of the user's that aggregate metrics, as Flower's FedAvg takes them."""

from __future__ import annotations

from typing import Any

import flwr.serverapp.strategy as flowers
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients import client_app
from fl_admm_strategies import InProcessGrid
from tests.support.cases import CHEAP, grid_of
from tests.support.federation import Adding, Mean, initial_arrays
from tests.support.refusals import refused


def echo_app() -> ClientApp:
    """Return clients that report their partition as their loss, and know nothing of us."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        own = int(context.node_config["partition-id"])
        content = RecordDict({"metrics": MetricRecord({"loss": own, "num-examples": own + 1})})
        if message.metadata.message_type == MessageType.TRAIN:
            content["arrays"] = message.content["arrays"]
        return Message(content, reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


def test_they_get_and_give_what_flowers_own_do() -> None:
    def seen_by(strategy_class: Any, **options: Any) -> tuple[Any, list[Any]]:
        got: list[Any] = []

        def keep(records: list[RecordDict], weighted_by_key: str) -> MetricRecord:
            by_loss = sorted(records, key=lambda record: record["metrics"]["loss"])  # type: ignore
            got.append([{key: dict(record[key]) for key in record} for record in by_loss])
            return MetricRecord({"count": len(records), weighted_by_key: 1.0})

        strategy = strategy_class(
            train_metrics_aggr_fn=keep, evaluate_metrics_aggr_fn=keep, **options
        )
        result = strategy.start(InProcessGrid(echo_app(), 3), initial_arrays(), num_rounds=1)
        return (result.train_metrics_clientapp, result.evaluate_metrics_clientapp), got

    assert seen_by(Mean) == seen_by(flowers.FedAvg)


def test_replies_without_metrics_are_replies() -> None:
    class Silent(Adding):
        def fit(self, *args: Any) -> Any:
            arrays, num_examples, _ = super().fit(*args)
            return arrays, num_examples, {}

    def client_fn(context: Context) -> Any:
        return Silent(context).to_client()

    strategy, grid = Mean(), InProcessGrid(client_app(client_fn), 3)
    messages = strategy.configure_train(1, CHEAP.initial_arrays(), ConfigRecord(), grid)
    arrays, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert arrays is not None
    assert metrics == MetricRecord()


def test_what_is_no_such_function_is_refused() -> None:
    with refused(TypeError, "train_metrics_aggr_fn", 3):
        Mean(train_metrics_aggr_fn=3)  # type: ignore[arg-type]
    strategy = Mean(evaluate_metrics_aggr_fn=lambda records, key: {"loss": 1.0})  # type: ignore
    with refused(TypeError, "evaluate_metrics_aggr_fn", "dict", "MetricRecord"):
        strategy.start(grid_of(CHEAP), CHEAP.initial_arrays(), 1)
