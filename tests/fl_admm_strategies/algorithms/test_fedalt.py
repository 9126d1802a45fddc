"""FedAlt, FedSim and LG-FedAvg by hand: u is averaged, v_i stays; docs/methods/fedalt.md.

Three clients f_i(u, v) = (a_i u + c_i v - d_i)^2 / 2 with a = (1, 2, 1), c = (1, -1, 2), d = (1, 3,
2), n = (10, 20, 30), from 0 by three steps of .1 for each block. With u = 0 a step on v takes the
residual -d_i to (1 - .1 c_i^2) of it: v_1 = 1 - .9^3 = .271, v_2 = -3 (1 - .9^3) = -.813,
v_3 = 1 - .6^3 = .784. Then u at that v likewise: u_1 = (1 - .271) .271 = .197559, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flwr.app import Context
from numpy.testing import assert_allclose
from torch import Tensor, nn

from clients import (
    FedAltClient,
    FedSimClient,
    LGFedAvgClient,
    client_app,
)
from fl_admm_strategies import FedAlt, FedSim, LGFedAvg, StatefulStrategy
from tests.fl_admm_strategies.algorithms.quadratics import ALL, Grid, N, follow
from tests.support.federation import (
    Federation,
    client_fn_of,
    initial_arrays,
    node_of,
)
from tests.support.refusals import refused

A, C, D = (1.0, 2.0, 1.0), (1.0, -1.0, 2.0), (1.0, 3.0, 2.0)
PARTLY = (0, 1), (1, 2)


class Pair(nn.Module):
    """a u + c v for the rows (a, c) of the inputs; `u` counts the batches it was trained on."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.v = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return rows @ torch.cat([self.u, self.v])


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).mean()


class PairGrid(Grid):
    """The three clients."""

    def __init__(self, client_class: Any) -> None:
        super().__init__(client_class, Pair)  # type: ignore[arg-type]

    def client(self, context: Context) -> Any:
        i = int(context.node_config["partition-id"])
        rows = torch.tensor([[A[i], C[i]]], dtype=torch.float64).expand(N[i], 2)
        batch = (rows, torch.full((N[i],), D[i], dtype=torch.float64))
        options = {"test_loader": [batch], "full_batch": True}
        return self.client_class(context, Pair(), [batch], half_square, **options)

    def _client_fn(self, context: Context) -> Any:
        return self.client(context).to_client()

    def own(self, client: int) -> dict[str, Any]:
        arrays: dict[str, Any] = self.client(self.context(node_of(client))).personal_arrays()
        return arrays


CLIENT_OF: dict[Any, Any] = {FedAlt: FedAltClient, FedSim: FedSimClient, LGFedAvg: LGFedAvgClient}


def run(
    strategy: StatefulStrategy, *rounds: Sequence[int], grid: PairGrid | None = None
) -> tuple[list[list[float]], list[float]]:
    """Return v_1, v_2, v_3 and u after every round; v_i is 0 until client i has trained."""
    grid = grid or PairGrid(CLIENT_OF[type(strategy)])

    def read() -> tuple[list[float], float]:
        kept = [grid.context(node_of(i)).state.array_records for i in ALL]
        v = [grid.own(i)["v"].item() if own else 0.0 for i, own in zip(ALL, kept, strict=True)]
        return v, strategy.state.model["u"].item()

    seen = follow(strategy, grid, *rounds, read=read)
    return [v for v, _ in seen], [u for _, u in seen]


def split(kind: type, **settings: Any) -> Any:
    usual = {"lr": 0.1, "local_epochs": 3, "weights": "uniform", "fraction_evaluate": 0.0}
    return kind("^v$", **usual | settings)


# --- The worked examples (E1, E2) ---------------------------------------------------------------


def test_fedalt_with_everybody() -> None:
    grid = PairGrid(FedAltClient)
    v, u = run(split(FedAlt), ALL, ALL, grid=grid)
    uploads = [
        [content["arrays"]["u"].numpy().item() for content in grid.got_in("train", r).values()]
        for r in (1, 2)
    ]
    assert_allclose(v[0], [0.271, -0.813, 0.784], atol=1e-8)
    assert_allclose(uploads[0], [0.197559, 0.857304, 0.117072], atol=1e-8)
    assert_allclose(v[1], [0.362694205, -1.19394741, 0.80021116], atol=1e-8)
    assert_allclose(uploads[1], [0.4574900754, 0.7923519353, 0.3930657563], atol=1e-8)
    assert_allclose(u, [0.390645, 0.5476359223], atol=1e-8)


def test_fedalt_weighted_by_the_examples() -> None:
    _, u = run(split(FedAlt, weights="size"), ALL, ALL)
    assert_allclose(u, [0.3772305, 0.5268739672], atol=1e-8)


def test_fedalt_with_two_in_turn() -> None:
    v, u = run(split(FedAlt), *PARTLY)
    assert_allclose(v[1], [0.271, -1.119809127, 0.577246852], atol=1e-8)
    assert_allclose(u, [0.5274315, 0.732294898], atol=1e-8)


@pytest.mark.parametrize("kind", [FedSim, LGFedAvg])
def test_fedsim_with_everybody(kind: Any) -> None:
    grid = PairGrid(CLIENT_OF[kind])
    v, u = run(split(kind), ALL, ALL, grid=grid)
    uploads = [c["arrays"]["u"].numpy().item() for c in grid.got_in("train", 1).values()]
    assert_allclose(v[0], [0.244, -0.525, 0.7], atol=1e-8)
    assert_allclose(uploads, [0.244, 1.05, 0.35], atol=1e-8)
    assert_allclose(v[1], [0.294752, -0.766325, 0.7182], atol=1e-8)
    assert_allclose(u, [0.548, 0.728834], atol=1e-8)


@pytest.mark.parametrize("kind", [FedSim, LGFedAvg])
def test_fedsim_otherwise(kind: Any) -> None:
    _, u = run(split(kind, weights="size"), ALL, ALL)
    assert_allclose(u, [0.5656666667, 0.7331721667], atol=1e-8)
    v, u = run(split(kind), *PARTLY)
    assert_allclose(v[1], [0.244, -0.731675, 0.47355], atol=1e-8)
    assert_allclose(u, [0.647, 0.9720625], atol=1e-8)


def test_both_parts_of_fedalt_have_steps_of_their_own() -> None:
    # One step of .2 on v: v_1 = .2, then one of .1 on u at that v: u_1 = .1 (1 - .2) = .08.
    strategy = split(FedAlt, local_epochs=1, personal_epochs=1, personal_lr=0.2)
    grid = PairGrid(FedAltClient)
    v, _ = run(strategy, ALL, grid=grid)
    assert v[0] == pytest.approx([0.2, -0.6, 0.8], abs=1e-12)
    assert grid.got_in("train", 1)[0]["arrays"]["u"].numpy().item() == pytest.approx(0.08)
    metrics = strategy.train_metrics[1][0]  # f before the last step: 1/2, and (.2 - 1)^2 / 2
    assert (metrics["personal-loss"], metrics["loss"]) == pytest.approx((0.5, 0.32), rel=1e-12)


# --- What stays, what travels, what is evaluated ------------------------------------------------


def test_all_clients_are_evaluated_with_the_new_u_and_their_own_v() -> None:
    strategy = split(FedSim, fraction_evaluate=1.0)
    v, u = run(strategy, *PARTLY)
    for i, own in strategy.evaluate_metrics[2].items():
        residual = A[i] * u[1] + C[i] * v[1][i] - D[i]
        assert own["personal-loss"] == pytest.approx(residual**2 / 2, rel=1e-12)
        assert "global-loss" not in own
    assert list(strategy.global_arrays) == ["u", "seen"]


# --- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["[.]", "fc9"])  # all, none
def test_a_pattern_that_cuts_nothing_is_refused(pattern: str) -> None:
    grid = Federation(client_app(client_fn_of(FedSimClient)), 2)
    with refused(ValueError, "personal", pattern):
        FedSim(pattern).start(grid, initial_arrays(), 1)
