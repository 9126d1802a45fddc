"""FPFC with a penalty of the user's: rho by the clients' local steps, in whose unit lambda is.

See docs/methods/fpfc.md, "rho by the local steps".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MessageType
from numpy.testing import assert_allclose
from sklearn.datasets import load_digits
from torch import Tensor, nn

from clients import FPFCClient, Minibatches, accuracy, client_app
from fl_admm_strategies import FPFC, L1, MCP, InProcessGrid, LambdaPath, SmoothedSCAD
from fl_admm_strategies.algorithms.fpfc.messages import FPFCRule
from fl_admm_strategies.maths.penalties import Penalty, Rescaled
from tests.support.federation import Federation
from tests.support.slopes import SLOPES, samples

SCAD = SmoothedSCAD(0.6)
NUM_CLIENTS = 6


def network() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def reader(context: Context) -> FPFCClient:
    """Return a client of the digits, of two kinds that name them differently."""
    client = int(context.node_config["partition-id"])
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[client::NUM_CLIENTS] / 16, dtype=torch.float32)
    y = (torch.tensor(labels[client::NUM_CLIENTS]) + 5 * (client % 2)) % 10
    train, test = Minibatches(x[:128], y[:128], 16), [(x[128:], y[128:])]
    loss, metrics = nn.CrossEntropyLoss(), {"accuracy": accuracy}
    return FPFCClient(context, network(), train, loss, test_loader=test, metrics=metrics)


def test_a_network_trains_with_a_given_lambda_by_default() -> None:
    # S is 0.2 x 5 epochs x 8 batches = 8. With rho = 1 these rounds end at chance.
    strategy = FPFC(SCAD, lr=0.2, local_epochs=5, seed=1)
    with InProcessGrid(client_app(reader, num_clients=NUM_CLIENTS, cohort=True), 1) as grid:
        strategy.start(grid, ArrayRecord(network().state_dict()), 5, evaluate_every=5)
    means = strategy.run.record.result.evaluate_metrics_clientapp[5]
    assert float(means["personal-accuracy"]) > 0.7  # type: ignore[arg-type]
    assert strategy.clusters().tolist() == [0, 1] * 3


class InUnit(nn.Module):
    """A linear regression whose parameters are those of the usual one over `unit`."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit
        start = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64)
        self.weight = nn.Parameter(start / unit)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x @ (self.unit * self.weight).T
        return outputs


def regressions(penalty: Any, unit: float = 1.0, rounds: int = 8, **settings: Any) -> Any:
    """Return a run and its messages; S is 0.3 x 10 full-gradient steps = 3."""

    def client_fn(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        batch = tuple(t.double() for t in samples(client, SLOPES[client % 2], 20, 0.3))
        options = {"test_loader": [batch], "full_batch": True}
        return FPFCClient(context, InUnit(unit), [batch], nn.functional.mse_loss, **options)

    settings = {"lr": 0.3 / unit**2, "fraction_train": 0.5, "seed": 1} | settings
    strategy = FPFC(penalty, local_epochs=10, **settings)
    grid = Federation(client_app(client_fn), NUM_CLIENTS)
    strategy.start(grid, ArrayRecord(InUnit(unit).state_dict()), rounds)
    return strategy, [
        (FPFCRule.read(str(config["rule"])).rho, config["wants-step-sum"])
        for number in range(1, rounds + 1)
        for config in [grid.phase(MessageType.TRAIN, number)[0].content["config"]]
    ]


@pytest.mark.parametrize("penalty", [SCAD, L1(0.6), MCP(0.6), LambdaPath([0.0, 0.6])])
def test_it_is_rho_1_in_another_unit_of_the_parameters(penalty: Penalty) -> None:
    # With omega = omega'/sqrt(rho), f' (omega') = f(omega), lr' = rho lr and rho' = 1 the steps (5)
    # are those of rho, and theta', v' those of g(sqrt(rho) t). 0.3/S = 0.1 is what round 1 has.
    ours, pulls = regressions(penalty)
    unit = math.sqrt(0.1)
    papers, _ = regressions(penalty, 1 / unit, lr=0.3 * 0.1, rho=1.0)
    assert [pull for pull, _ in pulls] == pytest.approx([0.1] * 8)
    assert_allclose(ours.state.pairs.omega * unit, papers.state.pairs.omega, rtol=1e-7)
    assert_allclose(ours.state.pairs.theta_norms() * unit, papers.state.pairs.theta_norms())
    assert_allclose(ours.state.pairs.mean_dual() / unit, papers.state.pairs.mean_dual(), atol=1e-12)
    found, expected = ours.diagnostics(), papers.diagnostics()
    assert_allclose(found.fusion_bounds / unit, lam_bounds(found.labels, expected.lam))
    assert ours.nu_in_use == pytest.approx(getattr(ours.penalty_in_use, "flat_from", 0.2) / 2)


def lam_bounds(labels: Any, lam: float) -> Any:
    """Return lambda (|G| - 1)/m of every cluster."""
    return lam * (np.bincount(labels) - 1) / len(labels)


def test_s_is_asked_for_until_three_clients_have_said_it() -> None:
    strategy, sent = regressions(SCAD, lr=0.2, fraction_train=0.35, rounds=4)
    turns = [sorted(metrics) for metrics in strategy.train_metrics.values()]
    assert turns[:3] == [[0, 4], [0, 4], [1, 2]]
    assert [wanted for _, wanted in sent] == [True, True, True, False]
    assert [rho for rho, _ in sent] == pytest.approx([0.1, 0.1, 0.1, 0.15])  # S = 2
    assert strategy.penalty_in_use == Rescaled(SCAD, pytest.approx(0.15**-0.5))


def test_a_rho_of_the_users_is_used_as_it_is() -> None:
    strategy, sent = regressions(SCAD, rho=0.7, rounds=2)
    assert sent == [(0.7, False)] * 2
    assert strategy.penalty_in_use is SCAD
    assert strategy.nu_in_use == 0.1
    _, sent = regressions("auto", consensus_rounds=5, rounds=2)
    assert sent == [(1.0, False)] * 2


def test_a_lambda_is_taken_back_to_before_s_was_known() -> None:
    # The first stage ends with round 2 and rho = 0.1; S is known after round 3. A falling loss
    # is the worse one here.
    path = LambdaPath([0.0, 0.6], better="higher", min_rounds=1, max_rounds=2)
    strategy, _ = regressions(path, lr=0.2, fraction_train=0.35, rounds=5)
    assert strategy.diagnostics().path.chosen == 0
    assert strategy.state.pairs.rho == pytest.approx(0.15)
