"""FPFC along a path of lambdas.

See docs/methods/fpfc.md, "A path of lambdas".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, MessageType
from numpy.testing import assert_array_equal
from numpy.typing import NDArray
from torch import nn

from clients import FPFCClient, client_app
from clients.toolkit.data.holdout import hold_out
from fl_admm_strategies import FPFC, LambdaPath, SmoothedSCAD
from fl_admm_strategies.runtime.messages.records import from_array_record
from tests.support.federation import (
    FROM_ROUND_3,
    GONE_AND_BACK,
    JOINING,
    PARTITIONS,
    Federation,
    Online,
    assert_same_bits,
    node_of,
)
from tests.support.pace import fast
from tests.support.refusals import refused
from tests.support.slopes import SLOPES, Samples, app_of, arrays, client_of, model, samples

NUM_CLIENTS = 6
State = dict[str, NDArray[Any]]


def data(client: int) -> Samples:
    """Return the samples of a client; even ones have one regression, odd ones another."""
    return samples(client, SLOPES[client % 2], 20, 0.5)


def app(**options: Any) -> Any:
    return app_of(data, **options)


def validated_app() -> Any:
    """Return the app of clients that have samples to validate on, and so train on all others."""

    def client_fn(context: Context) -> Any:
        batch = data(int(context.node_config["partition-id"]))
        return client_of(context, batch, validation_loader=[batch]).to_client()

    return client_app(client_fn)


def along(path: Any, **changes: Any) -> FPFC:
    settings = {"lr": 0.1, "local_epochs": 2, "fraction_train": 0.5, "fraction_evaluate": 0.0}
    return FPFC(path, **settings | {"seed": 1} | changes)


# Without noise of chance in its ends: the stages are of known lengths.
WARM = LambdaPath([0.0, 0.2, 0.5, 30.0], min_rounds=2, max_rounds=4, tol=0.0)


def vectors(strategy: FPFC) -> NDArray[Any]:
    return strategy.state.pairs.omega.copy()


@cache
def whole(path: LambdaPath, rounds: int) -> tuple[FPFC, Federation, dict[int, State]]:
    """Return a run, its grid and its states by round; only to read."""
    strategy, grid = along(path), Federation(app(), NUM_CLIENTS)
    states: dict[int, State] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        states[server_round] = strategy.state_dict()

    strategy.start(grid, arrays(), rounds, on_round=on_round)
    return strategy, grid, states


def pairs_in(state: Mapping[str, NDArray[Any]]) -> State:
    return {n: a for n, a in state.items() if n.startswith(("state/pairs/", "state/clients/n"))}


# --- Warm -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_lambda_that_is_worse_is_taken_back() -> None:
    strategy, grid, states = whole(WARM, 18)
    taken = strategy.diagnostics().path
    assert taken.last_rounds.tolist() == [4, 8, 12, 16]
    assert taken.chosen == 2
    assert strategy.penalty_in_use.penalty.lam == 0.5
    assert strategy.penalty_in_use.lam == strategy.diagnostics().lam
    assert taken.values[3] > taken.values[2]
    assert taken.values[2] <= taken.values[1] <= taken.values[0]
    # Round 16 ends as round 12 did, to the bit.
    assert_same_bits(pairs_in(states[16]), pairs_in(states[12]))
    assert not np.array_equal(states[15]["state/pairs/omega"], states[12]["state/pairs/omega"])
    assert_array_equal(
        states[16]["state/source/validation/rows"], states[12]["state/source/validation/rows"]
    )
    # The clients hold the iterates of the lambda that was taken back, and are sent the kept ones.
    for message in grid.phase(MessageType.TRAIN, 17):
        start = from_array_record(message.content["arrays.start"])["omega"]
        row = message.metadata.dst_node_id - node_of(0)
        assert_array_equal(start, states[16]["state/pairs/omega"][row])
    assert not np.array_equal(states[17]["state/pairs/omega"], states[16]["state/pairs/omega"])
    assert taken.num_groups[0] == NUM_CLIENTS  # lambda = 0: everybody alone
    assert taken.num_groups[3] < NUM_CLIENTS
    assert_array_equal(strategy.settings()["penalty"].lams, WARM.lams)


@pytest.mark.slow
def test_a_stage_ends_when_the_metric_is_at_rest() -> None:
    path = LambdaPath([0.0, 0.5], min_rounds=3, calm_rounds=2, max_rounds=50, tol=0.05)
    strategy = along(path, fraction_train=1.0)
    strategy.start(Federation(app(), NUM_CLIENTS), arrays(), 15)
    taken = strategy.diagnostics().path
    values = [
        np.mean([metrics["validation-loss"] for metrics in strategy.train_metrics[r].values()])
        for r in range(1, 16)
    ]
    calm = [r for r in range(2, 16) if abs(values[r - 1] - values[r - 2]) < 0.05]
    first = next(r for r in calm if r >= 3 and r - 1 in calm)
    assert taken.last_rounds[0] == first
    assert taken.values[0] == pytest.approx(values[first - 1])


def test_the_metric_is_that_of_the_uploaded_model_on_the_samples_held_out() -> None:
    strategy, grid, _ = whole(WARM, 18)
    seeds = strategy.run.sampling.client_seeds(range(NUM_CLIENTS), 0)
    for reply in grid.replies(MessageType.TRAIN, 7):
        client = reply.metadata.src_node_id - node_of(0)
        _, ((x, y),) = hold_out([data(client)], lambda batch: batch, 0.2, seeds[client])
        assert len(x) == 4
        net = model()
        uploaded = from_array_record(reply.content["arrays"])
        net.load_state_dict({name: torch.tensor(array) for name, array in uploaded.items()})
        loss = nn.functional.mse_loss(net(x), y).item()
        assert strategy.train_metrics[7][client]["validation-loss"] == pytest.approx(loss)
    # The mean over all clients of what each said last.
    last: dict[int, float] = {}
    for server_round in range(1, 9):
        for client, metrics in strategy.train_metrics[server_round].items():
            last[client] = metrics["validation-loss"]
    taken = strategy.diagnostics().path
    assert taken.values[1] == pytest.approx(np.mean(list(last.values())))


@pytest.mark.slow
def test_a_path_of_one_lambda_is_a_plain_run() -> None:
    # With samples of their own to validate on, clients train on the same.
    states = []
    for penalty in (LambdaPath([0.5], max_rounds=12), SmoothedSCAD(0.5)):
        strategy = along(penalty)
        strategy.start(Federation(validated_app(), NUM_CLIENTS), arrays(), 15)
        states.append(strategy.state_dict())
    left = [{n: a for n, a in s.items() if not n.startswith("state/source")} for s in states]
    assert_same_bits(*left)


# --- Resuming -------------------------------------------------------------------------------------


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("interrupted", [(12, 15), slow(range(1, 18))])
def test_interrupted_anywhere_it_resumes_to_the_same_bits(interrupted: Sequence[int]) -> None:
    expected, _, states = whole(WARM, 18)
    for saved in interrupted:
        strategy = along(WARM)
        strategy.load_state_dict(states[saved])
        strategy.start(Federation(app(), NUM_CLIENTS), arrays(), 18)
        assert_same_bits(strategy.state_dict(), expected.state_dict())


def test_shared_arrays_go_back_with_the_pairs() -> None:
    # "higher": the second lambda, whose loss is lower, is the worse one.
    path = LambdaPath([0.0, 30.0], min_rounds=2, max_rounds=2, better="higher")
    strategy, shared = along(path, clustered="weight", fraction_train=1.0), {}

    def on_round(server_round: int, metrics: Any) -> None:
        shared[server_round] = strategy.state.averaged_arrays["bias"].copy()

    strategy.start(Federation(app(), NUM_CLIENTS), arrays(), 4, on_round=on_round)
    assert strategy.diagnostics().path.chosen == 0  # taken back after round 4
    assert not np.array_equal(shared[3], shared[2])
    assert_array_equal(shared[4], shared[2])


# --- Clients that come and go ---------------------------------------------------------------------


@pytest.mark.parametrize("online", [FROM_ROUND_3, GONE_AND_BACK], ids=["joins", "leaves"])
def test_clients_may_come_and_go_between_the_best_and_the_return_to_it(online: Online) -> None:
    # "higher": the second lambda, whose loss is lower, is the worse one.
    path = LambdaPath([0.0, 30.0], min_rounds=2, max_rounds=2, better="higher")
    strategy = along(path, fraction_train=1.0, max_missed_rounds=1, min_available_nodes=1)
    partitions = PARTITIONS if online is FROM_ROUND_3 else (0, 1, 4, 1)
    omega: dict[int, dict[int, NDArray[Any]]] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        omega[server_round] = dict(zip(strategy.client_ids, vectors(strategy), strict=True))

    grid = Federation(app(), partitions, online)
    strategy.start(grid, arrays(), 8, on_round=on_round)
    assert strategy.diagnostics().path.chosen == 0  # taken back after round 4
    assert list(omega[4]) == ([0, 1, 2, 4] if online is FROM_ROUND_3 else [0, 4])
    uploads = {
        partitions[reply.metadata.src_node_id - node_of(0)]: from_array_record(
            reply.content["arrays"]
        )
        for reply in grid.replies(MessageType.TRAIN, 4)
    }
    for client, vector in omega[4].items():
        upload = [array.ravel() for array in uploads[client].values()] if client == JOINING else []
        assert_array_equal(vector, np.concatenate(upload) if upload else omega[2][client])


@pytest.mark.parametrize("loss", fast([float("inf")], [1e308, float("inf"), float("nan")]))
def test_a_loss_that_is_none_is_the_worst_and_can_be_saved(loss: float) -> None:
    class Diverged(FPFCClient):
        def measure(self, problem: Any) -> dict[str, float]:
            return {"loss": loss}

    clients = app_of(data, {3: Diverged})
    strategy = along(LambdaPath([0.0, 0.5], min_rounds=1, max_rounds=2), fraction_train=1.0)
    strategy.start(Federation(clients, NUM_CLIENTS), arrays(), 3)
    taken = strategy.diagnostics().path
    assert taken.values[0] == pytest.approx(1e30 / 6)
    again = along(LambdaPath([0.0, 0.5], min_rounds=1, max_rounds=2), fraction_train=1.0)
    again.load_state_dict(strategy.state_dict())
    again.start(Federation(clients, NUM_CLIENTS), arrays(), 4)


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"lams": []}, ValueError, "lams"),
        ({"lams": [0.5, 0.2]}, ValueError, "lams"),
        ({"lams": [0.5, 0.5]}, ValueError, "lams"),
        ({"lams": [-1.0]}, ValueError, "lams"),
        ({"lams": ["a"]}, TypeError, "lams"),
        ({"lams": [1.0], "fusion": "l2"}, ValueError, "fusion"),
        ({"lams": [1.0], "better": "up"}, ValueError, "better"),
        ({"lams": [1.0], "min_rounds": 9, "max_rounds": 8}, ValueError, "min_rounds"),
        ({"lams": [1.0], "calm_rounds": 0}, ValueError, "calm_rounds"),
    ],
)
def test_a_bad_grid_is_refused(
    arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    with refused(error, named):
        LambdaPath(**arguments)


def test_a_path_needs_a_rho_for_all_of_its_penalties() -> None:
    with refused(ValueError, "rho"):
        FPFC(LambdaPath([0.0, 0.5]), rho=0.3)


@pytest.mark.parametrize(
    ("monitor", "options", "count", "named"),
    [
        ("loss", {}, 1, "samples"),
        ("loss", {"validation_loader": []}, 20, "no batch"),
        ("auc", {}, 20, "monitor"),
    ],
)
def test_clients_that_cannot_validate_end_the_run_in_round_1(
    monitor: str, options: dict[str, Any], count: int, named: str
) -> None:
    strategy = along(LambdaPath([0.5], monitor=monitor))
    clients = app_of(lambda c: samples(c, SLOPES[0], count, 0.5), **options)
    with refused(RuntimeError, named):
        strategy.start(Federation(clients, NUM_CLIENTS), arrays(), 3)
    assert not strategy.train_metrics


def test_another_grid_does_not_continue() -> None:
    _, _, states = whole(WARM, 18)
    other = along(LambdaPath([0.0, 0.2, 0.5, 40.0], min_rounds=2, max_rounds=4))
    other.load_state_dict(states[6])
    with refused(ValueError, "lams"):
        other.start(Federation(app(), NUM_CLIENTS), arrays(), 8)
