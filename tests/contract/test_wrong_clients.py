"""Clients of another method, or of none: what every strategy and every client promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from clients import SGDClient, client_app
from fl_admm_strategies import (
    InProcessGrid,
    StatefulStrategy,
    made_by,
)
from fl_admm_strategies.runtime.messages import stamp as maker
from tests.support.cases import CASES, CHEAP, NUM_CLIENTS, Case, case_of
from tests.support.federation import (
    ClientFn,
    WatchedGrid,
    client_fn_of,
    dataset,
    initial_arrays,
    make_client,
    make_model,
    node_of,
)
from tests.support.legacy import run_legacy
from tests.support.refusals import Warned, refused


class Plain(NumPyClient):
    """Sends back what a strategy wants, but trains nothing and knows no method."""

    def __init__(self, context: Context, strategy: StatefulStrategy, stamp: dict[str, int]) -> None:
        self.strategy, self.stamp = strategy, stamp
        self.client = int(context.node_config["partition-id"])

    def get_properties(self, config: Any) -> Any:
        return {"client-id": self.client, "num-clients": NUM_CLIENTS}

    def fit(self, parameters: Any, config: Any) -> Any:
        handshake = config.get("handshake")
        spec = self.strategy.handshake_spec() if handshake else self.strategy.upload_spec()
        # A length of -1 may be any.
        arrays = [np.zeros(np.maximum(shape, 1), dtype) for shape, dtype in spec.values()]
        return arrays, 10, {"loss": 1.0, "curvature": 1.0, **self.stamp}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 1.0, 10, {"accuracy": 0.5, **self.stamp}


Engine = Callable[[Case, StatefulStrategy, ClientFn, int], object]


def current(num_nodes: int) -> Engine:
    def start(case: Case, strategy: StatefulStrategy, client_fn: ClientFn, rounds: int) -> object:
        num_clients = None if num_nodes == NUM_CLIENTS else NUM_CLIENTS
        grid = WatchedGrid(client_app(client_fn, num_clients=num_clients), num_nodes)
        return strategy.start(grid, case.initial_arrays(), rounds)

    return start


def legacy(case: Case, strategy: StatefulStrategy, client_fn: ClientFn, rounds: int) -> object:
    grid = InProcessGrid(ClientApp(client_fn=client_fn), NUM_CLIENTS)
    return run_legacy(grid, strategy, case.initial_arrays(), rounds)


ENGINES: dict[str, Engine] = {
    "current": current(NUM_CLIENTS),
    "packed": current(2),
    "legacy": legacy,
}


STAMPED = [case for case in CASES if case.strategy().method is not None]
each_stamped_case = pytest.mark.parametrize("case", STAMPED, ids=lambda case: case.name)


each_stamped_case_and_engine = pytest.mark.parametrize(
    ("case", "engine"),
    [
        *(pytest.param(case, ENGINES["current"], id=case.name) for case in STAMPED),
        # What the engines do is the runtime's: a method that shakes hands, and one that does not.
        *(
            pytest.param(case_of(name), ENGINES[engine], id=f"{name}-{engine}")
            for name in ("FedGiA-gram", "FedProx")
            for engine in ("packed", "legacy")
        ),
    ],
)


@each_stamped_case_and_engine
def test_plain_clients_end_the_run_in_its_first_round(case: Case, engine: Engine) -> None:
    strategy = case.strategy(seed=1)

    def client_fn(context: Context) -> Any:
        return Plain(context, strategy, {}).to_client()

    with refused(RuntimeError, f"{type(strategy).__name__}Client"):
        engine(case, strategy, client_fn, 2)
    assert strategy.last_round == (0 if case.shakes_hands else 1)
    assert strategy.train_metrics == {}


@each_stamped_case_and_engine
def test_the_clients_of_another_method_are_refused_by_name(case, engine, warned):
    strategy, wrong = case.strategy(seed=1), (1, 4)

    def client_fn(context: Context) -> Any:
        if int(context.node_config["partition-id"]) not in wrong:
            return make_client(case.client_class, context).to_client()
        return Plain(context, strategy, made_by("FedSomething")).to_client()

    engine(case, strategy, client_fn, 2)
    if case.shakes_hands:
        assert strategy.client_ids == [c for c in range(NUM_CLIENTS) if c not in wrong]
        assert all(warned("round 0", f"client {client}", "FedSomething") for client in wrong)
        return
    for server_round in (1, 2):  # in training and in evaluation
        for client in wrong:
            assert len(warned(f"round {server_round}", f"client {client}", "FedSomething")) == 2
    assert len(warned()) == 8
    right = [c for c in range(NUM_CLIENTS) if c not in wrong]
    for metrics in (strategy.train_metrics, strategy.evaluate_metrics):
        assert {r: list(clients) for r, clients in metrics.items()} == {1: right, 2: right}


@each_stamped_case
def test_a_client_says_which_strategy_it_belongs_to(case: Case) -> None:
    strategy = case.strategy()
    name = type(strategy).__name__
    other = case_of("FPFC" if name == "Ditto" else "Ditto")
    client: Any = make_client(case.client_class, Context(1, 2, {}, RecordDict(), {}))
    for call in (client.fit, client.evaluate):
        with refused(ValueError, type(client).__name__, name, f"{other.name}Client"):
            call([], made_by(other.name))
        with refused(ValueError, type(client).__name__, name, "FedAvg"):
            call([], {"lr": 0.1})


def test_the_client_of_fedavg_refuses_other_strategies() -> None:
    client: Any = make_client(SGDClient, Context(1, 2, {}, RecordDict(), {}))
    for call in (client.fit, client.evaluate):
        with refused(ValueError, "SGDClient", "FedAvg", "FPFCClient"):
            call([], made_by("FPFC"))


def test_a_single_wrong_client_of_several_does_not_end_the_run() -> None:
    """Else one that is drawn alone in round 1 could do so at will."""
    case = case_of("FedProx")
    strategy = case.strategy(fraction_train=0.1, fraction_evaluate=0, seed=1)
    drawn = case.strategy(fraction_train=0.1, fraction_evaluate=0, seed=1)
    current(NUM_CLIENTS)(case, drawn, client_fn_of(case.client_class), 2)
    (first,), (second,) = drawn.train_metrics[1], drawn.train_metrics[2]
    assert first != second

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == first:
            return Plain(context, strategy, {}).to_client()
        return make_client(case.client_class, context).to_client()

    current(NUM_CLIENTS)(case, strategy, client_fn, 2)
    assert list(strategy.train_metrics) == [2]


# --- Versions -----------------------------------------------------------------------------------


def test_another_version_is_refused_on_both_sides() -> None:
    with refused(ValueError, "version 2", "FPFC", 1):
        maker.check_reply_maker({"made-by.FPFC": 2}, "FPFC")
    client: Any = make_client(case_of("FPFC").client_class, Context(1, 2, {}, RecordDict(), {}))
    with refused(ValueError, "version 2", "FPFCClient", 1):
        client.fit([], {"made-by.FPFC": 2})


def test_what_is_compatible_is_decided_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "is_compatible", lambda version: version == 7)
    case = case_of("FPFC")
    strategy, client_fn = case.strategy(), client_fn_of(case.client_class)
    with refused(RuntimeError, "version 1", "FPFC"):
        current(NUM_CLIENTS)(case, strategy, client_fn, 1)


# --- Strategies for any client, clients for any strategy ----------------------------------------


def test_a_strategy_says_which_clients_it_is_for() -> None:
    class Undecided(type(CHEAP.strategy())):  # type: ignore[misc]
        pass

    assert Undecided().method is None  # inherited

    class Silent(StatefulStrategy):
        init_state = train_instructions = update = model = None  # type: ignore[assignment]

    with refused(TypeError, "Silent", "method"):
        Silent()


def fedavg_app() -> ClientApp:
    """Return a ClientApp as people write it for FedAvg: it knows nothing of this library."""
    app = ClientApp()

    def received(message: Message) -> torch.nn.Module:
        model = make_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, data = received(message), dataset(int(context.node_config["partition-id"]))
        inputs, labels = data.tensors
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():  # `torch.optim` takes a second to import
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        metrics = MetricRecord({"num-examples": len(data)})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        inputs, labels = dataset(int(context.node_config["partition-id"])).tensors
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(received(message)(inputs), labels)
        metrics = MetricRecord({"loss": loss.item(), "num-examples": len(labels)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_a_client_app_written_for_fedavg_serves_a_strategy_for_any_client(warned: Warned) -> None:
    strategy = case_of("FedAvg").strategy(seed=1)
    strategy.start(WatchedGrid(fedavg_app(), NUM_CLIENTS), initial_arrays(), 2)
    assert warned() == []
    # Such an app does not say which partition it has, so a client's id is its node's.
    assert strategy.client_ids == [node_of(client) for client in range(NUM_CLIENTS)]
    assert sorted(strategy.train_metrics[2]) == strategy.client_ids
    assert strategy.evaluate_metrics[2][node_of(0)]["loss"] > 0
    first, last = initial_arrays()["head.weight"], strategy.global_arrays["head.weight"]
    assert not np.allclose(last.numpy(), first.numpy(), atol=1e-3)


def test_where_it_cannot_even_train_the_error_says_what_is_needed() -> None:
    strategy = case_of("FedAPM").strategy()
    with refused(RuntimeError, "FedAPMClient"):
        strategy.start(WatchedGrid(fedavg_app(), NUM_CLIENTS), initial_arrays(), 3)


def test_a_handler_of_ones_own_is_taken_with_the_stamp() -> None:
    app, plain = ClientApp(), fedavg_app()

    def stamped(message: Message, context: Context) -> Message:
        reply = plain(message, context)
        reply.content["metrics"].update(made_by("FedProx"))
        return reply

    app.train()(stamped)
    app.evaluate()(stamped)
    strategy = case_of("FedProx").strategy(seed=1)
    strategy.start(WatchedGrid(app, NUM_CLIENTS), initial_arrays(), 1)
    (metrics, *_) = strategy.train_metrics[1].values()
    assert list(strategy.train_metrics[1]) == strategy.client_ids
    assert metrics == {"num-examples": 10}  # the stamp is no measurement
    assert set(strategy.evaluate_metrics[1][2]) == {"loss", "num-examples"}
