"""What each strategy does with clients that join and leave, by the rule in its docstring."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clients import (
    FedADMMClient,
    FedGiAClient,
    FedGiALinearClient,
    FLAMEClient,
    FPFCClient,
    LeastSquares,
    client_app,
)
from fl_admm_strategies import (
    FLAME,
    FPFC,
    FedADMM,
    FedGiA,
    FedMCADMM,
    L1Norm,
    SmoothedSCAD,
    StatefulStrategy,
    made_by,
)
from fl_admm_strategies.algorithms.fedadmm import FedADMMRule
from fl_admm_strategies.algorithms.fpfc.messages import FPFCRule
from fl_admm_strategies.runtime.messages.records import RawReply
from tests.support.federation import (
    FROM_ROUND_3,
    INITIAL,
    JOINING,
    PARTITIONS,
    Federation,
    client_fn_of,
    initial_arrays,
)
from tests.support.pairs import theta_of

# --- The fixed point is the minimiser over the clients that are left ----------------------------


def target_client(
    client_class: Callable[..., NumPyClient], context: Context, joining_scale: float = 1.0
) -> NumPyClient:
    """Return a client of f_i(x) = (x - i)^2, with i + 1 samples, i its id.

    The data of the one that joins may be larger: scale^2 (x - i)^2.
    """
    client = int(context.node_config["partition-id"])
    scale = joining_scale if client == JOINING else 1.0
    inputs = torch.full((client + 1, 1), scale)
    data = TensorDataset(inputs, client * inputs)
    model = nn.Linear(1, 1, bias=False)
    return client_class(context, model, DataLoader(data, batch_size=100), nn.MSELoss())


MINIMISERS = {
    "FedADMM": (partial(FedADMM, rho=0.5, lr=0.3, local_epochs=10), FedADMMClient),
    "FedADMM-published": (
        partial(FedADMM, rho=0.5, lr=0.3, local_epochs=10, published=True),
        FedADMMClient,
    ),
    "FedADMM-size-client": (
        partial(FedADMM, rho=0.5, lr=0.3, local_epochs=10, weights="size", duals="client"),
        FedADMMClient,
    ),
    "FLAME-size": (partial(FLAME, rho=0.8, lr=0.2, local_epochs=10, weights="size"), FLAMEClient),
    "FLAME-client": (partial(FLAME, rho=0.8, lr=0.2, local_epochs=10, duals="client"), FLAMEClient),
    "FedGiA": (partial(FedGiA, t=0.5, local_steps=2), FedGiAClient),
}


@cache
def when_all_have_come_and_gone(name: str) -> StatefulStrategy:
    """Run one of these until it stands still: client 2 joins in round 2, client 0 leaves later."""
    make, client_class = MINIMISERS[name]
    strategy: StatefulStrategy = make(seed=1, max_missed_rounds=1, fraction_evaluate=0)
    grid = Federation(
        client_app(lambda context: target_client(client_class, context).to_client()),
        PARTITIONS,
        {0: [2, 3, 4], 2: [2, 3, 4, 5], 4: [3, 4, 5]},
    )
    strategy.start(grid, ArrayRecord({"weight": torch.zeros(1, 1)}), 40)
    assert strategy.client_ids == [1, 2, 4]
    return strategy


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIMISERS)
def test_the_global_model_becomes_the_minimiser_over_those_that_are_left(name: str) -> None:
    # f_i have one curvature, so the minimiser of sum_i alpha_i f_i is the mean of the i, weighted
    # by alpha_i, which is constant or in the ratio of the i + 1. FLAME's envelopes have one
    # curvature as well, so the same is true of its w.
    left = np.array([1.0, 2.0, 4.0])
    weights = left + 1 if "-size" in name else np.ones(3)
    expected = (weights * left).sum() / weights.sum()
    model = when_all_have_come_and_gone(name).global_model()
    assert_allclose(model["weight"], [[expected]], rtol=2e-3)


@pytest.mark.slow
def test_what_fedgia_reports_belongs_to_those_that_are_left() -> None:
    # f(x) = (1/m) sum_i (x - i)^2 over the three, at their mean 7/3: 14/9; its gradient is 0.
    found = when_all_have_come_and_gone("FedGiA").metrics("train", {}, {})
    assert found["objective"] == pytest.approx(14 / 9, rel=1e-3)
    assert found["squared-gradient"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("t", "scale"), [(0.5, 1.0), (0.5, 5.0), (None, 5.0)])
def test_the_gradient_that_fedgia_finds_is_that_of_the_clients_there_are(t, scale):
    # In round 3 the server takes the gradients at the x that it sent: with the new client,
    # grad f(x) = (1/4) sum_i 2 c_i (x - i) over i = 0, 1, 2, 4, where c_2 is scale^2.
    strategy = FedGiA(t=t, local_steps=2, fraction_evaluate=0, seed=1)
    app = client_app(lambda context: target_client(FedGiAClient, context, scale).to_client())
    strategy.start(
        Federation(app, PARTITIONS, FROM_ROUND_3), ArrayRecord({"weight": torch.zeros(1, 1)}), 3
    )
    x = float(strategy.state.seen.point[0])
    assert len(strategy.client_ids) == 4
    curved = {0: 1.0, 1: 1.0, 2: scale**2, 4: 1.0}
    gradient = np.mean([2 * c * (x - i) for i, c in curved.items()])
    found = strategy.metrics("train", {}, {})
    assert found["squared-gradient"] == pytest.approx(gradient**2, rel=1e-4)
    assert found["objective"] == pytest.approx(
        np.mean([c * (x - i) ** 2 for i, c in curved.items()]), rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("coming", [True, False])
def test_fedgia_compares_no_gradient_with_one_of_other_clients(coming: bool, scale: float) -> None:
    # f changes near its optimum, where x hardly moves: the change of the gradient over that of x
    # says nothing of a curvature. On least squares the mean of the r_i bounds every true one.
    losses, everybody = {}, [0, 1, 2, 4]
    for client in everybody:
        rng = np.random.default_rng(client)
        a = rng.normal(size=(20, 4)) * (scale if client == JOINING else 1.0)
        losses[client] = LeastSquares(a, a.sum(axis=1) * client + rng.normal(size=20))
    app = client_app(
        lambda context: FedGiALinearClient(
            context, losses[int(context.node_config["partition-id"])]
        ).to_client()
    )
    small, large = [2, 3, 4], [2, 3, 4, 5]
    online = {0: small, 25: large} if coming else {0: large, 25: small}
    strategy = FedGiA(fraction_evaluate=0, max_missed_rounds=1, seed=1)
    strategy.start(Federation(app, PARTITIONS, online), ArrayRecord({"x": Array(np.zeros(4))}), 70)
    there = everybody if coming else INITIAL
    assert strategy.client_ids == there
    assert strategy.state.seen.largest == pytest.approx(1)
    bound = np.mean([losses[i].largest_curvature() for i in there])
    assert strategy.sigma == pytest.approx(2 * bound / 4 if not coming else 2 * bound / 3)
    assert strategy.metrics("train", {}, {})["squared-gradient"] ** 0.5 < 1e-3


def test_the_number_of_clients_that_fedmc_began_with_is_a_scale_of_the_objective() -> None:
    # (1/p0) sum_{i<=p} f_i + (p/p0) R is p/p0 times (2), and argmin_V (p/p0) R(V) +
    # p beta/2 |V - mean z|^2 is prox_{R/(p0 beta)}(mean z): the clients' steps, which divide by p0,
    # and this one are the same for every p. With gamma |V|_1: soft-thresholding by gamma/(p0 beta).
    strategy = FedMCADMM(L1Norm(0.8), beta=2.0, published=True)
    strategy.run.begin({"V": np.zeros((1, 3))}, [0, 1])
    strategy.run.handshake(lambda asked, kind: [], {})
    strategy.run.update_membership(1, [0, 1, 7], lambda asked, kind: [], {})
    config = strategy.run.configure_train(1, {})[7].config
    reply = RawReply(
        {"V": np.array([[3.0, -0.3, -1.5]])}, {"num-examples": 1.0, **made_by("FedMCADMM")}
    )
    strategy.run.aggregate_train(1, [(7, reply)])
    assert FedADMMRule.read(str(config["rule"])) == FedADMMRule(True, 2.0, 1 / 2)
    # z_7 = W + (W - V) = 2 W, the others' is 0: the mean over three is (2, -.2, -1).
    assert_allclose(strategy.global_model()["V"], [[1.8, 0, -0.8]], rtol=1e-15)


# --- What a joining client is sent ----------------------------------------------------------------


def sent_to_joining(grid: Federation, server_round: int) -> RecordDict:
    """Return the training message to the client that joins, on node 5."""
    (content,) = (
        m.content for m in grid.phase("train", server_round) if m.metadata.dst_node_id == 5
    )
    return content


def start_recorded(
    strategy: StatefulStrategy, client_class: Any, num_rounds: int = 4
) -> Federation:
    grid = Federation(client_app(client_fn_of(client_class)), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, initial_arrays(), num_rounds)
    return grid


def vector_of(record: ArrayRecord) -> NDArray[Any]:
    return np.concatenate([array.numpy().ravel() for array in record.values()])


def rho_of(message: RecordDict) -> float:
    return FPFCRule.read(str(message.config_records["config"]["rule"])).rho


def test_a_client_that_joins_fpfc_first_trains_on_its_own_from_the_global_model() -> None:
    penalty = SmoothedSCAD(0.5)
    strategy = FPFC(penalty, rho=1.0, lr=0.2, local_epochs=2, seed=1)
    models: dict[int, NDArray[Any]] = {}
    thetas: list[NDArray[Any]] = []

    def on_round(server_round: int, metrics: Any) -> None:
        models[server_round] = strategy.state.pairs.omega.copy()
        if server_round == 3:
            thetas.extend(theta_of(strategy.state.pairs, 2, other) for other in (0, 1, 3))

    grid = Federation(client_app(client_fn_of(FPFCClient)), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, initial_arrays(), 4, on_round=on_round)
    first = sent_to_joining(grid, 3)
    assert rho_of(first) == 0
    assert_allclose(vector_of(first["arrays"]), models[2].mean(axis=0), rtol=1e-6)
    second = sent_to_joining(grid, 4)
    assert rho_of(second) == 1
    assert "arrays.start" not in second
    # v_ij = 0 at first contact, so theta_ij is the proximal operator of the difference itself.
    assert strategy.client_ids.index(JOINING) == 2
    differences = models[3][2] - models[3][[0, 1, 3]]
    scales = penalty.prox_scale(np.linalg.norm(differences.astype(float), axis=1), 1.0)
    expected = scales[:, None] * differences
    assert_allclose(thetas, expected, rtol=1e-5, atol=1e-8)


def test_the_weight_of_a_joining_client_by_size() -> None:
    strategy = FedADMM(weights="size", rho=0.1, lr=0.5, seed=1)
    grid = start_recorded(strategy, FedADMMClient)
    # Client i has 10 + i samples: n = 10 + 11 + 14 at the start.
    assert_allclose(
        strategy.state.clients.column("alpha"), np.array([10, 11, 12, 14]) / 35, rtol=1e-15
    )
    config = sent_to_joining(grid, 3).config_records["config"]
    assert json.loads(str(config["rule"]))["share"] == 12 / 35 * 3  # m alpha_i
    assert config["version"] == 0  # nothing of it was accepted
    assert strategy.traffic[3].down > strategy.traffic[2].down


@pytest.mark.parametrize("duals", ["strategy", "client"])
@pytest.mark.parametrize("published", [True, False])
def test_a_joining_client_begins_at_w(published: bool, duals: Any) -> None:
    """With a dual of 0: it gets w, and no arrays of a row; in its second turn it holds its row."""
    models: dict[int, NDArray[Any]] = {}
    strategy = FedADMM(published=published, rho=0.1, lr=0.5, duals=duals)

    def on_round(server_round: int, metrics: Any) -> None:
        models[server_round] = strategy.state.w.copy()

    grid = Federation(client_app(client_fn_of(FedADMMClient)), PARTITIONS, FROM_ROUND_3)
    strategy.start(grid, initial_arrays(), 4, on_round=on_round)
    content = sent_to_joining(grid, 3)
    assert_array_equal(vector_of(content["arrays"]), models[2])
    assert dict(content["arrays.start"]) == {}
    assert "arrays.start" not in sent_to_joining(grid, 4)
