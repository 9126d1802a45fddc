"""LegacyServer: a strategy of this library under Flower's legacy API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import History
from flwr.serverapp.strategy import FedAvg

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, InProcessGrid, LegacyServer, SmoothedSCAD, made_by
from tests.support.federation import (
    KeyedGrid,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
    not_asking,
    trained,
)
from tests.support.legacy import run_legacy
from tests.support.pace import fast
from tests.support.refusals import Warned, refused

NUM_CLIENTS = 4


def fpfc(**settings: Any) -> FPFC:
    base = {"lr": 0.2, "local_epochs": 1, "fraction_train": 0.5, "seed": 1}
    return FPFC(SmoothedSCAD(0.5), **(base | settings))


def run(strategy: FPFC, num_rounds: int = 3, client_fn: Any = None, **options: Any) -> History:
    app = ClientApp(client_fn=client_fn or client_fn_of(FPFCClient))
    grid = InProcessGrid(app, NUM_CLIENTS)
    return run_legacy(grid, strategy, initial_arrays(), num_rounds, **options)


def test_the_history_has_the_mean_metrics() -> None:
    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 0.5, "accuracy": server_round / 10})

    strategy = fpfc()
    history = run(strategy, 4, evaluate_every=2, evaluate_fn=evaluate_fn)
    for server_round, loss in history.losses_distributed:
        reports = strategy.evaluate_metrics[server_round].values()
        n = np.array([report["num-examples"] for report in reports])
        losses = np.array([report["loss"] for report in reports])
        assert loss == pytest.approx((n * losses).sum() / n.sum(), rel=1e-12)
    assert [r for r, _ in history.losses_distributed] == [2, 4]
    assert [r for r, _ in history.metrics_distributed["loss"]] == [2, 4]
    assert [r for r, _ in history.metrics_distributed_fit["loss"]] == [1, 2, 3, 4]
    assert history.losses_centralized == [(r, 0.5) for r in range(5)]
    assert history.metrics_centralized["accuracy"] == [(r, r / 10) for r in range(5)]


class Recording(NumPyClient):
    """Hands on the config it is given as metrics, and does no training."""

    def fit(self, parameters, config):
        report = {k: v for k, v in config.items() if k in ("mine", "lr")}
        return parameters[:4], 1, report | {"text": "left out"} | made_by("FPFC")

    def evaluate(self, parameters, config):
        return 0.0, 1, {"split": config["split"], **made_by("FPFC")}


def test_the_users_settings_reach_the_clients() -> None:
    strategy = fpfc()
    configs = {
        "train_config": ConfigRecord({"mine": 7}),
        "evaluate_config": ConfigRecord({"split": 2}),
    }
    run(strategy, 1, lambda context: Recording().to_client(), **configs)
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
    run(strategy, 3, client_fn)
    assert len(warned("client 3")) == len(warned("round 2", "client 3")) == 1
    if how == "raises":
        assert warned("client 3", "the disk is full")
    expected = not_asking(fpfc(fraction_train=1.0, fraction_evaluate=0.0), {2: [3]})
    app = client_app(client_fn_of(FPFCClient))
    expected.start(InProcessGrid(app, NUM_CLIENTS), initial_arrays(), 3)
    assert_same_bits(strategy.state_dict(), expected.state_dict())


def test_a_run_in_which_every_client_fails_ends_with_the_reason() -> None:
    client_fn = client_fn_of(FPFCClient, {c: [1, 2, 3] for c in range(NUM_CLIENTS)})
    with refused(RuntimeError, "disk is full"):
        run(fpfc(), 3, client_fn)


@pytest.mark.slow
def test_sites_are_known_by_their_keys_and_come_and_go() -> None:
    # Client 1's node is gone from round 2 on; node 5 has its partition-id and another key, node 6
    # its key: it is client 1 from round 4 on. Client 7 joins in round 3.
    app = ClientApp(client_fn=client_fn_of(FPFCClient))
    online = {0: [2, 3, 4], 2: [2, 4, 5], 3: [2, 4, 5, 7], 4: [2, 4, 5, 6, 7]}
    grid = KeyedGrid(app, (0, 1, 2, 1, 1, 7), online, (0, 1, 2, 3, 1, 4))
    strategy = fpfc(fraction_train=1.0, fraction_evaluate=0.0)
    run_legacy(grid, strategy, initial_arrays(), 4)
    assert trained(strategy) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 2, 7], 4: [0, 1, 2, 7]}


def test_an_app_of_the_current_api_is_refused() -> None:
    grid = InProcessGrid(client_app(client_fn_of(FPFCClient)), NUM_CLIENTS)
    with refused(RuntimeError, "client_app", "LegacyServer"):
        run_legacy(grid, fpfc(), initial_arrays(), 1)


def test_the_constructor_refuses() -> None:
    with refused(TypeError, "strategy", "FedAvg"):
        LegacyServer(FedAvg(), initial_arrays())  # type: ignore[arg-type]
    with refused(TypeError, "evaluate_often"):
        LegacyServer(fpfc(), initial_arrays(), evaluate_often=2)
    with refused(TypeError, "num_rounds"):
        LegacyServer(fpfc(), initial_arrays(), num_rounds=2)
