"""Flower's own FedAvg with `SGDClient`, by the numbers of the pages' three clients."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg

from clients import SGDClient, client_app
from fl_admm_strategies import InProcessGrid
from tests.fl_admm_strategies.algorithms.quadratics import A, Scalar, make_client


def test_fedavg_is_the_mean_weighted_by_the_examples() -> None:
    # w_i = .19, -.36, 1.92 and w = (10 * .19 - 20 * .36 + 30 * 1.92)/60 = .8716666667; then
    # .89605, .1978666667, 2.2338: see test_fedprox.
    app = client_app(lambda context: make_client(SGDClient, context).to_client())
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=len(A))
    config = ConfigRecord({"lr": 0.1, "local-epochs": 2})
    first = ArrayRecord(Scalar().state_dict())
    result = strategy.start(InProcessGrid(app, len(A)), first, 2, train_config=config)
    assert result.arrays["w"].numpy().item() == pytest.approx(1.3321972222, abs=1e-8)
