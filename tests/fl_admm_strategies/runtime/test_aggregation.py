"""Functions of the user's that aggregate metrics, as Flower's FedAvg takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flwr.serverapp.strategy as flowers
import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients import client_app
from fl_admm_strategies import InProcessGrid, StatefulStrategy
from tests.support.cases import CHEAP, Case, case_of, each_case, grid_of
from tests.support.federation import Adding, Mean, initial_arrays
from tests.support.pace import fast
from tests.support.refusals import refused


def spread(records: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return the range of the losses, the examples of all, and what was in a record."""
    found: list[Any] = [record["metrics"] for record in records]
    losses = [own.get("loss", 0.0) for own in found]  # FedEASE has none in training
    return MetricRecord(
        {
            "spread": max(losses) - min(losses),
            "examples": sum(own[weighted_by_key] for own in found),
            "each": sorted(losses),
            "uploads": sum(len(record.array_records) for record in records),
        }
    )


def of_each(name: str, clients: Mapping[int, Mapping[str, float]]) -> list[float]:
    return [metrics[name] for metrics in clients.values()]


@each_case
def test_every_method_takes_fedavgs_functions(case: Case) -> None:
    strategy = case.strategy(seed=1, train_metrics_aggr_fn=spread, evaluate_metrics_aggr_fn=spread)
    told: dict[int, Mapping[str, float]] = {}
    asked: dict[int, Mapping[str, float]] = {}

    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        asked[server_round] = metrics
        return False

    result = strategy.start(
        grid_of(case), case.initial_arrays(), 2, on_round=told.__setitem__, stop=stop
    )
    for server_round, own in strategy.evaluate_metrics.items():
        losses = of_each("loss", own)
        expected = {
            "spread": max(losses) - min(losses),
            "examples": sum(of_each("num-examples", own)),
            "each": sorted(losses),
            "uploads": 0,
        }
        assert dict(result.evaluate_metrics_clientapp[server_round]) == expected
        assert told[server_round].items() >= expected.items()
        assert asked[server_round] == told[server_round]
    for server_round, own in strategy.train_metrics.items():
        means = result.train_metrics_clientapp[server_round]
        losses = [metrics.get("loss", 0.0) for metrics in own.values()]
        assert means["spread"] == np.ptp(losses)
        again = case.name == "FedEASE" and server_round > 1  # its clients upload once
        assert means["uploads"] == (len(own) if strategy.upload_spec() and not again else 0)


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


def test_means_are_of_what_flowers_are() -> None:
    # 0, 1, 2 weighted by 1, 2, 3: 8/6, and nothing of the numbers of examples.
    for strategy in (Mean(), flowers.FedAvg()):
        result = strategy.start(InProcessGrid(echo_app(), 3), initial_arrays(), num_rounds=1)
        for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
            assert dict(metrics[1]) == {"loss": pytest.approx(8 / 6)}


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


# --- The headline's metrics under their plain names -----------------------------------------------


def mean_accuracy(records: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return what projects make of FedAvg's clients' metrics."""
    found: list[Any] = [record["metrics"] for record in records]
    total = sum(own[weighted_by_key] for own in found)
    mean = sum(own[weighted_by_key] * own.get("accuracy", 0.0) for own in found) / total
    return MetricRecord({"accuracy": mean})


KINDS = ["FedADMM", "Ditto", "FLAME", "FPFC", "PerFedAvg"]
each_kind = pytest.mark.parametrize("name", fast(["FedADMM", "Ditto"], KINDS))


def headline_accuracy(strategy: StatefulStrategy, server_round: int) -> float:
    """Return the mean over the clients, who report it once, under its model's name."""
    own = strategy.evaluate_metrics[server_round].values()
    assert not any("accuracy" in metrics for metrics in own)
    name = f"{next(iter(strategy.kinds))}-accuracy"
    mean = sum(m["num-examples"] * m[name] for m in own) / sum(m["num-examples"] for m in own)
    assert mean > 0
    return mean


@each_kind
@pytest.mark.parametrize("function", fast([mean_accuracy], [None, mean_accuracy]))
def test_the_headlines_accuracy_has_its_plain_name_too(name: str, function: Any) -> None:
    case, asked = case_of(name), dict[int, Mapping[str, float]]()
    strategy = case.strategy(seed=1, evaluate_metrics_aggr_fn=function)

    def stop(server_round: int, metrics: Mapping[str, float]) -> bool:
        asked[server_round] = metrics
        return False

    result = strategy.start(grid_of(case), case.initial_arrays(), 2, stop=stop)
    found = result.evaluate_metrics_clientapp[2]["accuracy"]
    assert found == pytest.approx(headline_accuracy(strategy, 2))
    assert asked[2]["accuracy"] == pytest.approx(found, abs=0.2)  # without extremes
