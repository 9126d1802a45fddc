"""Clients that join a run and leave it, by the rule that each strategy's docstring gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MessageType, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.constant import MessageTypeLegacy
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import (
    FedADMMClient,
    FedAPMClient,
    FedGiAClient,
    FLAMEClient,
    FPFCClient,
    LpProjADMMClient,
    client_app,
)
from fl_admm_strategies import (
    FLAME,
    FPFC,
    FedADMM,
    FedAPM,
    FedGiA,
    FedMCADMM,
    L1Norm,
    LegacyStrategy,
    LpProjADMM,
    SmoothedSCAD,
    StatefulStrategy,
)
from fl_admm_strategies.algorithms.flame import messages
from fl_admm_strategies.runtime.messages import RawReply
from tests.support.cases import Case, each_case
from tests.support.checkpoints import Killed, killer
from tests.support.federation import (
    Online,
    RestlessGrid,
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
    raising_client_fn,
    warnings_in,
)

# Nodes 2, 3, 4 are there from the start, node 5 comes later. The newcomer's id is between others'.
FOUNDERS, NEWCOMER = [0, 1, 4], 2
PARTITIONS = (*FOUNDERS, NEWCOMER)
FROM_ROUND_3: Online = {0: [2, 3, 4], 3: [2, 3, 4, 5]}
# Client 1 is away from round 3 on; in round 6 it is back on another node.
GONE_AND_BACK: Online = {0: [2, 3, 4], 3: [2, 4], 6: [2, 4, 5]}


def grid_of(case: Case, online: Online, partitions: Any = PARTITIONS) -> RestlessGrid:
    return RestlessGrid(client_app(client_fn_of(case.client_class)), partitions, online)


def trained(strategy: StatefulStrategy) -> dict[int, list[int]]:
    return {r: sorted(clients) for r, clients in strategy.train_metrics.items()}


def algorithm_state(strategy: StatefulStrategy) -> dict[str, NDArray[Any]]:
    state = strategy.state_dict()
    return {key: array for key, array in state.items() if key.startswith("state/")}


def last_uploads(strategy: StatefulStrategy) -> dict[int, NDArray[Any]]:
    """Return what every client uploaded last, as one vector, from now on."""
    uploads: dict[int, NDArray[Any]] = {}
    update = strategy.update

    def remember(server_round: int, replies: Mapping[int, Any]) -> None:
        for client, reply in replies.items():
            arrays = reply.arrays
            names = ["P theta"] if isinstance(strategy, LpProjADMM) else strategy._block.spec
            uploads[client] = np.concatenate([arrays[name].ravel() for name in names])
        update(server_round, replies)

    strategy.update = remember  # type: ignore[method-assign]
    return uploads


def rows(strategy: Any) -> NDArray[Any]:
    """Return what the state keeps of every client's upload."""
    if isinstance(strategy, FPFC):
        return strategy.state.pairs.omega
    if isinstance(strategy, FedGiA):
        return strategy.state.messages
    if isinstance(strategy, FLAME):
        return strategy.thetas
    rows = strategy.images if isinstance(strategy, LpProjADMM) else strategy.consensus.iterates
    return np.asarray(rows)


def held_message(strategy: Any, client: int, held: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return z_i of what a client keeps itself, as one vector."""
    if isinstance(strategy, FedMCADMM):
        return np.asarray(held["W"] + held["Y"] / strategy.beta).ravel()
    parts = []
    for name in strategy._block.names:
        if isinstance(strategy, FLAME):
            a = strategy.lam * strategy.alpha[strategy._index[client]]
            theta, copy = held[f"theta/{name}"], held[f"w_i/{name}"]
            parts.append(copy + a / strategy.rho * (theta - copy))
        else:
            parts.append(held[f"u/{name}"] + held[f"dual/{name}"] / strategy.rho)
    return np.concatenate([part.ravel() for part in parts])


def sum_of_messages(strategy: Any, grid: RestlessGrid) -> NDArray[Any]:
    """Return the sum of all clients' z_i from where they are kept."""
    if getattr(strategy, "duals", "strategy") == "client":
        total = np.zeros_like(strategy.consensus.total)
        for client in strategy.client_ids:
            state = grid.context(strategy._directory._node_of[client]).state
            record = state.array_records[f"memory.{strategy.accepted_in[client]}"]
            held = {name: array.numpy() for name, array in record.items()}
            total += held_message(strategy, client, held)
        return total
    if isinstance(strategy, FLAME | LpProjADMM):
        a = strategy.lam * strategy.alpha[:, None]
        return messages(rows(strategy), strategy.copies, a=a, rho=strategy.rho).sum(axis=0)
    consensus = strategy.consensus
    return np.asarray((consensus.iterates + consensus.duals / consensus.rho).sum(axis=0))


def assert_consistent(
    strategy: StatefulStrategy, grid: RestlessGrid, uploads: Mapping[int, NDArray[Any]]
) -> None:
    """Check that rows belong to their clients and that sums are over those that belong."""
    count = len(strategy.client_ids)
    if getattr(strategy, "duals", "strategy") == "strategy" or isinstance(strategy, FedGiA):
        assert len(rows(strategy)) == count
        for client, row in zip(strategy.client_ids, rows(strategy), strict=True):
            assert_array_equal(row, uploads[client])
    if hasattr(strategy, "consensus"):
        assert strategy.consensus.num_clients == count
        total = sum_of_messages(strategy, grid)
        assert_allclose(strategy.consensus.total, total, rtol=1e-4, atol=1e-4)
    if isinstance(strategy, FedGiA):
        assert_allclose(strategy.state.x, rows(strategy).mean(axis=0), rtol=1e-6)
    for name in ("alpha", "tolerances"):
        assert len(getattr(strategy, name, strategy.client_ids)) == count


# --- Every strategy -----------------------------------------------------------------------------


@each_case
def test_a_client_that_joins_belongs_to_the_run_from_then_on(case: Case) -> None:
    # Clients 1 and 4 fail from then on: their rows, before and after the new one, must be theirs.
    client_fn = raising_client_fn(case.client_class, {1: [3, 4], 4: [3, 4]})
    grid = RestlessGrid(client_app(client_fn), PARTITIONS, FROM_ROUND_3)
    strategy = case.strategy(seed=1)
    uploads = last_uploads(strategy)
    strategy.start(grid, case.initial_arrays(), 4)
    assert strategy.client_ids == [0, 1, 2, 4]
    assert strategy.num_founders == 3
    assert trained(strategy) == {1: FOUNDERS, 2: FOUNDERS, 3: [0, 2], 4: [0, 2]}
    assert strategy.accepted_in == {0: 4, 1: 2, 2: 4, 4: 2}
    assert NEWCOMER not in strategy.evaluate_metrics[2]
    assert NEWCOMER in strategy.evaluate_metrics[3]
    assert_consistent(strategy, grid, uploads)


@each_case
def test_a_newcomer_that_never_succeeds_leaves_no_trace(case: Case) -> None:
    client_fn = raising_client_fn(case.client_class, {NEWCOMER: range(1, 9)})
    grid = RestlessGrid(client_app(client_fn), PARTITIONS, FROM_ROUND_3)
    strategy, expected = case.strategy(seed=1), case.strategy(seed=1)
    strategy.start(grid, case.initial_arrays(), 4)
    expected.start(grid_of(case, {0: [2, 3, 4]}), case.initial_arrays(), 4)
    assert strategy.client_ids == FOUNDERS
    assert_same_bits(algorithm_state(strategy), algorithm_state(expected))
    assert strategy.train_metrics == expected.train_metrics
    assert strategy.evaluate_metrics == expected.evaluate_metrics


@each_case
def test_a_client_that_left_does_not_count_and_comes_back_as_a_new_one(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(case, GONE_AND_BACK, (0, 1, 2, 1))
    strategy = case.strategy(seed=1, forget_after=2)
    uploads = last_uploads(strategy)
    members: dict[int, list[int]] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        members[server_round] = list(strategy.client_ids)
        if server_round == 5:  # two rounds without it, in which all others took part
            assert_consistent(strategy, grid, uploads)

    strategy.start(grid, case.initial_arrays(), 7, on_round=on_round)
    both = {3: [0, 1, 2], 4: [0, 2], 5: [0, 2], 6: [0, 1, 2], 7: [0, 1, 2]}
    assert members == {1: [0, 1, 2], 2: [0, 1, 2], **both}
    assert trained(strategy) == {**members, 3: [0, 2]}
    assert_consistent(strategy, grid, uploads)
    (line,) = (line for line in warnings_in(caplog.records) if "left the run" in line)
    assert line.startswith("round 4: clients [1] (1) have not been connected for 2 rounds")


@each_case
def test_a_run_that_clients_joined_and_left_is_resumed_to_the_same_bits(
    case: Case, tmp_path: Path
) -> None:
    online: Online = {0: [2, 3, 4], 2: [2, 3, 4, 5], 4: [2, 3, 5]}

    def start(grid: RestlessGrid, folder: Path, **options: Any) -> StatefulStrategy:
        strategy = case.strategy(seed=1, forget_after=2, node_timeout=0.3)
        strategy.start(
            grid, case.initial_arrays(), 6, checkpoint_dir=folder, resume=True, **options
        )
        return strategy

    expected = start(grid_of(case, online), tmp_path / "whole")
    assert expected.client_ids == [0, 1, 2]
    for killed_in in (3, 5):  # before anybody has left, and after
        grid, folder = grid_of(case, online), tmp_path / f"killed in {killed_in}"
        with pytest.raises(Killed):
            start(grid, folder, on_round=killer(killed_in))
        grid.server_round = killed_in - 1  # the round is repeated, with the nodes of then
        actual = start(grid, folder)
        assert_same_bits(actual.state_dict(), expected.state_dict())
        assert actual.train_metrics == expected.train_metrics


# --- The fixed point is the minimiser over the clients that are left ----------------------------


def target_client(client_class: Callable[..., NumPyClient], context: Context) -> NumPyClient:
    """Return a client of f_i(x) = (x - i)^2, with i + 1 samples, i its id."""
    client = int(context.node_config["partition-id"])
    ones = torch.ones(client + 1, 1)
    data = TensorDataset(ones, client * ones)
    model = nn.Linear(1, 1, bias=False)
    return client_class(context, model, DataLoader(data, batch_size=100), nn.MSELoss())


MINIMISERS = [
    (partial(FedADMM, rho=0.5, lr=0.3, local_epochs=20), FedADMMClient),
    (
        partial(FedADMM, rho=0.5, lr=0.3, local_epochs=20, weights="size", duals="client"),
        FedADMMClient,
    ),
    (partial(FLAME, rho=0.8, lr=0.2, local_epochs=20, weights="size"), FLAMEClient),
    (partial(FLAME, rho=0.8, lr=0.2, local_epochs=20, duals="client"), FLAMEClient),
    (partial(FedGiA, t=0.5, local_steps=2, report_gradient=True), FedGiAClient),
    (partial(FedGiA, t=0.5, local_steps=2, duals="client"), FedGiAClient),
]


@pytest.mark.parametrize(
    ("make", "client_class"),
    MINIMISERS,
    ids=[
        "-".join([make.func.__name__, *map(str, make.keywords.values())]) for make, _ in MINIMISERS
    ],
)
def test_the_global_model_becomes_the_minimiser_over_those_that_are_left(
    make: Any, client_class: Any
) -> None:
    # f_i have one curvature, so the minimiser of sum_i alpha_i f_i is the mean of the i, weighted
    # by alpha_i, which is constant or in the ratio of the i + 1. FLAME's envelopes have one
    # curvature as well, so the same is true of its w.
    online: Online = {0: [2, 3, 4], 2: [2, 3, 4, 5], 4: [3, 4, 5]}
    strategy = make(seed=1, forget_after=1, fraction_evaluate=0)
    grid = RestlessGrid(
        client_app(lambda context: target_client(client_class, context).to_client()),
        PARTITIONS,
        online,
    )
    start = ArrayRecord({"weight": torch.zeros(1, 1)})
    strategy.start(grid, start, 60)
    left = np.array([1.0, 2.0, 4.0])
    assert strategy.client_ids == left.tolist()
    weights = left + 1 if getattr(strategy, "weights", "") == "size" else np.ones(3)
    expected = (weights * left).sum() / weights.sum()
    assert_allclose(strategy.global_model()["weight"], [[expected]], rtol=2e-3)
    if isinstance(strategy, FedGiA) and strategy.report_gradient:
        # f(x) = (1/m) sum_i (x - i)^2 over the three, at their mean 7/3: 14/9; its gradient is 0.
        assert strategy.diagnostics().objective == pytest.approx(14 / 9, rel=1e-3)
        assert strategy.diagnostics().squared_gradient == pytest.approx(0, abs=1e-4)


def test_the_gradient_that_fedgia_finds_is_that_of_the_clients_there_are() -> None:
    # After one round at x = 1 the server takes the gradients at that x: with the newcomer,
    # grad f(x) = (1/4) sum_i 2 (x - i) over i = 0, 1, 2, 4 at the x of its first round.
    strategy = FedGiA(t=0.5, local_steps=2, report_gradient=True, fraction_evaluate=0, seed=1)
    app = client_app(lambda context: target_client(FedGiAClient, context).to_client())
    strategy.start(
        RestlessGrid(app, PARTITIONS, FROM_ROUND_3), ArrayRecord({"weight": torch.zeros(1, 1)}), 3
    )
    x = float(strategy.state.point[0])
    assert len(strategy.client_ids) == 4
    assert strategy.state.squared_gradient == pytest.approx((2 * (x - 7 / 4)) ** 2, rel=1e-4)
    assert strategy.state.objective == pytest.approx(
        np.mean([(x - i) ** 2 for i in (0, 1, 2, 4)]), rel=1e-5
    )


def test_the_number_of_clients_that_fedmc_began_with_is_a_scale_of_the_objective() -> None:
    # (1/p0) sum_{i<=p} f_i + (p/p0) R is p/p0 times (2), and argmin_V (p/p0) R(V) +
    # p beta/2 |V - mean z|^2 is prox_{R/(p0 beta)}(mean z): the clients' steps, which divide by p0,
    # and this one are the same for every p. With gamma |V|_1: soft-thresholding by gamma/(p0 beta).
    strategy = FedMCADMM(L1Norm(0.8), beta=2.0)
    strategy.begin({"V": np.zeros((1, 3))}, [0, 1])
    strategy.meet(1, [0, 1, 7], lambda orders, kind: [], {})
    config = strategy.plan_train(1, {})[7].config
    reply = RawReply({"V": np.array([[3.0, -0.3, -1.5]])}, {"num-examples": 1.0})
    strategy.absorb_train(1, [(7, reply)])
    assert config["num-clients"] == 2
    # z_7 = W + (W - V) = 2 W, the others' is 0: the mean over three is (2, -.2, -1).
    assert_allclose(strategy.global_model()["V"], [[1.8, 0, -0.8]], rtol=1e-15)


# --- What a newcomer is sent --------------------------------------------------------------------


class Recording(RestlessGrid):
    """Keeps the training messages by round and node."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: dict[tuple[int, int], RecordDict] = {}

    def push_messages(self, messages: Any) -> list[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == MessageType.TRAIN:
                key = (int(message.metadata.group_id), message.metadata.dst_node_id)
                self.sent[key] = message.content
        return super().push_messages(messages)


def start_recorded(strategy: StatefulStrategy, client_class: Any, num_rounds: int = 4) -> Recording:
    grid = Recording(client_app(client_fn_of(client_class)), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, initial_arrays(), num_rounds)
    return grid


def vector_of(record: ArrayRecord) -> NDArray[Any]:
    return np.concatenate([array.numpy().ravel() for array in record.values()])


def test_fpfcs_newcomer_first_trains_on_its_own_from_the_global_model() -> None:
    penalty = SmoothedSCAD(0.5)
    strategy = FPFC(penalty, lr=0.2, local_epochs=2, seed=1)
    models: dict[int, NDArray[Any]] = {}
    thetas: list[NDArray[Any]] = []

    def on_round(server_round: int, metrics: Any) -> None:
        models[server_round] = strategy.state.pairs.omega.copy()
        if server_round == 3:
            thetas.extend(strategy.state.pairs.theta(2, other) for other in (0, 1, 3))

    grid = Recording(client_app(client_fn_of(FPFCClient)), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, initial_arrays(), 4, on_round=on_round)
    first = grid.sent[3, 5]
    assert first.config_records["config"]["rho"] == 0
    assert_allclose(vector_of(first["arrays.start"]), models[2].mean(axis=0), rtol=1e-6)
    second = grid.sent[4, 5]
    assert second.config_records["config"]["rho"] == 1
    assert "arrays.start" not in second
    # Specs 2.8 and A19: v_ij = 0 at first contact, so theta_ij is the proximal operator of the
    # difference itself.
    assert strategy.client_ids.index(NEWCOMER) == 2
    differences = models[3][2] - models[3][[0, 1, 3]]
    expected = [penalty.prox(difference.astype(float), 1.0) for difference in differences]
    assert_allclose(thetas, expected, rtol=1e-5, atol=1e-8)


def test_the_weight_of_a_newcomer_by_size() -> None:
    strategy = FedADMM(weights="size", rho=0.1, lr=0.5, seed=1)
    grid = start_recorded(strategy, FedADMMClient)
    # Client i has 10 + i samples: n = 10 + 11 + 14 at the start.
    assert_allclose(strategy.alpha, np.array([10, 11, 12, 14]) / 35, rtol=1e-15)
    assert grid.sent[3, 5].config_records["config"]["loss-weight"] == 12 / 35
    assert strategy.traffic[3].down > strategy.traffic[2].down


def test_a_newcomer_that_fails_the_hand_shake_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[int] = []

    class Shy(FedADMMClient):
        def shake_hands(self) -> Any:
            if self.client == NEWCOMER:
                tries.append(1)
                if len(tries) == 1:
                    raise OSError("not yet")
            return super().shake_hands()

    def client_fn(context: Context) -> Any:
        client = client_fn_of(Shy)(context)
        client.numpy_client.client = int(context.node_config["partition-id"])
        return client

    grid = RestlessGrid(client_app(client_fn), PARTITIONS, FROM_ROUND_3)
    strategy = FedADMM(weights="size", rho=0.1, lr=0.5, seed=1)
    strategy.start(grid, initial_arrays(), 4)
    assert trained(strategy)[3] == FOUNDERS
    assert trained(strategy)[4] == [0, 1, 2, 4]
    assert any("client 2 refused: it failed: " in line for line in warnings_in(caplog.records))


def test_the_curvature_of_a_newcomer_that_was_not_given(tmp_path: Path) -> None:
    def start(grid: RestlessGrid, num_rounds: int) -> FedGiA:
        curvature = {0: 1.0, 1: 3.0, 4: 2.0}  # f_i = (x - i)^2 has 2
        strategy = FedGiA(curvature=curvature, fraction_evaluate=0, seed=1)
        strategy.start(
            grid,
            ArrayRecord({"weight": torch.zeros(1, 1)}),
            num_rounds,
            checkpoint_dir=tmp_path,
            resume=True,
        )
        return strategy

    app = client_app(lambda context: target_client(FedGiAClient, context).to_client())
    grid = RestlessGrid(app, PARTITIONS, FROM_ROUND_3)
    assert_allclose(start(grid, 3).state.curvatures, [1, 3, 2, 2], rtol=1e-3)
    assert_allclose(start(grid, 4).state.curvatures, [1, 3, 2, 2], rtol=1e-3)


@pytest.mark.parametrize(
    ("strategy", "client_class", "expected"),
    [
        (FedADMM(rho=0.1, lr=0.5), FedADMMClient, "w"),
        (FedADMM(rho=0.1, lr=0.5, duals="client"), FedADMMClient, "w"),
        (FLAME(rho=0.2, lr=0.5), FLAMEClient, "w"),
        (FLAME(rho=0.2, lr=0.5, duals="client"), FLAMEClient, "w"),
        (FedAPM("^head", rho=0.1, lr=0.5), FedAPMClient, "w"),
        (LpProjADMM(rho=0.2, lr=0.5, dimension=3), LpProjADMMClient, "initial"),
    ],
    ids=["FedADMM", "FedADMM-client", "FLAME", "FLAME-client", "FedAPM", "LpProj"],
)
def test_where_a_newcomer_starts(strategy: Any, client_class: Any, expected: str) -> None:
    models: dict[int, NDArray[Any]] = {}

    def on_round(server_round: int, metrics: Any) -> None:
        models[server_round] = strategy.consensus.w.copy()

    grid = Recording(client_app(client_fn_of(client_class)), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, initial_arrays(), 4, on_round=on_round)
    content = grid.sent[3, 5]
    assert_array_equal(vector_of(content["arrays"]), models[2])
    start = vector_of(content["arrays.start"])
    assert_array_equal(start, models[2] if expected == "w" else vector_of(initial_arrays()))
    assert "arrays.start" not in grid.sent[4, 5]


# --- The older API ------------------------------------------------------------------------------


AT_ONCE_ELSEWHERE: Online = {0: [2, 3, 4], 3: [2, 4, 5], 5: [2, 4, 5, 6]}


@pytest.mark.parametrize(
    ("make", "client_class", "online"),
    [
        (partial(FPFC, SmoothedSCAD(0.5), lr=0.2, forget_after=2), FPFCClient, GONE_AND_BACK),
        (partial(FPFC, SmoothedSCAD(0.5), lr=0.2), FPFCClient, AT_ONCE_ELSEWHERE),
        (partial(FedADMM, rho=0.1, weights="size", forget_after=2), FedADMMClient, GONE_AND_BACK),
    ],
    ids=["FPFC", "FPFC-elsewhere", "FedADMM"],
)
def test_clients_come_and_go_under_the_older_api_alike(
    make: Any, client_class: Any, online: Online
) -> None:
    strategy, expected = make(seed=1), make(seed=1)
    legacy = LegacyStrategy(strategy, initial_arrays())
    app = ClientApp(client_fn=client_fn_of(client_class))
    grid = RestlessGrid(app, (0, 1, 2, 1, 7), online)
    context = Context(1, 1, {}, RecordDict(), {})
    DefaultWorkflow()(grid, LegacyContext(context, ServerConfig(num_rounds=7), strategy=legacy))
    current = RestlessGrid(client_app(client_fn_of(client_class)), (0, 1, 2, 1, 7), online)
    expected.start(current, initial_arrays(), 7)
    assert trained(strategy)[2] == [0, 1, 2]
    assert 1 in trained(strategy)[7]
    assert_same_bits(strategy.state_dict(), expected.state_dict())
    assert strategy.train_metrics == expected.train_metrics


def test_a_new_node_of_the_older_api_that_cannot_say_who_it_is_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    def client_fn(context: Context) -> Any:
        client = make_client(FPFCClient, context)
        if context.node_config["partition-id"] == NEWCOMER:
            properties = client.get_properties

            def get_properties(config: Any) -> Any:
                asked.append(1)
                if len(asked) == 1:
                    raise OSError("the disk is not there yet")
                return properties(config)

            client.get_properties = get_properties  # type: ignore[method-assign]
        return client.to_client()

    strategy = FPFC(SmoothedSCAD(0.5), lr=0.2)
    grid = RestlessGrid(ClientApp(client_fn=client_fn), PARTITIONS, FROM_ROUND_3)
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}),
        ServerConfig(num_rounds=5),
        strategy=LegacyStrategy(strategy, initial_arrays()),
    )
    DefaultWorkflow()(grid, context)
    assert strategy.client_ids == [0, 1, 2, 4]
    assert trained(strategy)[3] == FOUNDERS
    assert trained(strategy)[4] == [0, 1, 2, 4]
    assert any("node 5 is left out" in line for line in warnings_in(caplog.records))


def test_a_new_node_of_the_older_api_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_admm_strategies.hosting.legacy.PATIENCE", 0.1)
    in_round_4 = Event()
    strategy = FPFC(SmoothedSCAD(0.5), lr=0.2, fraction_evaluate=0)

    class Slow(LegacyStrategy):
        def configure_fit(self, server_round: int, *args: Any, **kwargs: Any) -> Any:
            if server_round == 4:
                in_round_4.set()
                wait(self._asking.values(), 60)
            return super().configure_fit(server_round, *args, **kwargs)

    class Grid(RestlessGrid):
        def send_and_receive(self, messages: Any, **kwargs: Any) -> Any:
            messages = list(messages)
            asked = messages[0].metadata
            if asked.message_type == MessageTypeLegacy.GET_PROPERTIES and asked.dst_node_id == 5:
                assert in_round_4.wait(60)
            return super().send_and_receive(messages, **kwargs)

    grid = Grid(ClientApp(client_fn=client_fn_of(FPFCClient)), PARTITIONS, FROM_ROUND_3)
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}),
        ServerConfig(num_rounds=5),
        strategy=Slow(strategy, initial_arrays()),
    )
    DefaultWorkflow()(grid, context)
    assert trained(strategy) == {
        **{1: FOUNDERS, 2: FOUNDERS, 3: FOUNDERS},
        **{4: [0, 1, 2, 4], 5: [0, 1, 2, 4]},
    }


# --- The setting --------------------------------------------------------------------------------


def test_somebody_is_left() -> None:
    # All of those that began are away while a new client is there.
    grid = RestlessGrid(
        client_app(client_fn_of(FPFCClient)), PARTITIONS, {0: [2, 3, 4], 2: [5], 5: [3, 5]}
    )
    strategy = FPFC(
        SmoothedSCAD(0.5), lr=0.2, forget_after=1, min_available_nodes=1, fraction_evaluate=0
    )
    strategy.start(grid, initial_arrays(), 5)
    assert trained(strategy) == {1: FOUNDERS, 2: [2], 3: [2], 4: [2], 5: [1, 2]}
    assert strategy.client_ids == [1, 2]


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError)])
def test_the_constructor_refuses(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"forget_after is {value}, expected an integer >= 1"):
        FPFC(SmoothedSCAD(0.5), forget_after=value)


def test_a_resumed_run_does_without_clients_that_may_leave(tmp_path: Path) -> None:
    def start(online: Online, num_rounds: int) -> FPFC:
        strategy = FPFC(
            SmoothedSCAD(0.5), lr=0.2, forget_after=2, node_timeout=0.3, fraction_evaluate=0
        )
        grid = RestlessGrid(client_app(client_fn_of(FPFCClient)), PARTITIONS, online)
        strategy.start(grid, initial_arrays(), num_rounds, checkpoint_dir=tmp_path, resume=True)
        return strategy

    start({0: [2, 3, 4]}, 2)
    assert start({0: [2, 3]}, 3).client_ids == FOUNDERS  # client 4 is away for the first round
    assert start({0: [2, 3]}, 4).client_ids == [0, 1]
    # Without a word about the size of the federation, a client that is new at the start is one
    # that joins; see test_checkpoints for a federation that says it is another.
    assert start({0: [2, 3, 5]}, 5).client_ids == [0, 1, 2]
