"""FPFC end to end: its trace, the warm start, averaged arrays, schedules, clusters.

See docs/methods/fpfc.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from clients import FPFCClient, client_app
from fl_admm_strategies import FPFC, L1, MCP, SmoothedSCAD, made_by
from fl_admm_strategies.runtime.messages.records import RawReply, from_array_record, parse_groups
from tests.support.federation import (
    Federation,
    client_fn_of,
    initial_arrays,
    node_of,
)
from tests.support.pairs import v_of
from tests.support.refusals import refused

SCAD = SmoothedSCAD(lam=0.6, a=3.7, xi=1e-4)


# --- The three devices of E1 --------------------------------------------------------------------


class Point(nn.Module):
    """omega, one number; the inputs are ignored but for their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.omega * inputs


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


TARGETS = (0.0, 0.2, 5.0)


def point_client(context: Context) -> Any:
    """Device i has f_i = (omega - c_i)^2 / 2, as one sample x = 1, y = c_i in float64."""
    c = TARGETS[int(context.node_config["partition-id"])]
    batch = (torch.ones(1, dtype=torch.float64), torch.tensor([c], dtype=torch.float64))
    return FPFCClient(
        context, Point(), [batch], half_square, test_loader=[batch], full_batch=True
    ).to_client()


STAMP = made_by("FPFC")


def sampling(strategy: FPFC, rounds: Mapping[int, Sequence[int]]) -> FPFC:
    """Fix who takes part in which round."""
    instructions = strategy.train_instructions

    def fixed(server_round: int, client_ids: Sequence[int]) -> Any:
        return instructions(server_round, rounds.get(server_round, client_ids))

    strategy.train_instructions = fixed  # type: ignore[method-assign]
    return strategy


def trace_strategy(**settings: Any) -> FPFC:
    return FPFC(SCAD, rho=1.0, lr=0.1, local_epochs=1, report_diagnostics=True, **settings)


# A = {1, 3}, {2, 3}, {1, 2, 3} of rounds 0, 1, 2, counted from 1 and from 0 here.
TRACE_SETS = {1: [0, 2], 2: [1, 2], 3: [0, 1, 2]}
OMEGA = [
    (0.9, 1.0, 1.4),
    (0.9, 0.93999666722, 1.70000999833),
    (0.83541508464, 0.88666822174, 1.98392269262),
]
# v_12, v_13, v_23. For example, in the second and the third round, by (6), first case, and (A.3):
# delta_12 = -0.03999666722 - 0.09998333611 = -0.13998000333, v_12 = (1 - 1e-4 / 0.6001) delta_12
# = -0.13995667722; and, third case, delta_13 = 0.83541508464 - 1.98392269262
# - 0.54121960065 = -1.68972720863, |theta_13| = (1 - 2.22 / (2.7 * 1.68972720863)) / (1 - 1 / 2.7)
# * 1.68972720863 = 1.37780203724, v_13 = -1.68972720863 + 1.37780203724 = -0.31192517139.
V = [
    (-0.09998333611, -0.49991668055, -0.39993334444),
    (-0.13995667722, -0.54121960065, -0.6),
    (-0.19117795133, -0.31192517139, -0.30749737007),
]
ZETA = [
    (1.0, 1.0, 1.0),
    (1.29993334444, 1.19996667222, 0.80009998334),
    (1.15415084636, 1.14670887963, 1.23914693956),
    (0.94375840716, 0.81086672664, 1.95138086520),
]


def test_the_three_device_trace_end_to_end() -> None:
    strategy = sampling(trace_strategy(), TRACE_SETS)
    seen: list[tuple[Any, Any, Any]] = []

    def look(server_round: int, metrics: Mapping[str, float]) -> None:
        pairs = strategy.state.pairs
        v = [v_of(pairs, 0, 1)[0], v_of(pairs, 0, 2)[0], v_of(pairs, 1, 2)[0]]
        seen.append((pairs.omega[:, 0].copy(), v, pairs.zeta([0, 1, 2])[:, 0]))

    grid = Federation(client_app(point_client), 3)
    strategy.start(grid, ArrayRecord(Point().state_dict()), 3, on_round=look)
    for server_round, (omega, v, zeta) in enumerate(seen):
        assert_allclose(omega, OMEGA[server_round], rtol=0, atol=1e-9)
        assert_allclose(v, V[server_round], rtol=0, atol=1e-9)
        assert_allclose(zeta, ZETA[server_round + 1], rtol=0, atol=1e-9)
        # And zeta_i is what device i was sent.
        for message in grid.phase(MessageType.TRAIN, server_round + 1):
            device = message.metadata.dst_node_id - node_of(0)
            sent = message.content["arrays"]["omega"].numpy()
            assert_allclose(sent, [ZETA[server_round][device]], rtol=0, atol=1e-9)
    for device in range(3):
        personal = strategy.personal_arrays(device)["omega"].numpy()
        assert personal.dtype == np.float64
        assert_allclose(personal, [OMEGA[2][device]], rtol=0, atol=1e-9)
    assert_allclose(strategy.global_arrays["omega"].numpy(), [np.mean(OMEGA[2])], atol=1e-9)


def test_diagnostics_of_the_trace_by_hand() -> None:
    # After round 2: r1 = max_i |omega_i - c_i + (v_i1 + v_i2 + v_i3) / 3|, v_ji = -v_ij.
    strategy = sampling(trace_strategy(nu=0.5), TRACE_SETS)
    strategy.start(Federation(client_app(point_client), 3), ArrayRecord(Point().state_dict()), 3)
    omega, (v12, v13, v23) = np.array(OMEGA[2]), V[2]
    dual = np.array([v12 + v13, v23 - v12, -v13 - v23]) / 3
    residuals = np.abs(omega - TARGETS + dual)
    metrics = strategy.evaluate_metrics[3]
    for device in range(3):
        assert metrics[device]["stationarity"] == pytest.approx(residuals[device], abs=1e-9)
    found = strategy.diagnostics()
    assert found.stationarity == pytest.approx(residuals.max(), abs=1e-9)
    # theta_ij = omega_i - omega_j + (v_ij before - v_ij after) / rho  (A.3)
    pairs = [(0, 1), (0, 2), (1, 2)]
    theta = [
        omega[i] - omega[j] + before - after
        for (i, j), before, after in zip(pairs, V[1], V[2], strict=True)
    ]
    for (i, j), value in zip(pairs, theta, strict=True):
        assert found.theta_norms[i, j] == pytest.approx(abs(value), abs=1e-9)
    r2 = max(abs(omega[i] - omega[j] - t) for (i, j), t in zip(pairs, theta, strict=True))
    assert found.primal_residual == pytest.approx(r2, abs=1e-9)
    # theta_12 is about 0, the other two are about 1.4: clusters {1, 2} and {3}.
    assert_array_equal(found.labels, [0, 0, 1])
    # One example each: alpha = (omega_1 + omega_2) / 2 and omega_3; gradients alpha - c_i.
    alpha = np.array([omega[:2].mean(), omega[:2].mean(), omega[2]])
    assert_allclose(found.gradient_norms, np.abs(alpha - TARGETS), atol=1e-9)
    assert_allclose(found.fusion_bounds, [0.6 * 1 / 3, 0.0], rtol=1e-12)
    for device in range(3):
        loss = 0.5 * (alpha[device] - TARGETS[device]) ** 2
        assert metrics[device]["cluster-loss"] == pytest.approx(loss, abs=1e-9)
        loss = 0.5 * (omega[device] - TARGETS[device]) ** 2
        assert metrics[device]["personal-loss"] == pytest.approx(loss, abs=1e-9)
        assert metrics[device]["loss"] == metrics[device]["personal-loss"]
        loss = 0.5 * (omega.mean() - TARGETS[device]) ** 2
        assert metrics[device]["global-loss"] == pytest.approx(loss, abs=1e-9)


# --- The network of the contract test -----------------------------------------------------------


def grid_of(num_nodes: int = 4, **kwargs: Any) -> Federation:
    return Federation(client_app(client_fn_of(FPFCClient)), num_nodes, **kwargs)


def fpfc(**settings: Any) -> FPFC:
    usual = {"penalty": SmoothedSCAD(0.5), "lr": 0.2, "local_epochs": 1, "report_diagnostics": True}
    return FPFC(**(usual | settings))


def groups_of(message: Message) -> dict[str, int]:
    """Return the groups of a message and how many arrays are in each."""
    groups = parse_groups(message.content["config"])
    return {group: len(names) for group, names in groups.items()}


BOTH, ANCHOR = {"model": 4, "start": 1}, {"model": 4}


def nobody(*_: Any) -> list[Any]:
    """Ask nobody: FPFC shakes no hands."""
    return []


def test_shared_arrays_are_averaged_by_examples_and_integers_rounded() -> None:
    # n = 1 and 3: floats (1 + 3 * 5) / 4 = 4; integers (9 * 1 + 14 * 3) / 4 = 12.75 -> 13 and
    # (2 * 1 + 5 * 3) / 4 = 4.25 -> 4; -7 * 3 / 4 = -5.25 -> -5.
    model = {
        "head": np.zeros(2, dtype=np.float32),
        "body": np.zeros((1, 2), dtype=np.float64),
        "steps": np.array(0, dtype=np.int64),
        "counts": np.zeros(2, dtype=np.int32),
    }
    strategy = FPFC(SCAD, clustered="head")
    strategy.run.begin(model, [4, 7, 9])
    strategy.run.handshake(nobody, {})
    strategy.run.configure_train(1, {})

    def reply(n: int, head: float, body: float, steps: int, counts: list[int]) -> RawReply:
        arrays = {
            "head": np.full(2, head, dtype=np.float32),
            "body": np.full((1, 2), body),
            "steps": np.array(steps),
            "counts": np.array(counts, dtype=np.int32),
        }
        return RawReply(arrays, {"num-examples": n, **STAMP})

    strategy.run.aggregate_train(
        1, [(9, reply(3, 2.0, 5.0, 14, [5, -7])), (4, reply(1, 1.0, 1.0, 9, [2, 0]))]
    )
    # What is not trained, a client's own model has from its own upload.
    own_of = {4: (1.0, 9, [2, 0]), 7: (0.0, 0, [0, 0]), 9: (2.0, 14, [5, -7])}
    for client, (head, steps, counts) in own_of.items():
        personal = from_array_record(strategy.personal_arrays(client))
        assert_array_equal(personal["head"], [head, head])
        assert_array_equal(personal["body"], [[4.0, 4.0]])
        assert int(personal["steps"]) == steps
        assert_array_equal(personal["counts"], counts)
    together = from_array_record(strategy.global_arrays)
    assert list(together) == list(model)
    steps_of_all = together["steps"]
    assert (steps_of_all.dtype, steps_of_all.shape, int(steps_of_all)) == (np.int64, (), 13)
    assert_array_equal(together["counts"], np.array([4, -5], dtype=np.int32))
    assert_array_equal(together["head"], [1.0, 1.0])  # all three clients count, equally


def test_only_the_clustered_block_is_pulled_and_paired() -> None:
    strategy = fpfc(clustered="^head")
    grid = grid_of()
    strategy.start(grid, initial_arrays(), 2)
    assert strategy.state.pairs.omega.shape == (4, 15)  # head: 3 x 4 + 3
    models = [from_array_record(strategy.personal_arrays(client)) for client in range(4)]
    for name in ("body.weight", "body.bias"):
        for model in models[1:]:
            assert_array_equal(model[name], models[0][name])
    assert not np.array_equal(models[0]["head.weight"], models[1]["head.weight"])
    message = grid.phase(MessageType.TRAIN, 1)[0]
    assert message.content["config"]["optimised"] == '["head.weight","head.bias"]'
    assert groups_of(message) == {"model": 4, "start": 1}


def test_cluster_models_are_weighted_by_examples() -> None:
    # omega: 0 and 4 with n = 1 and 3 in one cluster, 10 alone; a fourth client at omega^0 = 10
    # never took part: it has no n_i and does not count beside one that has.
    strategy = FPFC(L1(0.0), clustered=None, nu=5.0)
    strategy.run.begin({"w": np.array([10.0])}, [0, 1, 2, 3])
    strategy.run.handshake(nobody, {})
    strategy.run.configure_train(1, {})
    uploads = {0: (0.0, 1), 1: (4.0, 3), 2: (10.0, 2)}
    strategy.run.aggregate_train(
        1,
        [
            (c, RawReply({"w": np.array([w])}, {"num-examples": n, **STAMP}))
            for c, (w, n) in uploads.items()
        ],
    )
    # lambda = 0: theta_ij = omega_i - omega_j, so the distances are 4, 6, 10, and 0 of 3 from 2.
    assert_array_equal(strategy.clusters(), [0, 0, 1, 1])
    models = [float(record["w"].numpy()[0]) for record in strategy.cluster_arrays()]
    assert models == pytest.approx([(0 * 1 + 4 * 3) / 4, 10.0])
    # At nu = 1 nobody has n_i in no cluster but {3}: it is its own plain mean.
    assert_array_equal(strategy.clusters(nu=0.0), [0, 1, 2, 2])
    assert len(strategy.cluster_arrays(nu=7.0)) == 1
    alone = float(strategy.cluster_arrays(nu=7.0)[0]["w"].numpy()[0])
    assert alone == pytest.approx((0 * 1 + 4 * 3 + 10 * 2) / 6)
    assert strategy.diagnostics().fusion_bounds.tolist() == [0.0, 0.0]


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "error", "named"),
    [
        ({"rho": 0}, ValueError, "rho"),
        ({"nu": -0.1}, ValueError, "nu"),
        ({"consensus_rounds": 0}, ValueError, "consensus_rounds"),
        ({"validation_share": 0.0}, ValueError, "validation_share"),
        ({"validation_share": 1.0}, ValueError, "validation_share"),
        ({"lr": "fast"}, TypeError, "lr"),
        ({"local_epochs": 2.5}, TypeError, "local_epochs"),
        ({"penalty": "Auto"}, TypeError, "penalty"),
        ({"penalty": 0.6}, TypeError, "penalty"),
        ({"penalty": "auto", "rho": 0.37}, ValueError, "rho"),
        ({"penalty": MCP(0.6), "rho": 0.01}, ValueError, "rho"),
        ({"clustered": "("}, ValueError, "clustered"),
    ],
    ids=str,
)
def test_the_constructor_refuses(argument: dict[str, Any], error: type, named: str) -> None:
    with refused(error, named):
        fpfc(**argument)


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"lr": lambda k: 0.1 if k < 2 else -1.0}, ValueError, "lr"),
        ({"local_epochs": lambda k, i: k / 2}, TypeError, "local_epochs"),
        ({"clustered": "neck"}, ValueError, "clustered"),
        ({"clustered": "."}, ValueError, "clustered"),
    ],
    ids=["no step", "half an epoch", "no array", "all arrays"],
)
def test_start_refuses(settings: dict[str, Any], error: type, named: str) -> None:
    with refused(error, named):
        fpfc(**settings).start(grid_of(2), initial_arrays(), 3)
