"""LegacyStrategy: both ways of running a strategy of Flower's legacy API, and its refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from clients import FPFCClient, client_app
from fl_admm_strategies import (
    FPFC,
    InProcessGrid,
    LegacyStrategy,
    SmoothedSCAD,
    made_by,
    run_in_process,
)
from tests.support.federation import (
    assert_same_bits,
    assert_same_runs,
    client_fn_of,
    initial_arrays,
    make_client,
    not_asking,
    raising_client_fn,
    trained,
)
from tests.support.legacy import with_server_fn, with_workflow
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

NUM_CLIENTS = 4


def fpfc(**settings: Any) -> FPFC:
    base = {"lr": 0.2, "local_epochs": 1, "fraction_train": 0.5, "seed": 1}
    return FPFC(SmoothedSCAD(0.5), **(base | settings))


def run(legacy: LegacyStrategy, num_rounds: int = 3, client_fn: Any = None) -> ServerApp:
    app = with_workflow(legacy, num_rounds)
    client_app = ClientApp(client_fn=client_fn or client_fn_of(FPFCClient))
    run_in_process(app, client_app, NUM_CLIENTS)
    return app


def current(**settings: Any) -> FPFC:
    strategy = fpfc(**settings)
    app = client_app(client_fn_of(FPFCClient))
    strategy.start(InProcessGrid(app, NUM_CLIENTS), initial_arrays(), 3)
    return strategy


def test_a_server_fn_gives_the_bits_of_the_current_api() -> None:
    strategy = fpfc()
    app = with_server_fn(LegacyStrategy(strategy, initial_arrays()), 3)
    run_in_process(app, ClientApp(client_fn=client_fn_of(FPFCClient)), NUM_CLIENTS)
    expected = current()
    assert strategy.client_ids == [0, 1, 2, 3]  # the partitions, not the random node ids
    assert_same_runs(strategy, expected)


def test_the_history_has_the_mean_metrics() -> None:
    strategy = fpfc()
    history = run(LegacyStrategy(strategy, initial_arrays())).history  # type: ignore[attr-defined]
    for server_round, loss in history.losses_distributed:
        reports = strategy.evaluate_metrics[server_round].values()
        n = np.array([report["num-examples"] for report in reports])
        losses = np.array([report["loss"] for report in reports])
        assert loss == pytest.approx((n * losses).sum() / n.sum(), rel=1e-12)
    assert [r for r, _ in history.losses_distributed] == [1, 2, 3]
    assert [r for r, _ in history.metrics_distributed_fit["loss"]] == [1, 2, 3]


def test_evaluate_every_and_the_central_evaluation() -> None:
    seen: dict[int, Any] = {}

    def evaluate_fn(server_round: int, arrays: Any, config: Any) -> tuple[float, dict[str, Any]]:
        seen[server_round] = arrays
        return 0.5, {"accuracy": server_round / 10}

    strategy = fpfc()
    legacy = LegacyStrategy(strategy, initial_arrays(), evaluate_every=2, evaluate_fn=evaluate_fn)
    history = run(legacy, 4).history  # type: ignore[attr-defined]
    assert sorted(strategy.evaluate_metrics) == [2, 4]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    for array, expected in zip(seen[0], initial_arrays().values(), strict=True):
        np.testing.assert_array_equal(array, expected.numpy())
    for array, expected in zip(seen[4], strategy.global_model().values(), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert history.metrics_centralized["accuracy"][-1] == (4, 0.4)


class Recording(NumPyClient):
    """Hands on the config it is given as metrics, and does no training."""

    def fit(self, parameters, config):
        report = {k: v for k, v in config.items() if k in ("mine", "lr")}
        return parameters[:4], 1, report | made_by("FPFC")

    def evaluate(self, parameters, config):
        return 0.0, 1, {"split": config["split"], **made_by("FPFC")}


def test_the_users_settings_reach_the_clients() -> None:
    strategy = fpfc()
    legacy = LegacyStrategy(
        strategy,
        initial_arrays(),
        train_config=ConfigRecord({"mine": 7}),
        evaluate_config=ConfigRecord({"split": 2}),
    )
    run(legacy, 1, lambda context: Recording().to_client())
    for metrics in strategy.train_metrics[1].values():
        assert metrics == {"mine": 7, "lr": 0.2, "num-examples": 1}
    for metrics in strategy.evaluate_metrics[1].values():
        assert metrics["split"] == 2
    # Clients without get_properties are known by their nodes.
    assert strategy.client_ids == [2, 3, 4, 5]


@pytest.mark.parametrize("how", fast(["NaN", "raises"], ["NaN", "count", "raises"]))
def test_a_bad_reply_is_as_if_the_client_was_not_sampled(how: str, warned: Warned) -> None:
    def client_fn(context: Context) -> Any:
        client = make_client(FPFCClient, context)
        fit = client.fit

        def spoilt(parameters: Any, config: Any) -> Any:
            arrays, n, metrics = fit(parameters, config)
            if context.node_config["partition-id"] == 3 and config["server-round"] == 2:
                if how == "raises":
                    raise OSError("the disk is full")
                arrays[1] = np.full_like(arrays[1], np.nan)
                arrays = arrays[:2] if how == "count" else arrays
            return arrays, n, metrics

        client.fit = spoilt  # type: ignore[method-assign]
        return client.to_client()

    strategy = fpfc(fraction_train=1.0, fraction_evaluate=0.0)
    run(LegacyStrategy(strategy, initial_arrays()), 3, client_fn)
    assert len(warned("client 3")) == len(warned("round 2", "client 3")) == 1
    if how == "raises":  # the legacy API does not say who: it is the one that is missing
        assert warned("client 3", "the disk is full")
    expected = not_asking(fpfc(fraction_train=1.0, fraction_evaluate=0.0), {2: [3]})
    app = client_app(client_fn_of(FPFCClient))
    expected.start(InProcessGrid(app, NUM_CLIENTS), initial_arrays(), 3)
    assert_same_bits(strategy.state_dict(), expected.state_dict())


@pytest.mark.parametrize("loop", [with_workflow, with_server_fn])
def test_a_first_round_in_which_everybody_fails_ends_the_run(loop: Any) -> None:
    """Flower's legacy loops do not say which round is the last, so it may be this one."""
    client_fn = raising_client_fn(FPFCClient, {c: [1] for c in range(NUM_CLIENTS)})
    app = loop(LegacyStrategy(fpfc(), initial_arrays()), 2)
    with refused(RuntimeError, "first round", "disk is full"):
        run_in_process(app, ClientApp(client_fn=client_fn), NUM_CLIENTS)


def test_without_replies_flower_gets_nothing() -> None:
    strategy = fpfc()
    legacy = LegacyStrategy(strategy, initial_arrays())
    strategy.run.begin({k: a.numpy() for k, a in initial_arrays().items()}, range(2))
    strategy.run.handshake(lambda asked, kind: [], {})
    strategy.run.configure_train(1, {})
    assert legacy.aggregate_fit(1, [], []) == (None, {})
    assert legacy.aggregate_evaluate(1, [], []) == (None, {})
    assert legacy.evaluate(1, None) is None  # type: ignore[arg-type]


def test_two_nodes_may_not_be_the_same_client() -> None:
    def client_fn(context: Context) -> Any:
        context.node_config["partition-id"] = 1
        return make_client(FPFCClient, context).to_client()

    # One of them keeps it; the run waits for the client that is missing then.
    with refused(TimeoutError, "[1]", "partition-id"):
        run(LegacyStrategy(fpfc(node_timeout=0.1), initial_arrays()), client_fn=client_fn)


def test_a_client_cannot_say_that_another_lost_its_state() -> None:
    # The legacy API does not tell who failed; a client that replied has not.
    def client_fn(context: Context) -> Any:
        client = make_client(FPFCClient, context)
        fit = client.fit

        def lie(parameters: Any, config: Any) -> Any:
            if context.node_config["partition-id"] == 1 and config["server-round"] == 2:
                raise OSError("[state-lost 2]")
            return fit(parameters, config)

        client.fit = lie  # type: ignore[method-assign]
        return client.to_client()

    strategy = fpfc(fraction_train=1.0)
    run(LegacyStrategy(strategy, initial_arrays()), client_fn=client_fn)
    assert trained(strategy)[2] == [0, 2, 3]
    assert strategy.membership.last_accepted == {0: 3, 1: 3, 2: 3, 3: 3}


def test_the_constructor_refuses() -> None:
    with refused(TypeError, "strategy", "FedAvg"):
        LegacyStrategy(FedAvg(), initial_arrays())  # type: ignore[arg-type]
    with refused(ValueError, "evaluate_every", 0):
        LegacyStrategy(fpfc(), initial_arrays(), evaluate_every=0)
    with refused(TypeError, "initial_arrays", "dict"):
        LegacyStrategy(fpfc(), {"w": np.zeros(2)})  # type: ignore[arg-type]
    with refused(ValueError, "initial arrays"):
        run(LegacyStrategy(fpfc(), ArrayRecord()))
    with refused(TimeoutError, "4 clients", "4 nodes", 9, "num-supernodes=9"):
        run(LegacyStrategy(fpfc(min_available_nodes=9, node_timeout=0.1), initial_arrays()))
